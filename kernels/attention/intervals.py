"""The mask type: query i sees the keys lo(i) <= j < hi(i), with lo and hi never decreasing along the row.

This file is the only place that says which keys a query sees. Kernels read `left`, `right` and `bounds`;
everybody else asks `bounds_of`, `dense` or `visible`. Which tiles of a kernel those keys fall into is
geometry's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bounds:
    """The intervals written out, from both sides: lo and hi of every query and of every key, int32, contiguous.

    keys (2, R, Sq): query i sees the keys keys[0, r, i] <= j < keys[1, r, i]. queries (2, R, Sk): the same
    seen from the keys. R is the batch size, or 1 where all rows of the batch have the same mask.
    """

    keys: Tensor
    queries: Tensor

    def to(self, device: torch.device | str) -> Bounds:
        return Bounds(self.keys.to(device), self.queries.to(device))


@dataclass(frozen=True)
class Intervals:
    """Which keys each query sees: a (left, right) pair of extra keys around its own, or bounds of its own.

    With `left` and `right`, FlashAttention's window, the sequences are aligned at their ends (bottom-right):
    query i stands on key `p = i + Sk - Sq` and sees `p - left <= j <= p + right` within `0 <= j < Sk`; None is
    unbounded. A query that stands before the first key by more than `right` sees nothing. With `bounds`, tensors
    say it for each query, for lengths that are theirs alone, and `left` and `right` are None.

    Build one with `full`, `causal` or `window`, or with `prefix_lm`, which lets all see a prefix; restrict a window
    with `in_documents`, `in_sequences` or `in_chunks`; `a & b` is what both show. Documents and chunks are aligned
    one by one, each at its end. Making bounds never waits for the device, so that it can be compiled: shapes are
    checked, values are not.

    Raises ValueError for a negative `left` or `right`, and where shapes or lengths do not go together.
    """

    left: int | None = None
    right: int | None = None
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        for name, extra in (("left", self.left), ("right", self.right)):
            if extra is not None and extra < 0:
                raise ValueError(f"intervals: {name} counts extra keys and is {extra}; use None for no bound")
            if extra is not None and self.bounds is not None:
                raise ValueError(f"intervals: bounds hold the whole mask; use & to add a {name} of {extra}")

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

    @classmethod
    def prefix_lm(cls, prefix_R: Tensor, Sq: int, Sk: int) -> Intervals:
        """Causal, and the first `prefix_R[r]` keys of row r, (R) integers, are visible to all its queries."""
        causal = cls.causal().bounds_of(Sq, Sk, prefix_R.device)
        prefix_R1 = prefix_R[:, None].clamp(0, Sk).int()
        lo, hi = causal.keys.expand(-1, len(prefix_R), -1)
        keys = torch.stack((lo, torch.maximum(hi, prefix_R1)))
        first, end = causal.queries.expand(-1, len(prefix_R), -1)
        in_prefix = torch.arange(Sk, device=prefix_R.device) < prefix_R1
        return cls(bounds=Bounds(keys, torch.stack((first.masked_fill(in_prefix, 0), end))))

    def in_documents(self, q_documents_RS: Tensor, k_documents_RS: Tensor | None = None) -> Intervals:
        """This window within documents: a query sees only keys of its own document.

        q_documents (R, Sq) and k_documents (R, Sk): integers that say which document a token is of, never
        decreasing along the row. With q_documents alone, which are then of the keys, too, a document is a run of
        equal integers, whichever.
        """
        if self.bounds is not None:
            raise ValueError("intervals: this mask has bounds of its own already; use & to combine it with documents")
        for documents in (q_documents_RS, k_documents_RS):
            if documents is not None and (documents.ndim != 2 or documents.shape[0] != q_documents_RS.shape[0]):
                raise ValueError(
                    "intervals: documents must be (rows, tokens), of as many rows for queries and keys, not "
                    f"{tuple(documents.shape)}"
                )
        if k_documents_RS is None:
            starts = q_documents_RS.diff(dim=-1, prepend=q_documents_RS[:, :1]) != 0
            q_documents = k_documents = starts.cumsum(dim=-1)
        else:
            q_documents, k_documents = q_documents_RS.contiguous(), k_documents_RS.contiguous()
        return Intervals(
            bounds=Bounds(
                _seen_within(q_documents, k_documents, before=self.left, after=self.right),
                _seen_within(k_documents, q_documents, before=self.right, after=self.left),
            )
        )

    def in_sequences(
        self, cu_seqlens_q: Tensor, Sq: int, cu_seqlens_k: Tensor | None = None, Sk: int | None = None
    ) -> Intervals:
        """This window within the sequences that one row of the batch holds, as FlashAttention's cu_seqlens.

        cu_seqlens (N + 1) integers from 0, never decreasing, within the row: sequence n is the tokens cu_seqlens[n]
        to cu_seqlens[n + 1], of queries and of keys. The rows are Sq and Sk tokens long. Keys have the sequences of
        the queries unless given their own. A token beyond the last sequence sees nothing and is seen by none.
        """
        if (cu_seqlens_k is None) != (Sk is None):
            raise ValueError("intervals: cu_seqlens_k and Sk go together; give both, or neither for those of queries")
        if cu_seqlens_k is None:
            cu_seqlens_k, Sk = cu_seqlens_q, Sq
        if cu_seqlens_q.ndim != 1 or len(cu_seqlens_q) < 2 or cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                "intervals: cu_seqlens must be as many numbers for queries and keys, one more than sequences, not "
                f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
            )
        q_documents, k_documents = _sequence_of(cu_seqlens_q, Sq), _sequence_of(cu_seqlens_k, Sk)
        beyond_the_last = k_documents == len(cu_seqlens_k) - 1
        return self.in_documents(q_documents, k_documents + beyond_the_last)

    def in_chunks(self, size: int, Sq: int, Sk: int, device: torch.device | str = "cpu") -> Intervals:
        """This window within chunks of `size` keys, counted from the first key (Llama 4's chunked attention)."""
        if size < 1:
            raise ValueError(f"intervals: a chunk has at least 1 key, not {size}")
        q_chunks = (torch.arange(Sq, device=device) + (Sk - Sq)) // size
        k_chunks = torch.arange(Sk, device=device) // size
        return self.in_documents(q_chunks[None], k_chunks[None])

    def __and__(self, other: Intervals) -> Intervals:
        """A query sees what both show it; bounds of both are for the same lengths."""
        if self.bounds is None and other.bounds is None:
            return Intervals(_least(self.left, other.left), _least(self.right, other.right))
        known = other.bounds if self.bounds is None else self.bounds
        Sq, Sk = known.keys.shape[-1], known.queries.shape[-1]
        a, b = (x.bounds_of(Sq, Sk, known.keys.device) for x in (self, other))
        return Intervals(bounds=Bounds(_overlap(a.keys, b.keys), _overlap(a.queries, b.queries)))

    def at(self, Sq: int, Sk: int) -> Intervals:
        """The same mask for these lengths, in the plainest words: a side that reaches past everything is no bound."""
        if self.bounds is not None:
            return self
        left, right = self.left, self.right
        return Intervals(
            None if left is None or left >= Sk - 1 else left, None if right is None or right >= Sq - 1 else right
        )

    def to(self, device: torch.device | str) -> Intervals:
        """The same mask for tensors on `device`."""
        return Intervals(self.left, self.right, None if self.bounds is None else self.bounds.to(device))

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None and self.bounds is None

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0

    def needs_dense(self, Sq: int, Sk: int) -> bool:
        """Whether a kernel that knows no mask but an `is_causal` flag, the triangle j <= i, needs it written out."""
        return not self.is_full and not (self.is_causal and Sq == Sk)

    def may_have_empty_rows(self, Sq: int, Sk: int) -> bool:
        """Whether some query sees no key: known of a window, whose first query sees the fewest; else possible."""
        if self.bounds is not None:
            return True
        return Sq > 0 and (Sk == 0 or (self.right is not None and Sk - Sq + self.right < 0))

    def bounds_of(self, Sq: int, Sk: int, device: torch.device | str = "cpu") -> Bounds:
        """The intervals written out for Sq queries and Sk keys; lo == hi where nothing is seen."""
        if self.bounds is not None:
            made_for = (self.bounds.keys.shape[-1], self.bounds.queries.shape[-1])
            if made_for != (Sq, Sk):
                raise ValueError(f"intervals: the mask was made for {made_for} queries and keys, not for {(Sq, Sk)}")
            return self.bounds
        q_documents, k_documents = (torch.zeros(1, S, dtype=torch.int32, device=device) for S in (Sq, Sk))
        return self.in_documents(q_documents, k_documents).bounds

    def dense(self, Sq: int, Sk: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask written out, (R, Sq, Sk) bool, True where query and key see each other; R is 1 or the batch."""
        lo, hi = self.bounds_of(Sq, Sk, device).keys[..., None]
        key = torch.arange(Sk, device=device)
        return (lo <= key) & (key < hi)

    def visible(self, B: int, Sq: int, Sk: int) -> int:
        """The number of (query, key) pairs in a batch of B rows that see each other; bounds wait for the device."""
        if self.bounds is not None:
            lo, hi = self.bounds.keys.long()
            return int((hi - lo).sum()) * (B // lo.shape[0])
        first = Sk - Sq
        below_hi = Sq * Sk if self.right is None else _clamped_sum(first + self.right + 1, Sq, Sk)
        below_lo = 0 if self.left is None else _clamped_sum(first - self.left, Sq, Sk)
        return B * (below_hi - below_lo)

    def __str__(self) -> str:
        if self.bounds is not None:
            return "bounds"
        if self.is_full:
            return "full"
        if self.is_causal:
            return "causal"
        return f"window({self.left}, {self.right})"


def _seen_within(
    documents_RS: Tensor, others_RT: Tensor, *, before: int | None, after: int | None
) -> Tensor:
    """(2, R, S) int32: the range of tokens of the other side that each token of this side sees.

    Aligned at the ends of a document, a token sees `before` extra tokens and `after`; None is all.
    """
    first = torch.searchsorted(others_RT, documents_RS, out_int32=True)
    end = torch.searchsorted(others_RT, documents_RS, right=True, out_int32=True)
    own_end = torch.searchsorted(documents_RS, documents_RS, right=True, out_int32=True)
    S, T = documents_RS.shape[-1], others_RT.shape[-1]
    position = torch.arange(S, device=documents_RS.device, dtype=torch.int32) - own_end + end
    lo = first if before is None else (position - min(before, S + T)).clamp(first, end)
    hi = end if after is None else (position + (1 + min(after, S + T))).clamp(first, end)
    return torch.stack((lo, hi))


def _sequence_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """(1, length): the number of the sequence that each token is in, the number of sequences beyond the last."""
    ends = cu_seqlens[1:].contiguous()
    return torch.bucketize(torch.arange(length, device=ends.device), ends, right=True)[None]


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """(2, R, S) what lies in both ranges, lo == hi where nothing does."""
    lo = torch.maximum(a[0], b[0])
    return torch.stack((lo, torch.maximum(torch.minimum(a[1], b[1]), lo)))


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _clamped_sum(start: int, count: int, top: int) -> int:
    """Sum of min(max(t, 0), top) over the `count` integers t from `start`."""

    def up_to(end: int) -> int:
        rising = min(max(end, 0), top)
        return rising * (rising - 1) // 2 + top * max(end - top, 0)

    return up_to(start + count) - up_to(start)
