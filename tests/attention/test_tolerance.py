"""The rule itself: it passes what is right, and finds and names what is wrong."""

import math

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.parity import Reference, deviations
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
        pytest.param(lambda lse: lse.unsqueeze(-1), r"^lse has shape \(1, 2, 9, 1\) where", id="shape"),
        pytest.param(lambda lse: lse.double(), r"^lse is in torch.float64 where torch.float32 is", id="dtype"),
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


MASKS = {
    "full": Intervals.full(),
    "causal": CAUSAL,
    "window": Intervals.window(3, 1),
    "documents": CAUSAL.in_documents((torch.arange(20) // 6).expand(2, -1), (torch.arange(13) // 5).expand(2, -1)),
    "prefix": Intervals.prefix_lm(torch.tensor([2, 7]), 20, 13),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_reference_in_parts_is_the_reference(mask):
    inputs = make_qkv(2, 20, 13, 4, 2, 8, 5, dtype=torch.float64)
    settings = {"softcap": 2.0, "lse_gradient": True}
    whole = Reference.of(inputs, MASKS[mask], **settings)
    in_parts = Reference.of(inputs, MASKS[mask], **settings, most_scores=2 * 4 * 13 * 6)
    for name, right in whole.exact[0].items():
        torch.testing.assert_close(in_parts.exact[0][name], right, rtol=1e-12, atol=1e-12)
    samples = [(b, h) for b in range(2) for h in range(2)]
    sampled = Reference.of(inputs, MASKS[mask], **settings, samples=samples)
    for (b, h), tensors in zip(samples, sampled.exact, strict=True):
        torch.testing.assert_close(tensors["lse"][0], whole.exact[0]["lse"][b, 2 * h : 2 * h + 2])
        torch.testing.assert_close(tensors["dq"][0], whole.exact[0]["dq"][b, :, 2 * h : 2 * h + 2])
        torch.testing.assert_close(tensors["dv"][0], whole.exact[0]["dv"][b, :, h : h + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_samples_are_allowed_what_the_whole_is(dtype):
    inputs = make_qkv(2, 9, 9, 4, 2, 8, dtype=dtype)
    samples = [(b, h) for b in range(2) for h in range(2)]
    whole, sampled = (deviations(attend, inputs, CAUSAL, samples=chosen) for chosen in (None, samples))
    for name, deviation in whole.items():
        assert sampled[name].allowed == pytest.approx(deviation.allowed, rel=0.2)


def test_an_error_is_seen_in_the_samples_alone():
    inputs = make_qkv(2, 9, 9, 4, 2, 8)

    def attend_wrongly(q, k, v):
        out, lse = attend(q, SpoilGradient.apply(k, 0.1), v)
        return out, spoil(lse, 0.1)

    elsewhere = deviations(attend_wrongly, inputs, CAUSAL, samples=[(0, 1), (1, 0)])
    assert all(deviation.passes for deviation in elsewhere.values())
    found = deviations(attend_wrongly, inputs, CAUSAL, samples=[(0, 0), (1, 1)])
    assert {name for name, deviation in found.items() if not deviation.passes} == {"lse", "dk"}
    assert found["dk"].what.startswith("dk[1, 8, 1, 7] is") and found["lse"].what.startswith("lse[1, 3, 8] is")


def test_a_deviation_is_measured_beside_what_is_allowed():
    inputs = make_qkv(1, 9, 9, 2, 2, 8, dtype=torch.bfloat16)
    measured = deviations(attend, inputs, CAUSAL)
    assert list(measured) == ["out", "lse", "dq", "dk", "dv"]
    for deviation in measured.values():
        assert deviation.error == deviation.baseline < deviation.allowed / 2
        assert deviation.ratio == deviation.error / deviation.allowed < 0.5
    without_lse = deviations(lambda *inputs: attend(*inputs)[0], inputs, CAUSAL)
    assert list(without_lse) == ["out", "dq", "dk", "dv"]
    with pytest.raises(ValueError, match="attend returned none"):
        deviations(lambda *inputs: attend(*inputs)[0], inputs, CAUSAL, lse_gradient=True)


def test_softcap_is_part_of_the_reference():
    inputs = make_qkv(1, 9, 9, 2, 2, 8)
    capped = deviations(lambda q, k, v: standard(q, k, v, CAUSAL, 8**-0.5, 1.5), inputs, CAUSAL, softcap=1.5)
    assert all(deviation.passes for deviation in capped.values())
    assert not deviations(attend, inputs, CAUSAL, softcap=1.5)["out"].passes
