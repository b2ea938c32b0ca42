"""The mask type: query i sees the keys lo(i) <= j < hi(i), with lo and hi never decreasing along the row.

This file is the only place that says which keys a query sees. Kernels read `left` and `right`; everybody
else asks `bounds`, `dense` or `visible`. Which tiles of a kernel those keys fall into is geometry's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Intervals:
    """Which keys each query sees: FlashAttention's (left, right) pair of extra keys around its own.

    The sequences are aligned at their ends (bottom-right): query i stands on key `p = i + Sk - Sq` and sees
    `p - left <= j <= p + right` within `0 <= j < Sk`; None is unbounded. A query that stands before the first
    key by more than `right` sees nothing. Build one with `full`, `causal` or `window`.

    Raises ValueError for a negative `left` or `right`.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, extra in (("left", self.left), ("right", self.right)):
            if extra is not None and extra < 0:
                raise ValueError(f"intervals: {name} counts extra keys and is {extra}; use None for no bound")

    @classmethod
    def full(cls) -> Intervals:
        """Every query sees every key."""
        return cls()

    @classmethod
    def causal(cls) -> Intervals:
        """A query sees its own key and all before it; the last query sees all keys."""
        return cls.window(None, 0)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> Intervals:
        """A query sees its own key, `left` keys before it and `right` after it; None is unbounded."""
        return cls(left, right)

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def needs_dense(self, Sq: int, Sk: int) -> bool:
        """Whether a kernel that knows no mask but an `is_causal` flag, the triangle j <= i, needs it written out."""
        return not self.is_full and not (self.is_causal and Sq == Sk)

    def bounds(self, i: int, Sq: int, Sk: int) -> tuple[int, int]:
        """The half-open range (lo, hi) of keys that query i sees; lo == hi where it sees none."""
        position = i + Sk - Sq
        lo = 0 if self.left is None else min(max(position - self.left, 0), Sk)
        hi = Sk if self.right is None else min(max(position + self.right + 1, 0), Sk)
        return lo, hi

    def has_empty_rows(self, Sq: int, Sk: int) -> bool:
        """Whether some query sees no key: the first one sees the fewest."""
        lo, hi = self.bounds(0, Sq, Sk)
        return Sq > 0 and lo == hi

    def dense(self, Sq: int, Sk: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask written out, (Sq, Sk) bool, True where query and key see each other."""
        position = torch.arange(Sq, device=device)[:, None] + (Sk - Sq)
        key = torch.arange(Sk, device=device)[None, :]
        mask = torch.ones(Sq, Sk, dtype=torch.bool, device=device)
        if self.left is not None:
            mask = mask & (key >= position - self.left)
        if self.right is not None:
            mask = mask & (key <= position + self.right)
        return mask

    def visible(self, Sq: int, Sk: int) -> int:
        """The number of (query, key) pairs that see each other, in closed form."""
        first = Sk - Sq
        below_hi = Sq * Sk if self.right is None else _clamped_sum(first + self.right + 1, Sq, Sk)
        below_lo = 0 if self.left is None else _clamped_sum(first - self.left, Sq, Sk)
        return below_hi - below_lo

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if self.is_causal:
            return "causal"
        return f"window({self.left}, {self.right})"


def _clamped_sum(start: int, count: int, top: int) -> int:
    """Sum of min(max(t, 0), top) over the `count` integers t from `start`."""

    def up_to(end: int) -> int:
        rising = min(max(end, 0), top)
        return rising * (rising - 1) // 2 + top * max(end - top, 0)

    return up_to(start + count) - up_to(start)
