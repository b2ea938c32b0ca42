"""Which windows of which documents an evaluation feeds, and which of their tokens it scores.

A document y is `[prefix] + tokens`, or its tokens alone; a window is some of y in a row, never across two documents.
Everything here is a deterministic function of document lengths: no model, no tokens, no randomness.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flashtrain.errors import UserError

OPENING, CONTEXT, STRIDED, SHORT, RECALL = "opening", "context", "strided", "short", "recall"
PURPOSES = (OPENING, CONTEXT, STRIDED, SHORT, RECALL)
"""What windows are scored for: first tokens of documents, the same targets in contexts of several lengths, whole
documents, targets of openings in a short context, and answers to queries."""


@dataclass(frozen=True)
class Windows:
    """Windows y[start : start + length] that are fed whole, and of each the targets y[stop - num_targets : stop].

    A target sees the tokens of its window that stand before it: start < stop - num_targets, stop <= start + length + 1.
    """

    purpose: str  # one of PURPOSES
    length: int  # tokens fed
    documents: np.ndarray  # (windows,) int64: index of the document
    starts: np.ndarray  # (windows,) int64: position in the document of the window's first token
    stops: np.ndarray  # (windows,) int64: position behind the last target
    num_targets: np.ndarray  # (windows,) int64

    def __post_init__(self):
        assert (self.num_targets >= 1).all() and (self.starts < self.stops - self.num_targets).all()
        assert (self.stops <= self.starts + self.length + 1).all()

    def __len__(self) -> int:
        return len(self.documents)

    def batches(self, batch_tokens: int) -> Iterator["Windows"]:
        """The windows in order, as many at a time as are at most `batch_tokens` tokens, and at least one."""
        rows = max(1, batch_tokens // self.length)
        columns = (self.documents, self.starts, self.stops, self.num_targets)
        for first in range(0, len(self), rows):
            yield Windows(self.purpose, self.length, *(column[first : first + rows] for column in columns))


def tokens_fed(all_windows: Iterable[Windows]) -> int:
    return sum(len(windows) * windows.length for windows in all_windows)


@dataclass(frozen=True)
class Anchors:
    """Places in documents that fix a set of targets: the tokens just before position `end`."""

    documents: np.ndarray  # (anchors,) int64
    ends: np.ndarray  # (anchors,) int64

    def __len__(self) -> int:
        return len(self.documents)

    def windows(self, length: int, num_targets: int) -> Windows:
        """The same targets with `length` tokens fed: y[end - length : end]."""
        counts = np.full(len(self), num_targets)
        return Windows(CONTEXT, length, self.documents, self.ends - length, self.ends, counts)

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
    starts = np.zeros_like(documents)
    return Windows(OPENING, length, documents, starts, starts + length, starts + length - 1)


def anchors_every(document_tokens: np.ndarray, spacing: int) -> Anchors:
    """All anchors at spacing, 2 * spacing, ... that lie within their document."""
    counts = document_tokens // spacing
    documents, ordinal = _numbered(counts)
    return Anchors(documents, (ordinal + 1) * spacing)


def strided_windows(documents: np.ndarray, document_tokens: np.ndarray, window: int, stride: int) -> list[Windows]:
    """Windows that score every token of the documents but the first, once, with up to `window` tokens before each.

    The first window of a document scores all that it predicts; each next ends `stride` tokens later, or where the
    document ends, and scores what is new, with `window - stride + 1` to `window` tokens of context. stride == window
    is disjoint windows, as lm-eval's rolling log-likelihood has them, stride == 1 an exact sliding window. Windows of
    documents with fewer tokens than `window` are shorter: an entry of the list for each length.

    documents: (documents,) indices, of at least 2 tokens each. document_tokens: those of all documents.
    """
    predicted = document_tokens[documents] - 1
    first = np.minimum(window, predicted)
    found = []
    for length in np.unique(first).tolist():
        chosen = first == length
        last = predicted[chosen]
        which, ordinal = _numbered(1 + -(-(last - length) // stride))
        ends = np.minimum(length + ordinal * stride, last[which])
        before = np.where(ordinal == 0, 0, length + (ordinal - 1) * stride)
        found.append(Windows(STRIDED, length, documents[chosen][which], ends - length, ends + 1, ends - before))
    return found


def short_windows(documents: np.ndarray, length: int, context: int, step: int) -> Windows:
    """Targets of the first `length` tokens from position `context` on, with `context` to `context + step - 1` before.

    The last window of a document has fewer targets where `step` does not divide length - context, and more context.
    """
    fed = context + step
    which, ordinal = _numbered(np.full(len(documents), -(-(length - context) // step)))
    stops = np.minimum(fed + ordinal * step, length)
    before = context + ordinal * step
    return Windows(SHORT, fed, documents[which], stops - fed, stops, stops - before)


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which, ordinal): thing i is there counts[i] times, numbered from 0 each time."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
