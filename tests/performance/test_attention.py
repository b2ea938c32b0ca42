from dataclasses import replace

import pytest
import torch

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.variants import VARIANTS
from flashtrain.performance.attention import Measurement, NoSpeed, Problem, measure
from flashtrain.performance.timing import HostClock, Timing

SMALL = Problem("causal", 32, batch=2, head_dim=8, num_q_heads=4, num_kv_heads=2)


def measured(variants, intervals=None, problem=SMALL, passes=("forward", "backward"), rounds=2):
    """{(variant, pass): Measurement} on the CPU in fp32."""
    found = measure(
        problem,
        Intervals.causal() if intervals is None else intervals,
        variants,
        list(passes),
        HostClock(),
        device="cpu",
        dtype=torch.float32,
        warmup=1,
        rounds=rounds,
        seed=0,
    )
    return {(one.variant, one.pass_name): one for one in found}


@pytest.fixture
def variant_that(monkeypatch):
    """variant_that(attend) -> the name of a variant that can do everything and does that."""

    def add(attend):
        monkeypatch.setitem(VARIANTS, "made_up", replace(VARIANTS["standard"], attend=attend, attend_alone=None))
        return "made_up"

    return add


def test_a_tflop_is_of_the_visible_area():
    """Documents of 3, 1 and 4 tokens: 6 + 1 + 10 pairs in a row, one causal row of 8: 36."""
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0] * 8])
    intervals = Intervals.causal().in_documents(documents)
    problem = Problem("documents", 8, batch=2, head_dim=16, num_q_heads=6, num_kv_heads=3)
    found = measured(["standard"], intervals, problem)
    assert found["standard", "forward"].flops == 4 * (17 + 36) * 6 * 16
    assert found["standard", "backward"].flops == 2.5 * found["standard", "forward"].flops
    timed = Measurement(problem, "standard", "forward", 20_000_000, Timing((3.0, 1e-3, 2e-3)), None)
    assert timed.tflops == pytest.approx(0.01)


def test_right_variants_are_timed_and_their_checks_kept():
    found = measured(["standard", "sdpa_math", "sdpa_flash"], rounds=3)
    assert list(found) == [
        (variant, name) for name in ("forward", "backward") for variant in ("standard", "sdpa_math", "sdpa_flash")
    ]  # fmt: skip
    for one in found.values():
        assert len(one.result.seconds) == 3 and one.tflops > 0
        assert set(one.check) == {"out", "dq", "dk", "dv"} and all(d.passes for d in one.check.values())


def test_only_the_passes_asked_for():
    assert list(measured(["sdpa_math"], passes=["backward"])) == [("sdpa_math", "backward")]


def test_a_wrong_variant_gets_no_speed(variant_that):
    """Wrong in the gradient of k alone, by a factor."""

    def attend(q, k, v, *rest):
        skewed = k.detach() + 1.01 * (k - k.detach())
        return VARIANTS["sdpa_math"].attend(q, skewed, v, *rest)

    wrong = variant_that(attend)
    found = measured([wrong, "standard"])
    for name in ("forward", "backward"):
        result = found[wrong, name].result
        assert result.word.startswith("check failed: dk ") and result.word.endswith("x allowed")
        assert found[wrong, name].tflops is None
        assert isinstance(found["standard", name].result, Timing)
    assert [name for name, deviation in found[wrong, "forward"].check.items() if not deviation.passes] == ["dk"]


def test_wrong_in_the_last_head_of_the_last_row_is_seen(variant_that):
    def attend(q, k, v, *rest):
        out, _ = VARIANTS["sdpa_math"].attend(q, k, v, *rest)
        factor = torch.ones_like(out)
        factor[-1, -1, -1, -1] = torch.nan
        return out * factor, None

    wrong = variant_that(attend)
    assert measured([wrong])[wrong, "forward"].result.word.startswith("check failed: out not finite")


def test_what_does_not_fit_is_told_beside_what_does(variant_that):
    def attend(*inputs):
        raise torch.OutOfMemoryError("too much")

    large = variant_that(attend)
    found = measured([large, "standard"])
    assert found[large, "forward"].result == found[large, "backward"].result == NoSpeed("out of memory")
    assert found[large, "forward"].check is None
    assert isinstance(found["standard", "forward"].result, Timing)


def test_a_reference_that_does_not_fit_leaves_nothing_checked(monkeypatch):
    def of(*inputs, **options):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr("flashtrain.performance.attention.Reference.of", of)
    found = measured(["standard", "sdpa_cudnn"])
    assert found["standard", "forward"].result == NoSpeed("no memory to check it")
    assert found["sdpa_cudnn", "forward"].result.reason == "runs on cuda, not on cpu"


def test_a_variant_that_cannot_says_why():
    found = measured(["sdpa_flash", "sdpa_cudnn"], Intervals.window(3, 0))
    assert found["sdpa_flash", "forward"].result.reason == "takes the full and the causal mask, not window(3, 0)"
    assert found["sdpa_cudnn", "forward"].result.reason == "runs on cuda, not on cpu"


def test_any_other_error_of_a_variant_is_a_bug(variant_that):
    def attend(*inputs):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        measured([variant_that(attend)])
