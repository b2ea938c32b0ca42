"""Score windows with a model and keep one row per target; every metric is a reduction of such a table.

The model is a callable, so that this file knows no device, head or precision. The windows of a call are
equally long: there is no padding that could be scored by mistake.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from flashtrain.evaluation.windows import Windows

NOT_SCORED = -100  # cross-entropy's ignore index

# nll(inputs (B, L) int64, targets (B, L) int64) -> (B, L) floating point, in nats: inputs[:, : i + 1] predict
# targets[:, i]. Both come on the CPU, the answer may lie on any device; it is not read where NOT_SCORED.
NllFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TokenStream(Protocol):
    """Documents end to end: document d is tokens[offsets[d] : offsets[d + 1]], its prefix token first."""

    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class TargetTable:
    """One row per scored target, as columns of equal length."""

    document: np.ndarray  # int32, index of the document
    position: np.ndarray  # int32, index of the target in its document, whose prefix token is index 0
    context: np.ndarray  # int32, tokens the model saw before the target
    bytes: np.ndarray  # int32, UTF-8 bytes of text the target stands for; 0 for a special token
    nll: np.ndarray  # float32, negative log-likelihood in nats

    def __len__(self) -> int:
        return len(self.nll)

    def where(self, mask: np.ndarray) -> "TargetTable":
        return TargetTable(*(column[mask] for column in vars(self).values()))


def score(
    nll: NllFunction,
    stream: TokenStream,
    windows: Windows,
    *,
    bytes_per_token: np.ndarray,
    batch_tokens: int,
    advance: Callable[[int], object],
) -> TargetTable:
    """Return the table of the windows' targets, in batches of at most `batch_tokens` tokens or one window.

    bytes_per_token: (vocabulary,) integers. advance: called after each batch with the number of tokens fed.
    """
    length, num_targets = windows.length, windows.num_targets
    scored = slice(length - 1 - num_targets, length - 1)  # the token before each target predicts it
    nlls, target_bytes = [], []
    for tokens_BL in _batches(stream, windows, max(1, batch_tokens // length)):
        targets_BL = np.full_like(tokens_BL, NOT_SCORED)
        targets_BL[:, scored] = tokens_BL[:, length - num_targets :]
        with torch.no_grad():
            nll_BL = nll(torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL))
        nlls.append(nll_BL[:, scored].float().cpu().numpy())
        target_bytes.append(bytes_per_token[targets_BL[:, scored]])
        advance(tokens_BL.size)

    context = np.arange(length - num_targets, length)
    position = windows.starts[:, None] + context
    return TargetTable(
        document=np.repeat(windows.documents, num_targets).astype(np.int32),
        position=position.ravel().astype(np.int32),
        context=np.tile(context, len(windows)).astype(np.int32),
        bytes=np.concatenate(target_bytes).ravel().astype(np.int32),
        nll=np.concatenate(nlls).ravel(),
    )


def _batches(stream: TokenStream, windows: Windows, rows: int) -> Iterator[np.ndarray]:
    """Yield the tokens of the windows, (at most `rows`, length) int64."""
    starts = stream.offsets[windows.documents] + windows.starts
    for first in range(0, len(starts), rows):
        batch = [stream.tokens[start : start + windows.length] for start in starts[first : first + rows]]
        yield np.stack(batch).astype(np.int64)
