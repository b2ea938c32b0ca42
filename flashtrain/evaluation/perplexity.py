"""The perplexity curves of one model on one corpus: choose windows, score them, reduce, say what was done.

One forward over the first tokens of the documents gives perplexity at every length and loss by position, or one
for each length where predictions depend on how many tokens follow; perplexity against context scores the same
targets once per context length.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flashtrain.evaluation.metrics import (
    Score,
    loss_by_position,
    ppl_at_length,
    ppl_at_length_macro,
    summarize,
)
from flashtrain.evaluation.options import EvalOptions
from flashtrain.evaluation.scoring import NllFunction, TokenStream, score
from flashtrain.evaluation.windows import (
    Windows,
    anchors_every,
    documents_of,
    evenly_spaced,
    opening_windows,
    reached_lengths,
)


@dataclass(frozen=True)
class Conditions:
    """What the figures depend on beside the options; the caller knows, the reports repeat it."""

    model: str
    step: int
    training_length: int
    positions: str
    attention: str
    dtype: str
    device: str
    corpus: str
    corpus_fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    prefix_id: int


@dataclass(frozen=True)
class Coverage:
    """How much of the validation documents was scored."""

    documents: int
    documents_long_enough: int
    documents_in_corpus: int
    longest_document: int
    anchors: int
    anchors_in_corpus: int


@dataclass(frozen=True)
class PerplexityCurves:
    """All results of one evaluation; no document has as many tokens as the lengths in `unreached`."""

    at_length: dict[int, Score]
    at_length_macro: dict[int, float]
    vs_context: dict[int, Score]
    by_position: dict[tuple[int, int], Score]
    unreached: tuple[int, ...]
    coverage: Coverage
    options: EvalOptions
    conditions: Conditions

    @property
    def longest(self) -> int:
        """The longest length that was scored: documents shorter than this were left out at every length."""
        return max(self.at_length)

    def beyond_training(self, length: int) -> bool:
        """Whether `length` tokens are more than the model ever saw in a row while training."""
        return length > self.conditions.training_length


def perplexity_curves(
    nll: NllFunction,
    stream: TokenStream,
    *,
    bytes_per_token: np.ndarray,
    options: EvalOptions,
    conditions: Conditions,
    follows_length: bool,
    console: Console,
) -> PerplexityCurves:
    """Score the validation documents and return every curve; a progress bar runs on `console` meanwhile.

    The model behind `nll` is in evaluation mode and good for the lengths (EvalOptions.validate). Documents
    shorter than the longest length that any reaches are left out at every length, so that all lengths are
    about the same documents. Raises UserError when no document has the shortest length.

    follows_length: the first L tokens have a forward of their own for every L, as dynamic rotary scaling wants it;
        loss by position is then of the longest.
    """
    document_tokens = np.diff(stream.offsets)
    lengths = reached_lengths(document_tokens, options.lengths)
    long_enough = documents_of(document_tokens, lengths[-1])
    opened = long_enough[evenly_spaced(len(long_enough), options.max_documents)]
    openings = {length: opening_windows(opened, length) for length in (lengths if follows_length else lengths[-1:])}
    all_anchors = anchors_every(document_tokens, lengths[-1])
    anchors = all_anchors.pick(options.max_anchors)
    in_context = [anchors.windows(length, options.targets_per_anchor) for length in lengths]

    with _progress(console) as progress:
        task = progress.add_task("perplexity", total=_tokens([*openings.values(), *in_context]))

        def score_windows(windows: Windows):
            return score(
                nll,
                stream,
                windows,
                bytes_per_token=bytes_per_token,
                batch_tokens=options.batch_tokens,
                advance=lambda tokens: progress.advance(task, tokens),
            )

        opening_targets = {length: score_windows(windows) for length, windows in openings.items()}
        vs_context = {windows.length: summarize(score_windows(windows)) for windows in in_context}

    longest = opening_targets[lengths[-1]]
    of_length = {length: opening_targets.get(length, longest) for length in lengths}
    return PerplexityCurves(
        at_length=ppl_at_length(of_length),
        at_length_macro=ppl_at_length_macro(of_length),
        vs_context=vs_context,
        by_position=loss_by_position(longest),
        unreached=tuple(length for length in options.lengths if length not in lengths),
        coverage=Coverage(
            documents=len(opened),
            documents_long_enough=len(long_enough),
            documents_in_corpus=len(document_tokens),
            longest_document=int(document_tokens.max()),
            anchors=len(anchors),
            anchors_in_corpus=len(all_anchors),
        ),
        options=options,
        conditions=conditions,
    )


def _tokens(all_windows: Iterable[Windows]) -> int:
    return sum(len(windows) * windows.length for windows in all_windows)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
