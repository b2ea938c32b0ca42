"""The one tolerance rule for attention, and the inputs to apply it to.

An implementation is as accurate as it can be asked to be when, for out, lse, dq, dk and dv alike,

    max|x - x64|  <=  2 max|standard - x64|  +  eps(dtype) scale

with x64 from `standard` in float64, `standard` run in the dtype of the inputs, and scale the natural size of
the tensor (see `_natural_scales`). NaN always fails. Attention has no other tolerance; nobody tunes this one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashtrain.kernels.attention.intervals import Intervals
from flashtrain.kernels.attention.standard import standard

Inputs = tuple[Tensor, Tensor, Tensor]


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
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Normal q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, D if Dv is None else Dv))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def assert_as_accurate_as_standard(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor | None]],
    inputs: Inputs,
    intervals: Intervals,
    *,
    scale: float | None = None,
    dout: Tensor | None = None,
    lse_gradient: bool = False,
) -> None:
    """Run `attend(q, k, v) -> out | (out, lse or None)` forward and backward and hold it to the rule.

    `inputs` keep their strides. The upstream gradient is `dout`, or normal numbers; with `lse_gradient` the
    LSE gets normal numbers too. The lse is checked whenever `attend` returns one.
    """
    q, k, v = inputs
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(1)
    if dout is None:
        dout = torch.randn(*q.shape[:3], v.shape[-1], generator=generator).to(q)
    dlse = None
    if lse_gradient:
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator).to(q.device)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return standard(q, k, v, intervals, scale)

    actual = _run(attend, inputs, dout, dlse)
    exact = _run(reference, tuple(x.double() for x in inputs), dout.double(), dlse)
    baseline = _run(reference, inputs, dout, dlse)
    scales = _natural_scales(inputs, scale, dout, dlse, exact["lse"])

    failures = []
    for name, tensor in actual.items():
        assert tensor.dtype == baseline[name].dtype, f"{name} is in {tensor.dtype}, not in {baseline[name].dtype}"
        error, baseline_error = _error(tensor, exact[name]), _largest(_error(baseline[name], exact[name]))
        allowed = 2 * baseline_error + torch.finfo(q.dtype).eps * scales[name]
        if not bool((error <= allowed).all()):
            failures.append(
                _describe(name, tensor, exact[name], error)
                + f" > allowed {allowed:.3g}, where standard in {q.dtype} has {baseline_error:.3g}"
            )
    assert not failures, "\n".join(failures)


def _run(attend, inputs: Inputs, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """out, lse (where there is one), dq, dk, dv."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    result = attend(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, gradients = [out], [dout]
    if dlse is not None:
        assert lse is not None, "lse_gradient asks for an lse, and attend returned none"
        outputs.append(lse)
        gradients.append(dlse.to(lse.dtype))
    dq, dk, dv = torch.autograd.grad(outputs, leaves, gradients)
    tensors = {"out": out, "dq": dq, "dk": dk, "dv": dv} | ({} if lse is None else {"lse": lse})
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _natural_scales(
    inputs: Inputs, scale: float, dout: Tensor, dlse: Tensor | None, lse: Tensor
) -> dict[str, float]:
    """The size that a rounding error of each tensor is measured against."""
    max_q, max_k, max_v = (_largest(x) for x in inputs)
    max_dp = _largest(dout) * max_v + (0.0 if dlse is None else _largest(dlse))
    return {
        "out": max_v,
        "lse": max(1.0, _largest(lse[lse.isfinite()])),
        "dq": max_dp * max_k * scale,
        "dk": max_dp * max_q * scale,
        "dv": _largest(dout),
    }


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _error(tensor: Tensor, exact: Tensor) -> Tensor:
    """|tensor - exact| in float64; 0 where both are the same infinity."""
    assert tensor.shape == exact.shape, f"shape {tuple(tensor.shape)} where {tuple(exact.shape)} is right"
    tensor = tensor.double()
    return torch.where(tensor == exact, 0.0, (tensor - exact).abs())


def _describe(name: str, tensor: Tensor, exact: Tensor, error: Tensor) -> str:
    worst = error.nan_to_num(nan=math.inf).argmax()
    at = tuple(int(index) for index in torch.unravel_index(worst, error.shape))
    return f"{name}{list(at)} is {tensor[at]:.6g} where {exact[at]:.6g} is right: error {error[at]:.3g}"
