"""Tensors (B, S, H, D) as the kernels see them: tiles of consecutive rows of one head, zero beyond the ends.

A view is a tensor descriptor, which becomes TMA, or plain pointers with strides, which pipeline well where
there is no TMA. Both address in 64 bits and pad the head dimension to a power of two. What neither can
address as it stands is copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT_BYTES = 16
ALIGNMENT_BITS: tl.constexpr = tl.constexpr(8 * ALIGNMENT_BYTES)

# Kernel arguments whose values 1 and multiples of 16 get no compilation of their own.
VARYING = ("kv_len", "num_q_heads", "num_kv_heads", "left", "right")


def addressable(x_BSHD: Tensor) -> Tensor:
    """Returns x, or a copy if its last stride is not 1, a dimension is broadcast or rows are misaligned."""
    outer = [step for step, size in zip(x_BSHD.stride()[:-1], x_BSHD.shape[:-1], strict=True) if size > 1]
    fits = (
        x_BSHD.stride(-1) == 1
        and x_BSHD.data_ptr() % ALIGNMENT_BYTES == 0
        and all(step > 0 and step * x_BSHD.element_size() % ALIGNMENT_BYTES == 0 for step in outer)
    )
    return x_BSHD if fits else x_BSHD.clone(memory_format=torch.contiguous_format)


def padded_head_dim(x_BSHD: Tensor) -> int:
    """What the kernels compute with: the next power of two from 16."""
    return 1 << (max(x_BSHD.shape[-1], 16) - 1).bit_length()


def view(x_BSHD: Tensor, rows: int, use_tma: bool) -> TensorDescriptor | tuple:
    """The kernel argument for an addressable, non-empty x that is read or written `rows` rows at a time."""
    if not use_tma:
        x_BHSD = x_BSHD.transpose(1, 2)
        return x_BHSD, *x_BHSD.stride()[:-1], *x_BHSD.shape[2:]
    return TensorDescriptor(x_BSHD, *shape_and_strides_BHSD(x_BSHD), [1, 1, rows, padded_head_dim(x_BSHD)])


def shape_and_strides_BHSD(x_BSHD: Tensor) -> tuple[list[int], list[int]]:
    """What a descriptor wants of an addressable x: strides aligned, that of a dimension of size 1 too."""
    B, S, H, D = x_BSHD.shape
    steps = zip((B, S, H), x_BSHD.stride()[:-1], strict=True)
    step_B, step_S, step_H = (step if size > 1 else ALIGNMENT_BYTES for size, step in steps)
    return [B, H, S, D], [step_B, step_H, step_S, 1]


@triton.jit
def load_tile(x, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CLIP: tl.constexpr):
    """Rows [first, first + ROWS) of head h; CLIP says that they may reach past the last row."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([b, h, first, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = _addresses(x, b, h, first, ROWS, BLOCK_D, CLIP)
        tile = tl.load(ptrs, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(x, tile, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes rows [first, first + ROWS) of head h in x's dtype, as far as they exist."""
    if isinstance(x, tl.tensor_descriptor):
        x.store([b, h, first, 0], tile.to(x.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = _addresses(x, b, h, first, ROWS, BLOCK_D, True)
        tl.store(ptrs, tile.to(ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _addresses(x, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, CLIP: tl.constexpr):
    ptr, stride_b, stride_h, stride_s, num_rows, head_dim = x
    UNIT: tl.constexpr = ALIGNMENT_BITS // ptr.dtype.element_ty.primitive_bitwidth
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    ptr += tl.cast(b, tl.int64) * _multiple(stride_b, UNIT) + tl.cast(h, tl.int64) * _multiple(stride_h, UNIT)
    ptr += tl.cast(first, tl.int64) * _multiple(stride_s, UNIT)
    ptrs = ptr + (row.to(tl.int64) * _multiple(stride_s, UNIT) + column)
    inside = column < _multiple(head_dim, UNIT)
    if CLIP:
        inside = inside & (row < num_rows - first)
    return ptrs, inside


@triton.jit
def _multiple(x, UNIT: tl.constexpr):
    """x, which is a multiple of UNIT, in words that the compiler reads: else it moves rows element by element."""
    return x // UNIT * UNIT
