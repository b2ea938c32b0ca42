"""Reductions of target tables: perplexity, bits per byte, loss by position.

Sums are in float64 and divided once, by the number of targets that were really scored. Means of windows,
batches or documents are never averaged, except where the name says macro.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flashtrain.evaluation.table import TargetTable
from flashtrain.evaluation.windows import CONTEXT, OPENING, STRIDED


@dataclass(frozen=True)
class Score:
    """Sums over a set of targets; text targets are those that stand for bytes, as special tokens do not."""

    nll_sum: float
    targets: int
    text_nll_sum: float
    bytes: int
    documents: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per target, in nats."""
        return self.nll_sum / self.targets

    @property
    def perplexity(self) -> float:
        """exp(loss), inf where that overflows."""
        return _exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the scored text, comparable across tokenizers; NaN without text."""
        return self.text_nll_sum / (math.log(2) * self.bytes) if self.bytes else math.nan


def summarize(table: TargetTable) -> Score:
    """Reduce all rows of a table."""
    is_text = table.bytes > 0
    return Score(
        nll_sum=float(table.nll.sum(dtype=np.float64)),
        targets=len(table),
        text_nll_sum=float(table.nll[is_text].sum(dtype=np.float64)),
        bytes=int(table.bytes.sum(dtype=np.int64)),
        documents=len(np.unique(table.document)),
    )


def ppl_at_length(table: TargetTable, lengths: Iterable[int]) -> dict[int, Score]:
    """Score the first L tokens (targets at positions 1 to L - 1) of the same documents, for every L.

    The shortest openings of L tokens or more serve: where only the longest were fed, one forward pass serves all L, as
    is right where no prediction depends on how many tokens follow (a causal model with learned or static rotary
    positions, not where the rotary frequencies follow the input's length).
    """
    return {length: summarize(_first_tokens(table, length)) for length in lengths}


def ppl_at_length_macro(table: TargetTable, lengths: Iterable[int]) -> dict[int, float]:
    """Unweighted mean of the documents' perplexities at L; YaRN's published curves are of this kind."""
    return {length: _mean_document_ppl(_first_tokens(table, length)) for length in lengths}


def ppl_vs_context(table: TargetTable) -> dict[int, Score]:
    """Score the same targets with each number of tokens fed."""
    return {length: summarize(table.of(CONTEXT, length)) for length in table.lengths(CONTEXT)}


def ppl_strided(table: TargetTable) -> Score:
    """Score whole documents, by the windows and the stride that they were fed in."""
    return summarize(table.of(STRIDED))


def loss_by_position(table: TargetTable) -> dict[tuple[int, int], Score]:
    """Score the targets of the longest openings by position, in ranges [1, 2), [2, 4), [4, 8), ... to the last one."""
    longest = longest_openings(table)
    end = int(longest.position.max()) + 1
    edges = [1]
    while edges[-1] < end:
        edges.append(min(2 * edges[-1], end))
    return {
        (start, stop): summarize(longest.where((start <= longest.position) & (longest.position < stop)))
        for start, stop in pairwise(edges)
    }


def word_perplexity(score: Score, words: int) -> float:
    """exp(NLL of the documents' text / words), as lm-eval has it."""
    return _exp(score.text_nll_sum / words)


def byte_perplexity(score: Score) -> float:
    """exp(NLL of the documents' text / UTF-8 bytes) = 2 ** bits per byte, as lm-eval has it."""
    return _exp(score.text_nll_sum / score.bytes) if score.bytes else math.nan


def longest_openings(table: TargetTable) -> TargetTable:
    """The targets of the longest first tokens that were fed."""
    return table.of(OPENING, max(table.lengths(OPENING)))


def _first_tokens(table: TargetTable, length: int) -> TargetTable:
    """The targets of the first `length` tokens, from the shortest openings that have as many."""
    fed = min(opening for opening in table.lengths(OPENING) if opening >= length)
    openings = table.of(OPENING, fed)
    return openings.where(openings.position < length)


def _mean_document_ppl(table: TargetTable) -> float:
    _, document = np.unique(table.document, return_inverse=True)
    losses = np.bincount(document, weights=table.nll) / np.bincount(document)
    return sum(map(_exp, losses)) / len(losses)


def _exp(loss: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(loss)))
