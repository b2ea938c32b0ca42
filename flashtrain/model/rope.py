"""Rotary position embedding: frequencies, the table of cosines and sines, and its application to heads.

The table is rebuilt in each forward, from positions alone: no state to grow, to move, to cast by accident or
to restore after a meta-device init. A custom op keeps it one small tensor under torch.compile, which would
otherwise recompute the trigonometry inside every layer's kernels.
Source: arXiv 2104.09864, in the half-split pairing of GPT-NeoX and Llama.
"""

import math

import torch
from torch import Tensor

from flashtrain.model.rope_options import RopeOptions


def inverse_frequencies(
    rope: RopeOptions, head_dim: int, length: int | Tensor, device: torch.device | None = None
) -> Tensor:
    """Return radians per position of the head_dim / 2 pairs, in float64.

    `rope` is resolved. `length` is how many tokens stand in the row, or (...) for each token in its document: with
    dynamic scaling the result is (..., head_dim / 2) then, with all others (head_dim / 2).
    Sources: arXiv 2306.15595 (linear), 2309.00071 (NTK-aware, dynamic, YaRN), Llama 3.1's reference code (llama3).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    plain = rope.theta**-exponents
    match rope.type:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "ntk":
            return theta_scaled_by(rope.factor, rope.theta, head_dim) ** -exponents
        case "dynamic":
            if isinstance(length, Tensor):
                stretch = length.double().clamp(min=rope.original_length)[..., None] / rope.original_length
            else:
                stretch = max(length, rope.original_length) / rope.original_length
            scale = rope.factor * stretch - (rope.factor - 1)
            return theta_scaled_by(scale, rope.theta, head_dim) ** -exponents
        case "yarn":
            kept = 1 - _ramp(rope, head_dim, device)
        case "llama3":
            wavelengths = 2 * math.pi / plain
            low, high = rope.low_freq_factor, rope.high_freq_factor
            kept = ((rope.original_length / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * kept + plain / rope.factor * (1 - kept)


def theta_scaled_by(scale: float | Tensor, theta: float, head_dim: int) -> float | Tensor:
    """The base with which the lowest frequency is divided by `scale` and the highest stays."""
    return theta * scale ** (head_dim / (head_dim - 2))


def _ramp(rope: RopeOptions, head_dim: int, device: torch.device | None) -> Tensor:
    """YaRN's share of interpolation for each pair: 0 up to the pair of beta_fast turns, 1 from that of beta_slow on."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    start, end = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    return ((pairs - start) / (end - start or 0.001)).clamp(0, 1)


@torch.library.custom_op("flashtrain::rope_table", mutates_args=())
def rope_table(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    """Return cosines and sines x attention_factor, (2, ..., D/2) float32, at integer positions (...).

    frequencies: float64 radians per position, (D/2) or (..., D/2). So are the angles: in float32 they are off by up
    to 0.06 rad at position one million.
    """
    angles = positions[..., None] * frequencies
    return (torch.stack((angles.cos(), angles.sin())) * attention_factor).float()


@rope_table.register_fake
def _(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    return positions.new_empty((2, *positions.shape, frequencies.shape[-1]), dtype=torch.float32)


def rotate(x_BSHD: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (x[d], x[d + D/2]) by the angles in `table`, in float32; return the dtype of `x`.

    The table is of positions (S), the same in all rows, or (B, S).
    """
    cos, sin = table[..., None, :]
    # Cast before the products, or autograd would round the gradient of each of them to the dtype of x.
    first, second = x_BSHD.to(torch.promote_types(x_BSHD.dtype, table.dtype)).chunk(2, dim=-1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([half.to(x_BSHD.dtype) for half in halves], dim=-1)
