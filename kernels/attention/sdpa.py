"""PyTorch's own attention, each variant pinned to one kernel by calling that kernel's ATen operator.

The public way, `torch.nn.attention.sdpa_kernel`, flips global flags instead: in a compiled region it keeps
AOTAutograd from caching (pytorch/pytorch#194007), and where flags alone differ a cached graph can bring a
kernel that was not asked for (#185449). An operator cannot be mistaken for another, forward or backward,
eager or compiled. What the operators demand of their inputs, and of PyTorch's settings for the same bits
every run, is said in limits.py.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .intervals import Intervals

aten = torch.ops.aten


def sdpa_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """PyTorch's composite of matmul, softmax and matmul (float32 inside for 16-bit inputs)."""
    bias, is_causal = _mask(q, k, intervals)
    # With one dimension more than attention has, or Inductor would take it for attention and call a fused kernel.
    tensors = (x[None] for x in _heads_first(q, k, v))
    out, _ = aten._scaled_dot_product_attention_math(
        *tensors, bias, 0.0, is_causal, None, scale=scale, enable_gqa=True
    )  # fmt: skip
    return _zero_empty_rows(out[0].transpose(1, 2), k, intervals), None


def sdpa_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """The memory-efficient CUTLASS kernel. It knows no grouped heads, so those of k and v are repeated."""
    group = q.shape[2] // k.shape[2]
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=2) for x in (k, v))
    bias, is_causal = _mask(q, k, intervals)
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], -1, -1)
    out, *_ = aten._scaled_dot_product_efficient_attention(
        *_heads_first(q, k, v), bias, True, 0.0, is_causal, scale=scale
    )
    return _zero_empty_rows(out.transpose(1, 2), k, intervals), None


def sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """FlashAttention-2 on CUDA; PyTorch's own blockwise kernel on CPU."""
    operator = (
        aten._scaled_dot_product_flash_attention_for_cpu
        if q.device.type == "cpu"
        else aten._scaled_dot_product_flash_attention
    )
    out, *_ = operator(*_heads_first(q, k, v), 0.0, intervals.is_causal, scale=scale)
    return out.transpose(1, 2), None


def sdpa_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """cuDNN's fused attention."""
    out, *_ = aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, intervals.is_causal, scale=scale
    )
    return out.transpose(1, 2), None


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) as the (B, H, S, D) views that the operators take."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _mask(q: Tensor, k: Tensor, intervals: Intervals) -> tuple[Tensor | None, bool]:
    """(bias, is_causal) for the operators that take a mask; bias (R, 1, Sq, Sk) is 0 or -inf in q's dtype.

    A query that sees no key is let see all of them, which is finite; `_zero_empty_rows` puts that right.
    """
    Sq, Sk = q.shape[1], k.shape[1]
    if not intervals.needs_dense(Sq, Sk):
        return None, intervals.is_causal
    visible = intervals.dense(Sq, Sk, q.device)[:, None]
    hidden = ~visible & visible.any(dim=-1, keepdim=True)
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
    # The efficient kernel loads rows of the bias in steps of 16 elements.
    return pad(bias, (0, -Sk % 16))[..., :Sk], False


def _zero_empty_rows(out_BSHD: Tensor, k: Tensor, intervals: Intervals) -> Tensor:
    """Queries that see no key get 0, and so pass no gradient back."""
    Sq, Sk = out_BSHD.shape[1], k.shape[1]
    if not intervals.may_have_empty_rows(Sq, Sk):
        return out_BSHD
    lo, hi = intervals.bounds_of(Sq, Sk, out_BSHD.device).keys
    return out_BSHD.masked_fill((lo == hi)[..., None, None], 0.0)
