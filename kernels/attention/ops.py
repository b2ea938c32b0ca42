"""Our kernels as operators of torch.library: schemas, fakes, autograd and the device guard.

`torch.compile` sees one opaque node that takes tensors and numbers only. Importing this file needs torch
alone: the launchers, and Triton with them, are imported when an operator first runs. Limits are stated in
limits.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._guards import TracingContext

from .intervals import Bounds, Intervals
from .tiles import Tiles, architecture, sram_elements, tiles


def _register(
    name: str, launch_forward: Callable[..., tuple[Tensor, Tensor]], launch_backward: Callable[..., None]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Makes the operators flashtrain::name and flashtrain::name_backward; returns what a variant is called by.

    The launchers take `forward(q, k, v, mask, scale, softcap)` and, to write into dq, dk and dv, of which either may be
    None, dq or both others, `backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap)`.
    """

    @torch.library.custom_op(f"flashtrain::{name}", mutates_args=())
    def forward(
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
        with torch.cuda.device_of(q):
            return launch_forward(q, k, v, _mask(left, right, keys, queries), scale, softcap)

    @forward.register_fake
    def _(q, k, v, left, right, keys, queries, scale, softcap):
        batch, q_len, num_q_heads, _ = q.shape
        out = q.new_empty(batch, q_len, num_q_heads, v.shape[-1])
        return out, q.new_empty(batch, num_q_heads, q_len, dtype=torch.float32)

    @torch.library.custom_op(f"flashtrain::{name}_backward", mutates_args=())
    def backward(
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
        together: bool,
    ) -> list[Tensor]:
        gradients, mask = _empty_gradients(q, k, v, needs_dq, needs_dkdv, together), _mask(left, right, keys, queries)
        with torch.cuda.device_of(q):
            dq, dk, dv = _apart(gradients, q, k, needs_dq, needs_dkdv)
            launch_backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap)
        return gradients

    @backward.register_fake
    def _(dout, dlse, q, k, v, out, lse, left, right, keys, queries, scale, softcap, needs_dq, needs_dkdv, together):
        return _empty_gradients(q, k, v, needs_dq, needs_dkdv, together)

    def save_for_backward(ctx, inputs, output) -> None:
        q, k, v, ctx.left, ctx.right, keys, queries, ctx.scale, ctx.softcap = inputs
        ctx.save_for_backward(q, k, v, *output, keys, queries)

    def differentiate(ctx, dout: Tensor, dlse: Tensor):
        needs_dq, needs_dk, needs_dv, *others = ctx.needs_input_grad
        *tensors, keys, queries = ctx.saved_tensors
        needs = needs_dq, needs_dk or needs_dv
        together = all(needs) and _are_known_to_fit_one(*tensors[:3])
        gradients = backward(
            dout, dlse, *tensors, ctx.left, ctx.right, keys, queries, ctx.scale, ctx.softcap, *needs, together
        )  # fmt: skip
        dq, dk, dv = _apart(gradients, *tensors[:2], *needs)
        return dq, dk if needs_dk else None, dv if needs_dv else None, *(None for _ in others)

    def refuse_second_derivative(ctx, *gradients):
        raise NotImplementedError(
            f"attention: {name} has no second derivative; use variant standard or sdpa_math for it"
        )

    forward.register_autograd(differentiate, setup_context=save_for_backward)
    backward.register_autograd(refuse_second_derivative)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        intervals: Intervals,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns out (B, Sq, Hq, Dv) and the natural-log LSE (B, Hq, Sq) in fp32, both differentiable once."""
        bounds = intervals.bounds
        keys, queries = (None, None) if bounds is None else (bounds.keys, bounds.queries)
        return forward(q, k, v, intervals.left, intervals.right, keys, queries, scale, softcap)

    return attend


def _mask(left: int | None, right: int | None, keys: Tensor | None, queries: Tensor | None) -> Intervals:
    """An operator takes a mask apart, since it takes tensors and numbers only."""
    return Intervals(left, right, None if keys is None else Bounds(keys, queries))


def _are_known_to_fit_one(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a compiler traces the backward, and knows that dq, dk and dv have the shapes of parts of one tensor.

    As one they are the gradient of what q, k and v are split from, mostly, and it need not join them. Uncompiled they
    are joined in any case, and as parts of one tensor each would keep the memory of all.
    """
    if TracingContext.try_get() is None:  # torch.compiler.is_compiling is for what Dynamo reads, before 2.13 at least
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return all(statically_known_true(a == b) for a, b in ((q.shape[1], k.shape[1]), (q.shape[-1], v.shape[-1])))


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, needs_dq: bool, needs_dkdv: bool, together: bool
) -> list[Tensor]:
    """Memory for dq, or dk and dv, or all three; these together in one tensor (B, S, Hq + 2 Hkv, D), if it is said."""
    if together:
        batch, length, num_q_heads, head_dim = q.shape
        return [q.new_empty(batch, length, num_q_heads + 2 * k.shape[2], head_dim)]
    return [x.new_empty(x.shape) for x in (q,) * needs_dq + (k, v) * needs_dkdv]


def _apart(
    gradients: list[Tensor], q: Tensor, k: Tensor, needs_dq: bool, needs_dkdv: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk and dv in what `_empty_gradients` made; None for what is not needed."""
    if needs_dq and needs_dkdv and len(gradients) == 1:
        return gradients[0].split_with_sizes((q.shape[2], k.shape[2], k.shape[2]), 2)
    dk, dv = gradients[-2:] if needs_dkdv else (None, None)
    return gradients[0] if needs_dq else None, dk, dv


def _flash_v1_forward(q, k, v, mask, scale, softcap):
    from .flash_v1 import forward

    return forward(q, k, v, mask, scale, sram_elements(q.device))


def _flash_v1_backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap):
    from .flash_v1 import backward

    backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, sram_elements(q.device))


def _flash_v2_forward(q, k, v, mask, scale, softcap):
    from .flash_v2.forward import forward

    return forward(q, k, v, mask, scale, softcap, _tiles(q, v))


def _flash_v2_backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap):
    from .flash_v2.backward import backward

    backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap, _tiles(q, v))


def _flash_hopper_forward(q, k, v, mask, scale, softcap):
    from .flash_hopper.forward import forward

    return forward(q, k, v, mask, scale, softcap)


def _flash_hopper_backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap):
    from .flash_hopper.backward import backward

    backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap)


def _flash_hopper_backward_deterministic(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap):
    from .flash_hopper.backward import backward, can_keep_order

    if can_keep_order(mask, q.shape[1], k.shape[1]):
        backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap, in_order=True)
    else:
        _flash_v2_backward(dq, dk, dv, dout, dlse, q, k, v, out, lse, mask, scale, softcap)


def _tiles(q: Tensor, v: Tensor) -> Tiles:
    return tiles(architecture(q.device), max(q.shape[-1], v.shape[-1]), q.dtype)


flash_v1 = _register("flash_v1", _flash_v1_forward, _flash_v1_backward)
flash_v2 = _register("flash_v2", _flash_v2_forward, _flash_v2_backward)
flash_hopper = _register("flash_hopper", _flash_hopper_forward, _flash_hopper_backward)
# Its backward adds dQ up in order, at some cost; where that cannot be kept, flash_v2's takes the same tensors.
flash_hopper_deterministic = _register(
    "flash_hopper_deterministic", _flash_hopper_forward, _flash_hopper_backward_deterministic
)
