"""flash_v2 as operators of torch.library: schemas, fakes, autograd and the device guard.

`torch.compile` sees one opaque node that takes tensors and numbers only. Importing this file needs torch
alone: the launchers, and Triton with them, are imported when an operator first runs. Limits are stated in
limits.py.
"""

import torch
from torch import Tensor

from .intervals import Intervals
from .tiles import architecture, tiles


def flash_v2(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Sq, Hq, D) and the natural-log LSE (B, Hq, Sq) in fp32, both differentiable once."""
    return _forward(q, k, v, intervals.left, intervals.right, scale)


@torch.library.custom_op("flashtrain::flash_v2", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    from .flash_v2.forward import forward

    launch = tiles(architecture(q.device), q.shape[-1], q.dtype)
    with torch.cuda.device_of(q):
        return forward(q, k, v, left, right, scale, launch)


@_forward.register_fake
def _(q, k, v, left, right, scale):
    batch, q_len, num_q_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, num_q_heads, q_len, dtype=torch.float32)


@torch.library.custom_op("flashtrain::flash_v2_backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: int | None,
    right: int | None,
    scale: float,
    needs_dq: bool,
    needs_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from .flash_v2.backward import backward

    launch = tiles(architecture(q.device), q.shape[-1], q.dtype)
    with torch.cuda.device_of(q):
        return backward(dout, dlse, q, k, v, out, lse, left, right, scale, launch, needs_dq, needs_dkdv)


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, left, right, scale, needs_dq, needs_dkdv):
    dq = q.new_empty(q.shape if needs_dq else 0)
    dk, dv = (x.new_empty(x.shape if needs_dkdv else 0) for x in (k, v))
    return dq, dk, dv


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, *ctx.mask_and_scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx, dout: Tensor, dlse: Tensor):
    needs_dq, needs_dk, needs_dv, *_ = ctx.needs_input_grad
    dq, dk, dv = _backward(
        dout, dlse, *ctx.saved_tensors, *ctx.mask_and_scale, needs_dq, needs_dk or needs_dv
    )
    return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "attention: flash_v2 has no second derivative; use variant standard or sdpa_math for it"
    )


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward.register_autograd(_refuse_second_derivative)
