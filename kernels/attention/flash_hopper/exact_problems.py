"""Problems in small integers whose right answers are known to the last rounding, for the forward and the backward.

At scale ln 2 every probability is a power of two and every sum is exact, in whatever order. The right answers are
integer arithmetic, which no setting of PyTorch makes inexact or refuses: query rows are of few kinds, so running sums
over the keys, and counts of the queries that see a key, answer all of them.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..intervals import Intervals
from ..limits import FLASH_HOPPER_HEAD_DIMS

SCALE = math.log(2)

# Kinds of query rows, and the largest score of an integer query and a key of two ones.
KINDS, LARGEST_SCORE = 4, 4
Q_HEADS, KV_HEADS = 4, 2

# The backward's LSE in bits, between these; of its probabilities the smallest is 2 to the power of -BITS.
LEAST_LSE, LARGEST_LSE = 4, 5
BITS = LARGEST_SCORE + LARGEST_LSE

# For so many fp32 holds every sum of the backward.
MOST_QUERIES = 2304


class Case(NamedTuple):
    """One row of the batch, whose queries see keys from the first one on, and at least that."""

    head_dim: int
    intervals: Intervals
    q_len: int
    kv_len: int


LENGTHS = ((512, 512), (MOST_QUERIES, MOST_QUERIES), (336, 1000))
CASES = tuple(
    Case(head_dim, intervals, *lengths)
    for head_dim, intervals, lengths in itertools.product(
        FLASH_HOPPER_HEAD_DIMS, (Intervals.causal(), Intervals.full()), LENGTHS
    )
)


class _Integers:
    """Draws that are the same each time, uniform from `low` to `high`, both included."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator, device=self._generator.device)

    def two_ones(self, *shape: int) -> Tensor:
        """Zeros but for one column of each half of the last dimension, which is 1 or -1."""
        *rows, columns = shape
        x = torch.zeros(shape, dtype=torch.int64, device=self._generator.device)
        index = torch.arange(columns, device=x.device)
        for half in (0, columns // 2):
            place = self(half, half + columns // 2 - 1, *rows, 1)
            x += (index == place) * (2 * self(0, 1, *rows, 1) - 1)
        return x


def exact_forward(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Integer q, k and v of one row of the batch, and the right out (1, Sq, Hq, D) and lse (1, Hq, Sq) in float64."""
    head_dim, intervals, q_len, kv_len = case
    integers = _Integers(device)
    kind = integers(0, KINDS - 1, q_len)
    q_HTD = integers(-2, 2, Q_HEADS, KINDS, head_dim)
    k_GND = integers.two_ones(KV_HEADS, kv_len, head_dim)
    v_GND = integers(-4, 4, KV_HEADS, kv_len, head_dim)

    p_HTN = 1 << (_products(q_HTD, k_GND) + LARGEST_SCORE)
    last = intervals.bounds_of(q_len, kv_len, device).keys[1, 0].long() - 1
    sums_HM = p_HTN.cumsum(-1)[:, kind, last].double()
    out_HMD = (p_HTN[..., None] * _of_query_heads(v_GND)[:, None]).cumsum(-2)[:, kind, last] / sums_HM[..., None]
    lse_HM = sums_HM.log() - LARGEST_SCORE * SCALE
    return *map(_one_row, (q_HTD[:, kind], k_GND, v_GND, out_HMD)), lse_HM[None]


class Backward(NamedTuple):
    """dout, q, k, v and out (1, S, H, D), dlse and lse (1, Hq, Sq), and the right dq, dk and dv like q, k and v."""

    dout: Tensor
    dlse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact_backward(case: Case, device: torch.device) -> Backward:
    """Integer inputs of one row of the batch but for lse, and the right gradients; these and lse are in float64.

    out and lse are of no forward: with an lse of whole bits P = exp(S - lse) is a power of two, and dS has few bits.
    Exact for up to MOST_QUERIES.
    """
    head_dim, intervals, q_len, kv_len = case
    integers = _Integers(device)
    kind = integers(0, KINDS - 1, q_len)
    q_HTD, dout_HTD = (integers(-2, 2, Q_HEADS, KINDS, head_dim) for _ in range(2))
    k_GND, v_GND = (integers.two_ones(KV_HEADS, kv_len, head_dim) for _ in range(2))
    out_HTD = integers.two_ones(Q_HEADS, KINDS, head_dim)
    dlse_HT, lse_HT = integers(-2, 2, Q_HEADS, KINDS), integers(LEAST_LSE, LARGEST_LSE, Q_HEADS, KINDS)

    p_HTN = 1 << (_products(q_HTD, k_GND) - lse_HT[..., None] + BITS)
    delta_HT = (dout_HTD * out_HTD).sum(-1) - dlse_HT
    ds_HTN = p_HTN * (_products(dout_HTD, v_GND) - delta_HT[..., None])
    bounds = intervals.bounds_of(q_len, kv_len, device)
    last = bounds.keys[1, 0].long() - 1
    dq_HMD = (ds_HTN[..., None] * _of_query_heads(k_GND)[:, None]).cumsum(-2)[:, kind, last]
    seen_TN = _of_each_kind(kind, bounds.queries[:, 0].long())
    dk_GND, dv_GND = (
        ((seen_TN * x_HTN)[..., None] * y_HTD[:, :, None]).sum(1).unflatten(0, (KV_HEADS, -1)).sum(1)
        for x_HTN, y_HTD in ((ds_HTN, q_HTD), (p_HTN, dout_HTD))
    )

    unit = 2.0**-BITS
    return Backward(
        dout=_one_row(dout_HTD[:, kind]),
        dlse=dlse_HT[None, :, kind],
        q=_one_row(q_HTD[:, kind]),
        k=_one_row(k_GND),
        v=_one_row(v_GND),
        out=_one_row(out_HTD[:, kind]),
        lse=lse_HT[None, :, kind].double() * SCALE,
        dq=_one_row(dq_HMD).double() * (unit * SCALE),
        dk=_one_row(dk_GND).double() * (unit * SCALE),
        dv=_one_row(dv_GND).double() * unit,
    )


def _products(x_HTD: Tensor, y_GND: Tensor) -> Tensor:
    """(H, T, N): of rows of query heads, and of the KV heads of their groups."""
    return (x_HTD[:, :, None] * _of_query_heads(y_GND)[:, None]).sum(-1)


def _of_query_heads(x_GND: Tensor) -> Tensor:
    return x_GND.repeat_interleave(Q_HEADS // KV_HEADS, 0)


def _of_each_kind(kind_M: Tensor, queries_2N: Tensor) -> Tensor:
    """(T, N): how many queries of each kind see each key, which a range of queries does."""
    is_kind_TM = kind_M == torch.arange(KINDS, device=kind_M.device)[:, None]
    before_TM = torch.nn.functional.pad(is_kind_TM.cumsum(-1), (1, 0))
    begin, end = queries_2N
    return before_TM[:, end] - before_TM[:, begin]


def _one_row(x_HSD: Tensor) -> Tensor:
    """(1, S, H, D)"""
    return x_HSD.transpose(0, 1)[None]
