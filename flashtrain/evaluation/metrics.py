"""Reductions of target tables: perplexity, bits per byte, loss by position.

Sums are in float64 and divided once, by the number of targets that were really scored. Means of windows,
batches or documents are never averaged, except where the name says macro.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flashtrain.evaluation.scoring import TargetTable


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


def ppl_at_length(openings: Mapping[int, TargetTable]) -> dict[int, Score]:
    """Score the first L tokens (targets at positions 1 to L - 1) of the same documents, for every L.

    openings: for each L a table of the first L tokens, or more, of each document. One table, of one forward pass,
    may serve all L where no prediction depends on how many tokens follow: for a causal model with learned or static
    rotary positions, not where the rotary frequencies follow the input's length.
    """
    return {length: summarize(_first(table, length)) for length, table in openings.items()}


def ppl_at_length_macro(openings: Mapping[int, TargetTable]) -> dict[int, float]:
    """Unweighted mean of the documents' perplexities at L; YaRN's published curves are of this kind."""
    return {length: _mean_document_ppl(_first(table, length)) for length, table in openings.items()}


def loss_by_position(table: TargetTable) -> dict[tuple[int, int], Score]:
    """Score targets by position in their document, in ranges [1, 2), [2, 4), [4, 8), ... to the last one."""
    end = int(table.position.max()) + 1
    edges = [1]
    while edges[-1] < end:
        edges.append(min(2 * edges[-1], end))
    return {
        (start, stop): summarize(table.where((start <= table.position) & (table.position < stop)))
        for start, stop in pairwise(edges)
    }


def _first(table: TargetTable, length: int) -> TargetTable:
    return table.where(table.position < length)


def _mean_document_ppl(table: TargetTable) -> float:
    _, document = np.unique(table.document, return_inverse=True)
    losses = np.bincount(document, weights=table.nll) / np.bincount(document)
    return sum(map(_exp, losses)) / len(losses)


def _exp(loss: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(loss)))
