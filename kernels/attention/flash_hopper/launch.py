"""How the kernels for Hopper are launched: tiles, warps and barriers by head dimension, and descriptors of tensors."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..intervals import Intervals
from ..views import padded_head_dim, shape_and_strides_BHSD

# Queries of a tile that one warpgroup computes.
ROWS: gl.constexpr = gl.constexpr(64)

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@dataclass(frozen=True)
class Launch:
    """How to launch the forward, under the kernel's argument names.

    CONSUMERS warpgroups compute 64 queries each. SLOTS are those of the rings of K and V, 2 or 4; NAMED says that these
    are released at named barriers, PING_PONG that products are issued in turn. REGISTERS are those of a thread of each
    partition behind the first, which gets what is left of `maxnreg` for all.
    """

    BLOCK_N: int
    CONSUMERS: int
    SLOTS: int
    NAMED: bool
    PING_PONG: bool
    REGISTERS: tuple[int, ...]
    maxnreg: int

    @property
    def BLOCK_M(self) -> int:
        return self.CONSUMERS * ROWS.value


# largest head dimension of a row -> how to launch
FORWARD = {
    64: Launch(128, 3, SLOTS=4, NAMED=True, PING_PONG=True, REGISTERS=(160, 160, 32), maxnreg=128),
    128: Launch(128, 2, SLOTS=2, NAMED=True, PING_PONG=True, REGISTERS=(232, 40), maxnreg=168),
}

# As above, where a mask leaves few keys to a query, for which 192 rows are a tile too coarse: H200, causal, 2k, 9 %
# faster; at 8k 6 % slower.
FEW_KEYS = {64: Launch(128, 2, SLOTS=4, NAMED=True, PING_PONG=True, REGISTERS=(232, 40), maxnreg=168)}
MOST_OF_FEW = 2048


def launch_of(head_dim: int, intervals: Intervals | None, q_len: int, kv_len: int) -> Launch:
    """The launch record of a forward, head_dim being the larger one, at most 128; None is a mask that comes as bounds,
    which are documents as a rule, and short."""
    limit = next(limit for limit in FORWARD if head_dim <= limit)
    few_keys = intervals is None or _most_keys(intervals.at(q_len, kv_len), kv_len) <= MOST_OF_FEW
    return FEW_KEYS.get(limit, FORWARD[limit]) if few_keys else FORWARD[limit]


def _most_keys(intervals: Intervals, kv_len: int) -> float:
    """That a query sees under a mask which hides some of them; where it hides none, no tile is too coarse."""
    if intervals.is_full:
        return math.inf
    return min(kv_len, 1 + sum(kv_len if side is None else side for side in (intervals.left, intervals.right)))


@dataclass(frozen=True)
class BackwardLaunch:
    """How to launch the backward, under the kernel's argument names; two warpgroups compute, 64 keys each.

    BLOCK_M queries are a block, BLOCK_M times the columns 64 * 128: the warpgroups halve its dQ by rows where it has
    128, else by columns, since less than 64 of 16 bits are no whole tile under the swizzle. SLOTS are those of the
    rings of Q and dO. The others are as for the forward.
    """

    BLOCK_M: int
    SLOTS: int
    NAMED: bool
    REGISTERS: tuple[int, ...]
    maxnreg: int


# columns of Q's and V's blocks, the more of them -> how to launch
BACKWARD = {
    64: BackwardLaunch(128, 2, NAMED=True, REGISTERS=(240, 24, 24), maxnreg=168),
    128: BackwardLaunch(64, 2, NAMED=True, REGISTERS=(240, 24, 24), maxnreg=168),
}


def columns_of(x_BSHD: Tensor) -> int:
    """Columns of the blocks in which an x is copied: 64 or 128."""
    return max(padded_head_dim(x_BSHD), 64)


def view(x_BSHD: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The kernel argument for an addressable, non-empty x of which `rows` rows of a head are copied at a time.

    All of their columns, unless it is said how many.
    """
    block = _block(rows, columns or columns_of(x_BSHD), x_BSHD.dtype)
    return TensorDescriptor(x_BSHD, *shape_and_strides_BHSD(x_BSHD), *block)


@functools.cache
def _block(rows: int, columns: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    """Shape and layout of what is copied at a time."""
    shape = [1, 1, rows, columns]
    return shape, gl.NVMMASharedLayout.get_default_for(shape, _GLUON_DTYPES[dtype])


def numbers_view(x: Tensor, count: int) -> TensorDescriptor:
    """The kernel argument for a contiguous fp32 x of which `count` numbers are copied at a time."""
    return TensorDescriptor(x, [x.numel()], [1], [count], gl.NVMMASharedLayout(0, 32, 1))
