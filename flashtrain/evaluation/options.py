"""What a user may choose about an evaluation; the fields are the keys of conf/eval/*.yaml."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashtrain.evaluation.key_tokens import short_context
from flashtrain.evaluation.scoring import PREFIXES

SELF = "self"
MOST_DEFAULT_LENGTHS = 8
COUNTS = ("targets_per_anchor", "max_documents", "batch_tokens", "prefill_tokens", "window", "stride")


@dataclass
class EvalOptions:
    """Options of the perplexity curves; lengths are in tokens, a document's prefix token included."""

    lengths: list[int] | None
    """Lengths to score, increasing: each is a first-L-tokens length and a context length. null: halvings of twice the
    training length, or of the learned positions where they end before that; of data=recall those that rows may have."""
    targets_per_anchor: int
    """Targets before each anchor, whose context varies; fewer than the shortest length."""
    max_documents: int | None
    """Documents whose first tokens are scored, at most, and so many whole ones; evenly spaced in corpus order; null:
    all."""
    max_anchors: int | None
    """Anchors in documents, at most, evenly spaced in corpus order; null: all; 0: none, and no perplexity against
    context."""
    window: int | None
    """Tokens that each target of whole documents may see, scored in strided windows; null: they are not scored."""
    stride: int | None
    """Tokens from one window's end to the next, at most `window`; null: `window`, which makes windows disjoint."""
    prefix: str
    """document: the tokenizer's prefix token stands before each document; window: it also replaces the first token of
    each window inside a document; none: there is none, and a document's first token is not scored."""
    key_tokens: str | None
    """self: the model chooses its key tokens; or the key_tokens.parquet of an evaluation that did; null: none."""
    batch_tokens: int
    """Tokens in one forward pass, at most; a longer window goes alone."""
    prefill_tokens: int | None
    """Tokens of a window that go through the model at once, over a cache of the keys and values before them; null: all,
    in one forward."""

    def resolve(
        self, training_length: int, max_positions: int | None, fits: Callable[[int], bool] | None = None
    ) -> "EvalOptions":
        """Return the options with lengths and stride written out.

        fits: whether a length may be one of those that a null stands for; None: one above `targets_per_anchor` may.
        """
        stride = self.window if self.stride is None else self.stride
        fits = fits or (lambda length: length > self.targets_per_anchor)
        return replace(self, lengths=self._lengths(training_length, max_positions, fits), stride=stride)

    def _lengths(self, training_length: int, max_positions: int | None, fits: Callable[[int], bool]) -> list[int]:
        if self.lengths is not None:
            return self.lengths
        longest = min(2 * training_length, max_positions or 2 * training_length)
        halvings = [longest >> times for times in range(MOST_DEFAULT_LENGTHS)]
        lengths = sorted(filter(fits, halvings))
        return lengths or [longest]

    def fed_lengths(self) -> list[int]:
        """Numbers of tokens that windows may have, the fewest of whole documents among them; of resolved options."""
        fed = list(self.lengths)
        if self.window is not None:
            fed += [1, self.window]
        if self.key_tokens == SELF:
            fed += [sum(short_context(length)) for length in self.lengths]
        return fed

    def validate(self, max_positions: int | None) -> list[str]:
        """Return every problem, one sentence each; `max_positions` is the model's limit, None without one."""
        problems = self.validate_lengths(max_positions) + self._strided(max_positions)
        if self.prefix not in PREFIXES:
            problems.append(f"eval.prefix={self.prefix} is not one of {', '.join(PREFIXES)}")
        shortest = min(self.lengths, default=2)
        if shortest < 2:
            problems.append(f"eval.lengths has {shortest}, and the least is 2, a token and what follows it")
        elif self.lengths and self.max_anchors != 0 and shortest <= self.targets_per_anchor:
            problems.append(
                f"eval.targets_per_anchor={self.targets_per_anchor} leaves no context at the shortest of "
                f"eval.lengths, {shortest}; it must be below every length, or say eval.max_anchors=0"
            )
        return problems

    def validate_lengths(self, max_positions: int | None) -> list[str]:
        """Return the problems of counts and lengths, whatever is measured at these."""
        problems = [
            f"eval.{name}={value} must be at least {least}"
            for name, least in (*((name, 1) for name in COUNTS), ("max_anchors", 0))
            if (value := getattr(self, name)) is not None and value < least
        ]
        if not self.lengths:
            return [*problems, "eval.lengths is empty; give at least one, as in eval.lengths=[512,1024]"]
        if list(self.lengths) != sorted(set(self.lengths)):
            problems.append(f"eval.lengths={list(self.lengths)} must increase, each length once")
        if max_positions is not None and (longest := max(self.lengths)) > max_positions:
            problems.append(
                f"eval.lengths reaches {longest} tokens and the model's learned positions end at "
                f"{max_positions}; lower eval.lengths, or train with model.positions=rope"
            )
        return problems

    def _strided(self, max_positions: int | None) -> list[str]:
        if self.window is None:
            if self.stride is None:
                return []
            return [f"eval.stride={self.stride} is of eval.window, which is null; say eval.window=..., too"]
        problems = []
        if self.stride is not None and self.stride > self.window:
            problems.append(
                f"eval.stride={self.stride} would pass over tokens between windows of eval.window={self.window}; it "
                "must be at most that"
            )
        if max_positions is not None and self.window > max_positions:
            problems.append(
                f"eval.window={self.window} is beyond the model's learned positions, which end at {max_positions}; "
                "lower it"
            )
        return problems
