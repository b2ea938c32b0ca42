from dataclasses import replace

import pytest
import torch
from measuring import SMALL, measured

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.variants import VARIANTS
from flashtrain.performance.attention import Measurement, Problem
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.timing import Timing


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
        assert one.check.failure is None and one.check.not_finite == ()
        assert set(one.check.deviations) == {"out", "dq", "dk", "dv"}
        assert all(deviation.passes for deviation in one.check.deviations.values())


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
    deviations = found[wrong, "forward"].check.deviations
    assert [name for name, deviation in deviations.items() if not deviation.passes] == ["dk"]


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
    assert found[large, "forward"].result == found[large, "backward"].result == NoSpeed("failed: out of memory")
    assert found[large, "forward"].check is None
    assert isinstance(found["standard", "forward"].result, Timing)


def test_a_reference_that_does_not_fit_leaves_nothing_checked(monkeypatch):
    def of(*inputs, **options):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr("flashtrain.performance.attention.Reference.of", of)
    found = measured(["standard", "sdpa_cudnn"])
    assert found["standard", "forward"].result == NoSpeed("not checked: out of memory")
    assert found["sdpa_cudnn", "forward"].result.reason == "runs on cuda, not on cpu"


def test_a_variant_that_cannot_says_why():
    found = measured(["sdpa_flash", "sdpa_cudnn"], Intervals.window(3, 0))
    assert found["sdpa_flash", "forward"].result.reason == "takes the full and the causal mask, not window(3, 0)"
    assert found["sdpa_cudnn", "forward"].result.reason == "runs on cuda, not on cpu"


MANY_HEADS = Problem("causal", 16, batch=4, head_dim=8, num_q_heads=4, num_kv_heads=2)


def spoiled(pick, by):
    """attend: out of sdpa_math, times `by` in the (row, KV head) that `pick` returns True for."""

    def attend(q, k, v, *rest):
        out, lse = VARIANTS["sdpa_math"].attend(q, k, v, *rest)
        factor, group = torch.ones_like(out), q.shape[2] // k.shape[2]
        for row in range(q.shape[0]):
            for head in range(k.shape[2]):
                if pick((row, head)):
                    factor[row, :, group * head : group * (head + 1)] = by
        return out * factor, lse

    return attend


def compared_by(seed):
    found = measured(["standard"], problem=MANY_HEADS, passes=["forward"], seed=seed)
    return found["standard", "forward"].check.compared


def test_the_first_the_last_and_two_that_the_seed_draws_are_compared():
    samples = [compared_by(seed) for seed in range(8)]
    assert samples[0] == compared_by(0)
    assert all(len(set(places)) == 4 and places[0] == (0, 0) and places[-1] == (3, 1) for places in samples)
    assert {place for places in samples for place in places} == {(row, head) for row in range(4) for head in range(2)}


def test_of_few_heads_all_are_compared():
    assert measured(["standard"])["standard", "forward"].check.compared == ((0, 0), (0, 1), (1, 0), (1, 1))
    alone = replace(SMALL, batch=1, num_kv_heads=1)
    assert measured(["standard"], problem=alone)["standard", "forward"].check.compared == ((0, 0),)


def test_wrong_in_a_head_that_the_seed_draws_is_seen(variant_that):
    drawn = compared_by(0)[1]
    wrong = variant_that(spoiled(lambda place: place == drawn, 1.01))
    result = measured([wrong], problem=MANY_HEADS)[wrong, "forward"].result
    assert result.word.startswith("check failed: out ") and "x allowed" in result.word


@pytest.mark.parametrize("by", [torch.nan, torch.inf])
def test_all_results_must_be_finite_where_they_are_not_compared_too(variant_that, by):
    wrong = variant_that(spoiled(lambda place: place not in compared_by(0), by))
    one = measured([wrong], problem=MANY_HEADS)[wrong, "backward"]
    assert one.result.word.startswith("check failed: out not finite, dq not finite") and one.tflops is None
    assert one.check.not_finite[0] == "out"


def test_a_gradient_that_is_not_finite_anywhere_is_enough(variant_that):
    """NaN in dv alone, in a row and head that are not compared."""
    row, head = next((row, head) for row in range(4) for head in range(2) if (row, head) not in compared_by(0))

    def attend(q, k, v, *rest):
        factor = torch.ones_like(v)
        factor[row, 0, head, 0] = torch.nan
        # The value is v's, the gradient that of v times the factor.
        return VARIANTS["sdpa_math"].attend(q, k, v.detach() + factor * (v - v.detach()).nan_to_num(), *rest)

    wrong = variant_that(attend)
    one = measured([wrong], problem=MANY_HEADS)[wrong, "forward"]
    assert "dv not finite" in one.result.word


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ZeroDivisionError("a bug\nand more"), "failed: ZeroDivisionError: a bug"),
        (RuntimeError("can't allocate memory"), "failed: RuntimeError: can't allocate memory"),
        (torch.OutOfMemoryError("tried to allocate"), "failed: out of memory"),
        (AssertionError(), "failed: AssertionError"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("good_calls", [0, 2, 3, 4], ids=["check", "warm-up", "first round", "second round"])
def test_what_a_variant_raises_is_told_in_place_of_its_speed(variant_that, error, word, good_calls):
    """The check makes two calls, warm-up and each of two rounds one."""
    calls = []

    def attend(*inputs):
        calls.append(1)
        if len(calls) > good_calls:
            raise error
        return VARIANTS["sdpa_math"].attend(*inputs)

    bad = variant_that(attend)
    found = measured([bad, "standard"])
    assert found[bad, "forward"].result == found[bad, "backward"].result == NoSpeed(word)
    assert (found[bad, "forward"].check is None) == (good_calls == 0)
    assert isinstance(found["standard", "forward"].result, Timing)
    assert isinstance(found["standard", "backward"].result, Timing)


def test_a_reference_that_raises_leaves_nothing_checked(monkeypatch):
    def of(*inputs, **options):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("flashtrain.performance.attention.Reference.of", of)
    assert measured(["standard"])["standard", "forward"].result == NoSpeed(
        "not checked: RuntimeError: can't allocate memory"
    )


def test_an_interruption_ends_all(variant_that):
    def attend(*inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured([variant_that(attend)])


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_reading_holds_its_pass_and_nothing_of_the_other(variant_that, pass_name):
    """By a clock that sees which calls happen inside each reading."""
    events = []

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            events.append("forward")
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            events.append("backward")
            return dout

    def attend(*inputs):
        out, lse = VARIANTS["sdpa_math"].attend(*inputs)
        return Traced.apply(out), lse

    inside = []

    class Counting:
        def read(self, call):
            before = len(events)
            call()
            inside.append(events[before:])
            return lambda: 1.0

    traced = variant_that(attend)
    measured([traced], passes=[pass_name], rounds=3, clock=Counting())
    assert inside == [[pass_name]] * 3
