"""Keys and values of the tokens that a model has read, for going on with the tokens that follow.

A layer that sees all keys keeps them in one buffer made for the whole sequence; one with a window keeps the last keys
that its window can still show. So a sequence of any length is read in pieces, and memory beyond the keys and values
is that of one piece.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class LayerCache(Protocol):
    """What one layer keeps."""

    def extend(self, k_BSHD: Tensor, v_BSHD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the next tokens; return the keys and values that these tokens see."""


class KeyValueCache:
    """What the layers of one model keep of one batch of sequences, all `length` tokens long when they end.

    Args:
        windows: keys that a query sees, its own included, layer by layer; None: all.
        length: tokens of the whole sequence.
    """

    def __init__(self, windows: Sequence[int | None], length: int) -> None:
        self.length = length
        self.num_read = 0
        self.layers: list[LayerCache] = [
            _AllKeys(length) if window is None else _LastKeys(window) for window in windows
        ]


class _AllKeys:
    def __init__(self, length: int) -> None:
        self._length = length
        self._num_kept = 0

    def extend(self, k_BSHD: Tensor, v_BSHD: Tensor) -> tuple[Tensor, Tensor]:
        if self._num_kept == 0:
            B, _, H, D = k_BSHD.shape
            self._kept = k_BSHD.new_empty((2, B, self._length, H, D))
        start, self._num_kept = self._num_kept, self._num_kept + k_BSHD.shape[1]
        self._kept[0, :, start : self._num_kept] = k_BSHD
        self._kept[1, :, start : self._num_kept] = v_BSHD
        return tuple(self._kept[:, :, : self._num_kept])


class _LastKeys:
    def __init__(self, window: int) -> None:
        self._window = window
        self._kept: tuple[Tensor, Tensor] | None = None

    def extend(self, k_BSHD: Tensor, v_BSHD: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is not None:
            k_BSHD, v_BSHD = (torch.cat(pair, dim=1) for pair in zip(self._kept, (k_BSHD, v_BSHD), strict=True))
        first = max(k_BSHD.shape[1] - (self._window - 1), 0)
        self._kept = (k_BSHD[:, first:].clone(), v_BSHD[:, first:].clone())
        return k_BSHD, v_BSHD
