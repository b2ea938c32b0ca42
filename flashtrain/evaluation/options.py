"""What a user may choose about an evaluation; the fields are the keys of conf/eval/*.yaml."""

from dataclasses import dataclass, replace

MOST_DEFAULT_LENGTHS = 8


@dataclass
class EvalOptions:
    """Options of the perplexity curves; lengths are in tokens, a document's prefix token included."""

    lengths: list[int] | None
    """Lengths to score, increasing: each is a first-L-tokens length and a context length. null: halvings of twice the
    training length, or of the learned positions where they end before that."""
    targets_per_anchor: int
    """Targets before each anchor, whose context varies; fewer than the shortest length."""
    max_documents: int | None
    """Documents whose first tokens are scored, at most, evenly spaced in corpus order; null: all."""
    max_anchors: int | None
    """Anchors in documents, at most, evenly spaced in corpus order; null: all."""
    batch_tokens: int
    """Tokens in one forward pass, at most; a longer window goes alone."""

    def resolve(self, training_length: int, max_positions: int | None) -> "EvalOptions":
        """Return the options with the lengths written out."""
        if self.lengths is not None:
            return self
        longest = min(2 * training_length, max_positions or 2 * training_length)
        halvings = [longest >> times for times in range(MOST_DEFAULT_LENGTHS)]
        lengths = sorted(length for length in halvings if length > self.targets_per_anchor)
        return replace(self, lengths=lengths or [longest])

    def validate(self, max_positions: int | None) -> list[str]:
        """Return every problem, one sentence each; `max_positions` is the model's limit, None without one."""
        problems = [
            f"eval.{name}={value} must be at least 1"
            for name in ("targets_per_anchor", "max_documents", "max_anchors", "batch_tokens")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not self.lengths:
            return [*problems, "eval.lengths is empty; give at least one, as in eval.lengths=[512,1024]"]
        shortest, longest = min(self.lengths), max(self.lengths)
        if list(self.lengths) != sorted(set(self.lengths)):
            problems.append(f"eval.lengths={list(self.lengths)} must increase, each length once")
        if shortest <= self.targets_per_anchor:
            problems.append(
                f"eval.targets_per_anchor={self.targets_per_anchor} leaves no context at the shortest of "
                f"eval.lengths, {shortest}; it must be below every length"
            )
        if max_positions is not None and longest > max_positions:
            problems.append(
                f"eval.lengths reaches {longest} tokens and the model's learned positions end at "
                f"{max_positions}; lower eval.lengths, or train with model.positions=rope"
            )
        return problems
