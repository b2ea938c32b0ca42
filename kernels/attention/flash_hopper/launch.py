"""How the kernels for Hopper are launched: tiles, warps and barriers by head dimension, and descriptors of tensors."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..views import padded_head_dim, strides_BHSD

# Queries of a tile that one warpgroup computes.
ROWS: gl.constexpr = gl.constexpr(64)

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@dataclass(frozen=True)
class Launch:
    """How to launch the forward, under the kernel's argument names.

    CONSUMERS warpgroups compute 64 queries each. NAMED says that they release tiles at named barriers, PING_PONG that
    they issue products in turn. REGISTERS are those of a thread of each partition behind the first, which gets what is
    left of `maxnreg` for all.
    """

    BLOCK_N: int
    CONSUMERS: int
    NAMED: bool
    PING_PONG: bool
    REGISTERS: tuple[int, ...]
    maxnreg: int

    @property
    def BLOCK_M(self) -> int:
        return self.CONSUMERS * ROWS.value


# largest head dimension of a row -> how to launch
FORWARD = {
    64: Launch(128, 3, NAMED=False, PING_PONG=True, REGISTERS=(160, 160, 32), maxnreg=128),
    128: Launch(128, 2, NAMED=True, PING_PONG=False, REGISTERS=(232, 40), maxnreg=168),
}


def launch_of(head_dim: int) -> Launch:
    """The launch record of a forward, head_dim being the larger one, at most 128."""
    return FORWARD[next(limit for limit in FORWARD if head_dim <= limit)]


@dataclass(frozen=True)
class BackwardLaunch:
    """How to launch the backward, under the kernel's argument names; two warpgroups compute, 64 keys each.

    SPLIT says that each makes half of the columns of dQ from the keys of both, and not all columns from its own. SLOTS
    are those of the rings of Q and dO. The others are as for the forward.
    """

    BLOCK_M: int
    SLOTS: int
    SPLIT: bool
    NAMED: bool
    REGISTERS: tuple[int, ...]
    maxnreg: int


# head dimension of Q, padded -> how to launch; half of 64 columns would be less than the swizzle takes.
BACKWARD = {
    64: BackwardLaunch(64, 2, SPLIT=False, NAMED=False, REGISTERS=(240, 24), maxnreg=168),
    128: BackwardLaunch(64, 2, SPLIT=True, NAMED=True, REGISTERS=(240, 24), maxnreg=168),
}


def columns_of(x_BSHD: Tensor) -> int:
    """Columns of the blocks in which an x is copied: 64 or 128."""
    return max(padded_head_dim(x_BSHD), 64)


def view(x_BSHD: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The kernel argument for an addressable, non-empty x of which `rows` rows of a head are copied at a time.

    All of their columns, unless it is said how many.
    """
    x_BHSD = x_BSHD.transpose(1, 2)
    block = (1, 1, rows, columns or columns_of(x_BSHD))
    return TensorDescriptor(x_BHSD, list(x_BHSD.shape), strides_BHSD(x_BSHD), list(block), _layout(block, x_BSHD.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])


def numbers_view(x: Tensor, count: int) -> TensorDescriptor:
    """The kernel argument for a contiguous fp32 x of which `count` numbers are copied at a time."""
    return TensorDescriptor(x, [x.numel()], [1], [count], gl.NVMMASharedLayout(0, 32, 1))
