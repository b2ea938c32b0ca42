"""Rotary position embedding: the table of cosines and sines, and its application to heads.

The table is rebuilt in each forward, from positions alone: no state to grow, to move, to cast by accident or
to restore after a meta-device init. A custom op keeps it one small tensor under torch.compile, which would
otherwise recompute the trigonometry inside every layer's kernels.
Source: arXiv 2104.09864, in the half-split pairing of GPT-NeoX and Llama.
"""

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return theta^(-2i / head_dim) for i < head_dim / 2, in float64: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    return theta**-exponents


@torch.library.custom_op("flashtrain::rope_table", mutates_args=())
def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return cosines and sines, (2, ..., head_dim / 2) float32, of the angles at integer positions (...).

    Angles are float64: in float32 they are off by up to 0.06 rad at position one million.
    """
    angles = positions[..., None] * inverse_frequencies(head_dim, theta, positions.device)
    return torch.stack((angles.cos(), angles.sin())).float()


@rope_table.register_fake
def _(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    return positions.new_empty((2, *positions.shape, head_dim // 2), dtype=torch.float32)


def rotate(x_BSHD: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (x[d], x[d + D/2]) by the angles in `table`, in float32; return the dtype of `x`.

    The table is of positions (S), the same in all rows, or (B, S).
    """
    cos, sin = table[..., None, :]
    # Cast before the products, or autograd would round the gradient of each of them to the dtype of x.
    first, second = x_BSHD.to(torch.promote_types(x_BSHD.dtype, table.dtype)).chunk(2, dim=-1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([half.to(x_BSHD.dtype) for half in halves], dim=-1)
