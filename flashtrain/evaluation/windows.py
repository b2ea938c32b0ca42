"""Which windows of which documents an evaluation feeds, and which of their tokens it scores.

A document y is `[prefix] + tokens`; a window is some of its tokens in a row, never across two documents.
Everything here is a deterministic function of document lengths: no model, no tokens, no randomness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashtrain.errors import UserError


@dataclass(frozen=True)
class Windows:
    """Windows y[start : start + length] that are fed whole; the last `num_targets` tokens of each are scored.

    A target sees the tokens of its window that stand before it, so `num_targets < length`.
    """

    length: int
    num_targets: int
    documents: np.ndarray  # (windows,) int64: index of the document
    starts: np.ndarray  # (windows,) int64: position in the document of the window's first token

    def __post_init__(self):
        assert 1 <= self.num_targets < self.length

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True)
class Anchors:
    """Places in documents that fix a set of targets: the tokens just before position `end`."""

    documents: np.ndarray  # (anchors,) int64
    ends: np.ndarray  # (anchors,) int64

    def __len__(self) -> int:
        return len(self.documents)

    def windows(self, length: int, num_targets: int) -> Windows:
        """The same targets with `length` tokens fed: y[end - length : end]."""
        return Windows(length, num_targets, self.documents, self.ends - length)

    def pick(self, limit: int | None) -> "Anchors":
        """At most `limit` of the anchors, evenly spaced in corpus order."""
        chosen = evenly_spaced(len(self), limit)
        return Anchors(self.documents[chosen], self.ends[chosen])


def evenly_spaced(count: int, limit: int | None) -> np.ndarray:
    """Indices of at most `limit` of `count` things, evenly spaced from the first on; all of them for None."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.arange(limit) * count // limit


def reached_lengths(document_tokens: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """The lengths that at least one document has; raises UserError when there is none."""
    longest = int(document_tokens.max(initial=0))
    reached = [length for length in lengths if length <= longest]
    if not reached:
        raise UserError(
            f"eval.lengths starts at {min(lengths)} tokens and the longest validation document has "
            f"{longest}; lower eval.lengths, or give longer documents or a larger data.validation_fraction"
        )
    return reached


def documents_of(document_tokens: np.ndarray, length: int) -> np.ndarray:
    """Indices of the documents with at least `length` tokens."""
    return np.flatnonzero(document_tokens >= length)


def opening_windows(documents: np.ndarray, length: int) -> Windows:
    """The first `length` tokens of each document; all but the very first are scored."""
    return Windows(length, length - 1, documents, np.zeros_like(documents))


def anchors_every(document_tokens: np.ndarray, spacing: int) -> Anchors:
    """All anchors at spacing, 2 * spacing, ... that lie within their document."""
    counts = document_tokens // spacing
    documents = np.repeat(np.arange(len(counts)), counts)
    first_of_document = np.repeat(np.cumsum(counts) - counts, counts)
    ordinal = np.arange(len(documents)) - first_of_document
    return Anchors(documents, (ordinal + 1) * spacing)
