"""Tensors as the kernels see them: blocks of (rows, head_dim) of one head, addressed in 64 bits, zero beyond the ends.

A descriptor becomes TMA where the GPU has it and plain masked pointers elsewhere. It pads the head dimension to a power of
two on loads and clips on stores. What it cannot address as it stands is copied.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT_BYTES = 16


def addressable(x_BSHD: Tensor) -> Tensor:
    """Returns x, or a copy where x has a last stride other than 1, a broadcast dimension or misaligned rows."""
    outer = [stride for stride, size in zip(x_BSHD.stride()[:-1], x_BSHD.shape[:-1], strict=True) if size > 1]
    fits = (
        x_BSHD.stride(-1) == 1
        and x_BSHD.data_ptr() % ALIGNMENT_BYTES == 0
        and all(stride > 0 and stride * x_BSHD.element_size() % ALIGNMENT_BYTES == 0 for stride in outer)
    )
    return x_BSHD if fits else x_BSHD.clone(memory_format=torch.contiguous_format)


def describe(x_BSHD: Tensor, rows: int) -> TensorDescriptor:
    """Describes an addressable, non-empty x as (B, H, S, D) with blocks of `rows` rows of one head."""
    x_BHSD = x_BSHD.transpose(1, 2)
    # The stride of a dimension of size 1 is never used, but has to look aligned.
    strides = [s if n > 1 else ALIGNMENT_BYTES for s, n in zip(x_BHSD.stride()[:-1], x_BHSD.shape[:-1], strict=True)]
    return TensorDescriptor(x_BHSD, list(x_BHSD.shape), [*strides, 1], [1, 1, rows, padded_head_dim(x_BSHD)])


def padded_head_dim(x_BSHD: Tensor) -> int:
    return triton.next_power_of_2(max(x_BSHD.shape[-1], 16))
