"""The rule itself: it passes what is right, and finds and names what is wrong."""

import math

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.standard import standard

CAUSAL = Intervals.causal()


def attend(q, k, v):
    return standard(q, k, v, CAUSAL, 8**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("Sq", "Sk"), [(20, 20), (20, 9), (0, 5), (5, 0)])
def test_standard_is_as_accurate_as_itself(Sq, Sk, dtype):
    inputs = make_qkv(2, Sq, Sk, 4, 2, 8, dtype=dtype)
    assert_as_accurate_as_standard(attend, inputs, CAUSAL, lse_gradient=True)


def spoil(x: torch.Tensor, error: float) -> torch.Tensor:
    """x with its last element off by `error`."""
    x = x.clone()
    x[(-1,) * x.ndim] += error
    return x


class SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return spoil(gradient, ctx.error), None


@pytest.mark.parametrize("error", [1e-4, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_element_is_found_and_named(name, error):
    def attend_wrongly(q, k, v):
        inputs = {"dq": q, "dk": k, "dv": v}
        if name in inputs:
            inputs[name] = SpoilGradient.apply(inputs[name], error)
        outputs = dict(zip(("out", "lse"), attend(*inputs.values()), strict=True))
        if name in outputs:
            outputs[name] = spoil(outputs[name], error)
        return outputs["out"], outputs["lse"]

    with pytest.raises(AssertionError) as failure:
        assert_as_accurate_as_standard(attend_wrongly, make_qkv(1, 9, 9, 2, 2, 8), CAUSAL)
    message = str(failure.value).splitlines()[0]
    assert message.startswith(f"{name}[0, 1, 8] is" if name == "lse" else f"{name}[0, 8, 1, 7] is")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda lse: lse.clamp(min=-1e30), r"^lse\[0, 0, 0\] is .* where -inf is right", id="finite"),
        pytest.param(lambda lse: lse.unsqueeze(-1), r"^shape \(1, 2, 9, 1\) where \(1, 2, 9\) is right", id="shape"),
        pytest.param(lambda lse: lse.double(), r"^lse is in torch.float64, not in torch.float32", id="dtype"),
    ],
)
def test_a_wrong_infinity_shape_or_dtype_fails(change, message):
    def attend_wrongly(q, k, v):
        out, lse = attend(q, k, v)
        return out, change(lse)

    with pytest.raises(AssertionError, match=message):
        assert_as_accurate_as_standard(attend_wrongly, make_qkv(1, 9, 4, 2, 2, 8), CAUSAL)


def test_inputs_are_the_same_on_every_call_and_differ_by_seed():
    first, again, other = (make_qkv(1, 3, 4, 2, 1, 8, 5, seed=seed) for seed in (3, 3, 4))
    assert [tuple(x.shape) for x in first] == [(1, 3, 2, 8), (1, 4, 1, 8), (1, 4, 1, 5)]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
