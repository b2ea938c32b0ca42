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

_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


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


def view(x_BSHD: Tensor, rows: int) -> TensorDescriptor:
    """The kernel argument for an addressable, non-empty x of which `rows` rows of a head are copied at a time."""
    x_BHSD = x_BSHD.transpose(1, 2)
    block = (1, 1, rows, max(padded_head_dim(x_BSHD), 64))
    return TensorDescriptor(x_BHSD, list(x_BHSD.shape), strides_BHSD(x_BSHD), list(block), _layout(block, x_BSHD.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])
