"""flash_v2 as operators of torch.library: schemas, fakes, autograd and the device guard.

`torch.compile` sees one opaque node that takes tensors and numbers only. Importing this file needs torch
alone: the launchers, and Triton with them, are imported when an operator first runs. Limits are stated in
limits.py.
"""

import torch
from torch import Tensor

from .intervals import Bounds, Intervals
from .tiles import Tiles, architecture, tiles


def flash_v2(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Sq, Hq, Dv) and the natural-log LSE (B, Hq, Sq) in fp32, both differentiable once."""
    bounds = intervals.bounds
    keys, queries = (None, None) if bounds is None else (bounds.keys, bounds.queries)
    return _forward(q, k, v, intervals.left, intervals.right, keys, queries, scale, softcap)


def _mask(left: int | None, right: int | None, keys: Tensor | None, queries: Tensor | None) -> Intervals:
    """An operator takes a mask apart, since it takes tensors and numbers only."""
    return Intervals(left, right, None if keys is None else Bounds(keys, queries))


def _tiles(q: Tensor, v: Tensor, mask: Intervals) -> Tiles:
    return tiles(architecture(q.device), max(q.shape[-1], v.shape[-1]), q.dtype, mask.is_full)


@torch.library.custom_op("flashtrain::flash_v2", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int | None,
    right: int | None,
    keys: Tensor | None,
    queries: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    from .flash_v2.forward import forward

    mask = _mask(left, right, keys, queries)
    with torch.cuda.device_of(q):
        return forward(q, k, v, mask, scale, softcap, _tiles(q, v, mask))


@_forward.register_fake
def _(q, k, v, left, right, keys, queries, scale, softcap):
    batch, q_len, num_q_heads, _ = q.shape
    out = q.new_empty(batch, q_len, num_q_heads, v.shape[-1])
    return out, q.new_empty(batch, num_q_heads, q_len, dtype=torch.float32)


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
    keys: Tensor | None,
    queries: Tensor | None,
    scale: float,
    softcap: float,
    needs_dq: bool,
    needs_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from .flash_v2.backward import backward

    mask = _mask(left, right, keys, queries)
    with torch.cuda.device_of(q):
        return backward(
            dout, dlse, q, k, v, out, lse, mask, scale, softcap, _tiles(q, v, mask), needs_dq, needs_dkdv
        )


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, left, right, keys, queries, scale, softcap, needs_dq, needs_dkdv):
    dq = q.new_empty(q.shape if needs_dq else 0)
    dk, dv = (x.new_empty(x.shape if needs_dkdv else 0) for x in (k, v))
    return dq, dk, dv


def _save_for_backward(ctx, inputs, output) -> None:
    q, k, v, ctx.left, ctx.right, keys, queries, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, keys, queries)


def _differentiate(ctx, dout: Tensor, dlse: Tensor):
    needs_dq, needs_dk, needs_dv, *others = ctx.needs_input_grad
    *tensors, keys, queries = ctx.saved_tensors
    dq, dk, dv = _backward(
        dout, dlse, *tensors, ctx.left, ctx.right, keys, queries, ctx.scale, ctx.softcap,
        needs_dq, needs_dk or needs_dv,
    )  # fmt: skip
    return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, *(None for _ in others)


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "attention: flash_v2 has no second derivative; use variant standard or sdpa_math for it"
    )


_forward.register_autograd(_differentiate, setup_context=_save_for_backward)
_backward.register_autograd(_refuse_second_derivative)
