"""The one signature of attention: validate, choose, call.

Shapes, dtypes and devices are checked here, once for all variants. What a variant can do is said in
limits.py, how it does it in its own file.
"""

import math

import torch
from torch import Tensor

from .intervals import Intervals
from .spec import AttentionSpec
from .variants import attend_of, resolve


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    *,
    variant: str = "auto",
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v, computed in the dtype of q whether or not autocast is on.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), of one dtype, with `Hq % Hkv == 0`; query head h
    reads KV head `h // (Hq // Hkv)`. Any strides; a last dimension that is not dense is copied. `scale` is
    D**-0.5 unless given; scaled scores s become softcap tanh(s / softcap) unless softcap is 0. Returns out
    (B, Sq, Hq, Dv) and, with `return_lse`, the natural log-sum-exp of each query's scores, (B, Hq, Sq) in
    float32 (float64 for float64), differentiable too. A query that sees no key gives out 0, lse -inf and zero
    gradients. What queries and keys hold must be finite, also where no query looks: 0 times NaN is NaN.

    With `deterministic`, or under `torch.use_deterministic_algorithms(True)` and not its `warn_only`, output and
    gradients have the same bits every run on the same device and versions.

    Raises ValueError (shapes, devices, scale, softcap), TypeError (dtypes), or Unsupported (a ValueError) where
    `variant` does not exist or cannot serve the call: only "auto" chooses, and it logs its choice.
    """
    _check(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    _check_bounds(q, k, intervals)
    _check_scores(scale, softcap)
    intervals = intervals.at(q.shape[1], k.shape[1])
    spec = AttentionSpec.of(
        q, k, v, intervals, softcap=softcap, needs_lse=return_lse, deterministic=deterministic
    )
    name = resolve(variant, spec)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    attend = attend_of(name, deterministic=spec.deterministic, needs_lse=return_lse)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = attend(q, k, v, intervals, scale, softcap)
    if not return_lse:
        return out
    assert lse is not None, f"{name} said that it returns the lse"
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(
                f"attention: {name} must be (batch, sequence, heads, head_dim), not {tuple(tensor.shape)}"
            )
        if tensor.dtype != q.dtype or not tensor.is_floating_point():
            raise TypeError(
                f"attention: q, k and v must be of one floating dtype, not {q.dtype}, {k.dtype} and {v.dtype}"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"attention: q, k and v must be on one device, not {q.device}, {k.device} and {v.device}"
            )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"attention: q, k and v must have one batch size, not {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
        )
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            "attention: k and v must have the same length and heads, not "
            f"{tuple(k.shape[1:3])} and {tuple(v.shape[1:3])}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q and k must have one head_dim, not {q.shape[3]} and {k.shape[3]}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key and value heads"
        )


def _check_bounds(q: Tensor, k: Tensor, intervals: Intervals) -> None:
    if intervals.bounds is None:
        return
    for side, bounds, tensor in (("queries", intervals.bounds.keys, q), ("keys", intervals.bounds.queries, k)):
        rows, length = tensor.shape[:2]
        if bounds.shape not in ((2, 1, length), (2, rows, length)):
            raise ValueError(
                f"attention: the mask was made for {bounds.shape[1]} rows of {bounds.shape[2]} {side}, and there "
                f"are {rows} of {length}"
            )
        if bounds.device != tensor.device:
            raise ValueError(f"attention: the mask must be on {tensor.device} as q is, not on {bounds.device}")
        if bounds.dtype != torch.int32 or not bounds.is_contiguous():
            raise ValueError(f"attention: the bounds of a mask must be contiguous int32, not {bounds.dtype}")


def _check_scores(scale: float, softcap: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"attention: scale must be above 0 and finite, not {scale}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"attention: softcap must be above 0 and finite, or 0 for none, not {softcap}")
