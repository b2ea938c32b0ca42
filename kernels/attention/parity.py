"""The one tolerance rule for attention, as a measurement of any implementation on any inputs.

An implementation is as accurate as it can be asked to be when, for out, lse, dq, dk and dv alike,

    max|x - x64|  <=  2 max|standard - x64|  +  eps(dtype) scale

with x64 from `standard` in float64, `standard` run in the dtype of the inputs, and scale the natural size of
the tensor (see `_natural_scales`). NaN always fails. Attention has no other tolerance; nobody tunes this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .intervals import Bounds, Intervals
from .standard import standard

Inputs = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor | None]]
Block = tuple[slice, slice]
"""Rows of the batch and KV heads, each with its whole group of query heads."""

MOST_SCORES = 2**27
"""Scores that `standard` writes out at once: a GiB in float64, of which its backward holds some ten."""


def make_qkv(
    B: int,
    Sq: int,
    Sk: int,
    Hq: int,
    Hkv: int,
    D: int,
    Dv: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Normal q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, D if Dv is None else Dv))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the right one, beside what the rule allows; `str` says it in a sentence."""

    error: float
    """The largest |x - x64|; inf where something is NaN, or where the tensor has a wrong shape or dtype."""
    baseline: float
    """The same of `standard` in the dtype of the inputs."""
    allowed: float
    what: str
    """The element that is furthest off, or what is wrong with the shape or dtype."""

    @property
    def passes(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """The error as a part of what is allowed, above 1 where it is beyond the rule."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else math.inf

    def __str__(self) -> str:
        relation = "within" if self.passes else "> allowed"
        return f"{self.what}: error {self.error:.3g} {relation} {self.allowed:.3g}, standard {self.baseline:.3g}"


def deviations(
    attend: Attend,
    inputs: Inputs,
    intervals: Intervals,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dout: Tensor | None = None,
    lse_gradient: bool = False,
    samples: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Deviation]:
    """`Reference.of(...).deviations(attend)`, for a reference that is used once."""
    reference = Reference.of(
        inputs, intervals, scale=scale, softcap=softcap, dout=dout, lse_gradient=lse_gradient, samples=samples
    )
    return reference.deviations(attend)


@dataclass(frozen=True)
class Reference:
    """What `standard` makes of one call, to measure implementations against. Build one with `of`."""

    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None
    blocks: list[Block]
    exact: list[dict[str, Tensor]]
    """out, lse, dq, dk and dv of each block, in float64."""
    baseline: dict[str, float]
    allowed: dict[str, float]

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        intervals: Intervals,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        dout: Tensor | None = None,
        lse_gradient: bool = False,
        samples: Sequence[tuple[int, int]] | None = None,
        most_scores: int = MOST_SCORES,
    ) -> Reference:
        """The reference for q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); `scale` is D**-0.5 unless given.

        The upstream gradient is `dout` (B, Sq, Hq, Dv), or normal numbers; with `lse_gradient` the LSE gets normal
        numbers too. `samples` are the (row of the batch, KV head) to compare, each with its whole group of query
        heads; all unless given. Where the scores of a comparison are more than `most_scores`, it takes some queries
        at a time and sums their parts of dk and dv in float64; below float64 each part is rounded as `standard` does.
        """
        q, k, v = inputs
        group = q.shape[2] // k.shape[2]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        generator = torch.Generator().manual_seed(1)
        if dout is None:
            dout = torch.randn(*q.shape[:3], v.shape[-1], generator=generator).to(q)
        dlse = None
        if lse_gradient:
            dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator).to(q.device)

        everything = [(slice(0, k.shape[0]), slice(0, k.shape[2]))]
        blocks = everything if samples is None else [(slice(b, b + 1), slice(h, h + 1)) for b, h in samples]
        exact, baseline = [], []
        for block in blocks:
            named = {"q": q, "k": k, "v": v, "dout": dout} | ({} if dlse is None else {"dlse": dlse})
            part = {name: tensor[_place(name, block, group)] for name, tensor in named.items()}
            double = {name: tensor.double() for name, tensor in part.items()}
            shown = _in_rows(intervals, block[0])
            exact.append(_run_standard(**double, intervals=shown, scale=scale, softcap=softcap, most=most_scores))
            rounded = _run_standard(**part, intervals=shown, scale=scale, softcap=softcap, most=most_scores)
            baseline.append({name: _largest(_error(rounded[name], right)) for name, right in exact[-1].items()})

        worst = {name: max((b[name] for b in baseline), key=_nan_first) for name in exact[0]}
        scales = _natural_scales(inputs, scale, dout, dlse, [tensors["lse"] for tensors in exact])
        allowed = {name: 2 * worst[name] + torch.finfo(q.dtype).eps * scales[name] for name in worst}
        return cls(inputs, dout, dlse, blocks, exact, worst, allowed)

    def deviations(self, attend: Attend) -> dict[str, Deviation]:
        """Those of out, lse (where `attend` returns one), dq, dk and dv of a run forward and backward on all inputs.

        `attend` gets the inputs with their strides. Raises what it raises, and ValueError where the reference has a
        gradient for an lse and `attend` returns none.
        """
        actual = _run(attend, self.inputs, self.dout, self.dlse)
        return {name: self._deviation(name, tensor) for name, tensor in actual.items()}

    def _deviation(self, name: str, tensor: Tensor) -> Deviation:
        q, k, _ = self.inputs
        shape = {"lse": (q.shape[0], q.shape[2], q.shape[1]), "out": tuple(self.dout.shape)}.get(name, tensor.shape)
        dtype = torch.promote_types(q.dtype, torch.float32) if name == "lse" else q.dtype
        if tensor.shape != shape:
            return self._refused(name, f"{name} has shape {tuple(tensor.shape)} where {tuple(shape)} is right")
        if tensor.dtype != dtype:
            return self._refused(name, f"{name} is in {tensor.dtype} where {dtype} is right")
        largest, what = -1.0, f"{name} is empty"
        for block, tensors in zip(self.blocks, self.exact, strict=True):
            place = _place(name, block, q.shape[2] // k.shape[2])
            right, found = tensors[name], tensor[place]
            error = _error(found, right).nan_to_num(nan=math.inf)
            if error.numel() and error.max() > largest:
                at = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
                largest = error[at].item()
                offsets = [*(part.start or 0 for part in place), 0, 0]
                where = [index + offset for index, offset in zip(at, offsets, strict=False)]
                what = f"{name}{where} is {found[at]:.6g} where {right[at]:.6g} is right"
        return Deviation(max(largest, 0.0), self.baseline[name], self.allowed[name], what)

    def _refused(self, name: str, what: str) -> Deviation:
        return Deviation(math.inf, self.baseline[name], self.allowed[name], what)


def _place(name: str, block: Block, group: int) -> tuple[slice, ...]:
    """Where the block lies in the tensor of that name, of heads that are in groups of `group`."""
    rows, kv_heads = block
    if name in ("k", "v", "dk", "dv"):
        return rows, slice(None), kv_heads
    q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
    return (rows, q_heads) if name in ("lse", "dlse") else (rows, slice(None), q_heads)


def _in_rows(intervals: Intervals, rows: slice) -> Intervals:
    if intervals.bounds is None or intervals.bounds.keys.shape[1] == 1:
        return intervals
    return Intervals(bounds=Bounds(intervals.bounds.keys[:, rows], intervals.bounds.queries[:, rows]))


def _run_standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    intervals: Intervals,
    scale: float,
    softcap: float,
    most: int,
) -> dict[str, Tensor]:
    """`_run` of `standard`, of so many queries at a time that it writes out at most `most` scores."""

    def run(q: Tensor, dout: Tensor, dlse: Tensor | None, intervals: Intervals) -> dict[str, Tensor]:
        return _run(lambda *inputs: standard(*inputs, intervals, scale, softcap), (q, k, v), dout, dlse)

    B, Sq, Hq, _ = q.shape
    Sk = k.shape[1]
    step = max(most // max(B * Hq * Sk, 1), 1)
    if step >= Sq:
        return run(q, dout, dlse, intervals)
    bounds = intervals.bounds_of(Sq, Sk, q.device)
    parts, dk, dv = [], torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    for start in range(0, Sq, step):
        some = slice(start, min(start + step, Sq))
        seen = Bounds(bounds.keys[..., some], (bounds.queries - start).clamp(0, some.stop - start))
        part = run(q[:, some], dout[:, some], None if dlse is None else dlse[..., some], Intervals(bounds=seen))
        dk += part.pop("dk")
        dv += part.pop("dv")
        parts.append(part)
    axes = {"out": 1, "lse": 2, "dq": 1}
    joined = {name: torch.cat([part[name] for part in parts], axis) for name, axis in axes.items()}
    return joined | {"dk": dk.to(k.dtype), "dv": dv.to(v.dtype)}


def _run(attend: Attend, inputs: Inputs, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """out, lse (where there is one), dq, dk, dv."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    result = attend(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, gradients = [out], [dout]
    if dlse is not None:
        if lse is None:
            raise ValueError("parity: lse_gradient asks for an lse, and attend returned none")
        outputs.append(lse)
        gradients.append(dlse.to(lse.dtype))
    dq, dk, dv = torch.autograd.grad(outputs, leaves, gradients)
    tensors = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def _natural_scales(
    inputs: Inputs, scale: float, dout: Tensor, dlse: Tensor | None, lses: list[Tensor]
) -> dict[str, float]:
    """The size that a rounding error of each tensor is measured against."""
    max_q, max_k, max_v = (_largest(x) for x in inputs)
    max_dp = _largest(dout) * max_v + (0.0 if dlse is None else _largest(dlse))
    return {
        "out": max_v,
        "lse": max(1.0, *(_largest(lse[lse.isfinite()]) for lse in lses)),
        "dq": max_dp * max_k * scale,
        "dk": max_dp * max_q * scale,
        "dv": _largest(dout),
    }


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _error(tensor: Tensor, exact: Tensor) -> Tensor:
    """|tensor - exact| in float64; 0 where both are the same infinity."""
    tensor = tensor.double()
    return torch.where(tensor == exact, 0.0, (tensor - exact).abs())
