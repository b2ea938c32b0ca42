"""Score windows with a model and keep one row per target; every metric is a reduction of such a table.

The model is a callable, so that this file knows no device, head or precision. The windows of a call are
equally long: there is no padding that could be scored by mistake. Several ranks take the batches in turn, the same
ones in the same order as one would, and each has the whole table in the end.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol

import numpy as np
import torch

from flashtrain import ranks
from flashtrain.evaluation.journal import Journal
from flashtrain.evaluation.table import TargetTable, concatenate
from flashtrain.evaluation.windows import PURPOSES, Windows, tokens_fed

NOT_SCORED = -100  # cross-entropy's ignore index

# nll(inputs (B, L) int64, targets (B, L) int64) -> (B, L) floating point, in nats: inputs[:, : i + 1] predict
# targets[:, i]. Both come on the CPU, the answer may lie on any device; it is not read where NOT_SCORED.
NllFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PREFIXES = ("document", "window", "none")
"""Where the prefix token stands: before each document, there and in place of each window's first token, or nowhere."""


class TokenStream(Protocol):
    """Documents end to end: document d is tokens[offsets[d] : offsets[d + 1]], its prefix token first."""

    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Documents:
    """The documents of a stream as they are scored: with their prefix token first, or without."""

    stream: TokenStream
    prefix: str  # one of PREFIXES

    @property
    def starts(self) -> np.ndarray:
        """(documents,) int64: where each begins in the stream."""
        return self.stream.offsets[:-1] + (self.prefix == "none")

    @property
    def num_tokens(self) -> np.ndarray:
        """(documents,) int64"""
        return np.maximum(self.stream.offsets[1:] - self.starts, 0)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """y[start : stop] of that document, int64."""
        first = self.starts[document]
        return self.stream.tokens[first + start : first + stop].astype(np.int64)

    def fed(self, document: int, start: int, stop: int) -> np.ndarray:
        """What a window y[start : stop] feeds, int64: the tokens, or the document's prefix in place of the first."""
        tokens = self.tokens(document, start, stop)
        if self.prefix == "window":
            first = self.stream.offsets[document]
            tokens[:1] = self.stream.tokens[first : first + 1]
        return tokens


def score(
    nll: NllFunction,
    documents: Documents,
    all_windows: Sequence[Windows],
    *,
    bytes_per_token: np.ndarray,
    batch_tokens: int,
    advance: Callable[[int], object],
    journal: Journal | None = None,
) -> TargetTable:
    """Return the table of the windows' targets, in batches of at most `batch_tokens` tokens or one window.

    bytes_per_token: (vocabulary,) integers. advance: called with the tokens of known batches, then of each round.
    journal: keeps what batches came to; what it has already is not computed again. None on other ranks than the first.
    """
    known = journal.take(batch.num_targets.sum() for batch in _batches(all_windows, batch_tokens)) if journal else []
    nlls = ranks.gathered(known)[0]
    left = _batches(all_windows, batch_tokens)
    advance(tokens_fed(islice(left, len(nlls))))
    for batches, values in ranks.in_turn(left, lambda batch: _score_batch(nll, documents, batch)):
        if journal:
            journal.append(np.concatenate(values))
        nlls += values
        advance(tokens_fed(batches))
    return _table(documents, all_windows, np.concatenate(nlls), bytes_per_token)


def _batches(all_windows: Iterable[Windows], batch_tokens: int) -> Iterator[Windows]:
    return (batch for windows in all_windows for batch in windows.batches(batch_tokens))


def _score_batch(nll: NllFunction, documents: Documents, batch: Windows) -> np.ndarray:
    """(targets,) float32, window after window."""
    columns = (batch.documents, batch.starts, batch.stops, batch.num_targets)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    inputs_BL = np.stack([documents.fed(d, start, start + batch.length) for d, start, _, _ in rows])
    targets_BL = np.full_like(inputs_BL, NOT_SCORED)
    for row, (document, start, stop, count) in zip(targets_BL, rows, strict=True):
        row[stop - count - 1 - start : stop - 1 - start] = documents.tokens(document, stop - count, stop)
    with torch.no_grad():
        nll_BL = nll(torch.from_numpy(inputs_BL), torch.from_numpy(targets_BL))
    return nll_BL.float().cpu().numpy()[targets_BL != NOT_SCORED]


def _table(
    documents: Documents, all_windows: Sequence[Windows], nll: np.ndarray, bytes_per_token: np.ndarray
) -> TargetTable:
    """All columns but the last follow from the windows and the documents."""
    parts, first_row, first_window = [], 0, 0
    for windows in all_windows:
        counts = windows.num_targets
        stop_row = first_row + int(counts.sum())
        which = np.repeat(np.arange(len(windows)), counts)
        position = np.arange(len(which)) - np.repeat(np.cumsum(counts) - windows.stops, counts)
        document = windows.documents[which]
        offset, num_bytes = _text_places(documents, document, position, bytes_per_token)
        parts.append(
            TargetTable(
                purpose=np.full(len(which), PURPOSES.index(windows.purpose), np.int8),
                length=np.full(len(which), windows.length, np.int32),
                window=(first_window + which).astype(np.int32),
                document=document.astype(np.int32),
                position=position.astype(np.int32),
                context=(position - windows.starts[which]).astype(np.int32),
                offset=offset,
                bytes=num_bytes,
                nll=nll[first_row:stop_row],
            )
        )
        first_row, first_window = stop_row, first_window + len(windows)
    return concatenate(parts)


def _text_places(
    documents: Documents, document: np.ndarray, position: np.ndarray, bytes_per_token: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where each target begins in its document's text, int64, and how long it is, int32, in bytes."""
    offset, num_bytes = np.empty(len(document), np.int64), np.empty(len(document), np.int32)
    edges = [0, *(np.flatnonzero(np.diff(document)) + 1).tolist(), len(document)]
    for rows in (slice(start, stop) for start, stop in pairwise(edges)):
        places = position[rows]
        of_token = bytes_per_token[documents.tokens(document[rows.start], 0, int(places.max()) + 1)]
        num_bytes[rows] = of_token[places]
        offset[rows] = (np.cumsum(of_token) - of_token)[places]
    return offset, num_bytes
