from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.variants import VARIANTS
from flashtrain.performance.attention import Measurement, NoSpeed, Problem, measure
from flashtrain.performance.peers import Peer
from flashtrain.performance.timing import HostClock, Timing

SMALL = Problem("causal", 32, batch=2, head_dim=8, num_q_heads=4, num_kv_heads=2)


def measured(
    variants, intervals=None, problem=SMALL, passes=("forward", "backward"), rounds=2, seed=0, clock=None, peers=()
):
    """{(variant, pass): Measurement} on the CPU in fp32."""
    found = measure(
        problem,
        Intervals.causal() if intervals is None else intervals,
        variants,
        list(passes),
        clock or HostClock(),
        device="cpu",
        dtype=torch.float32,
        warmup=1,
        rounds=rounds,
        seed=seed,
        peers=peers,
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


def right(q, k, v, causal):
    """An attention of flash-attention's convention."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)


def peer_that(attend):
    return Peer("other:attend", attend)


@pytest.mark.parametrize("wrap", [lambda out: out, lambda out: (out, None)], ids=["out", "tuple"])
@pytest.mark.parametrize("intervals", [Intervals.full(), Intervals.causal()], ids=str)
def test_a_right_peer_is_timed_beside_the_variants(intervals, wrap):
    peer = peer_that(lambda *inputs, causal: wrap(right(*inputs, causal)))
    found = measured(["standard"], intervals, peers=[peer], rounds=3)
    assert list(found) == [
        (name, pass_name) for pass_name in ("forward", "backward") for name in ("standard", "other:attend")
    ]  # fmt: skip
    for one in found.values():
        assert len(one.result.seconds) == 3 and not one.detached
        assert one.check.failure is None and set(one.check.deviations) == {"out", "dq", "dk", "dv"}


@pytest.mark.parametrize(
    ("attend", "word"),
    [
        (lambda *inputs, causal: 1.01 * right(*inputs, causal), "check failed: out "),
        (lambda q, k, v, causal: right(q, k.detach() + 1.01 * (k - k.detach()), v, causal), "check failed: dk "),
        (lambda *inputs, causal: right(*inputs, not causal), "check failed: out "),
        (lambda *inputs, causal: right(*inputs, causal).transpose(1, 2), "failed: RuntimeError: Mismatch in shape"),
        (lambda *inputs, causal: (1.01 * right(*inputs, causal)).detach(), "check failed: out "),
        (lambda *inputs, causal: (torch.nan * right(*inputs, causal)).detach(), "check failed: out not finite"),
        (lambda *inputs, causal: None, "failed: TypeError: returned NoneType"),
    ],
    ids=["out", "dk", "mask", "layout", "forward only", "forward only, nan", "none"],
)
def test_a_wrong_peer_gets_no_speed(attend, word):
    found = measured(["standard"], peers=[peer_that(attend)])
    for pass_name in ("forward", "backward"):
        result = found["other:attend", pass_name].result
        assert result.word.startswith(word) and result.reason is None
        assert isinstance(found["standard", pass_name].result, Timing)


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        return right(q, k, v, causal)

    @staticmethod
    def backward(ctx, dout):
        raise NotImplementedError("this build is\nforward only")


def refuses_gradients(q, k, v, causal):
    if q.requires_grad:
        raise ValueError("inputs must not require gradients")
    return right(q, k, v, causal)


@pytest.mark.parametrize(
    ("attend", "reason", "detached"),
    [
        (
            lambda *inputs, causal: NoBackward.apply(*inputs, causal),
            "has no backward: it raises NotImplementedError: this build is",
            False,
        ),
        (
            lambda *inputs, causal: right(*inputs, causal).detach(),
            "has no backward: its out has no grad_fn",
            False,
        ),
        (
            refuses_gradients,
            "has no backward: it takes no inputs that require gradients "
            "(ValueError: inputs must not require gradients)",
            True,
        ),
    ],
    ids=["raises", "no grad_fn", "refuses"],
)
def test_a_peer_without_a_backward_has_the_speed_of_its_forward(attend, reason, detached):
    found = measured(["standard"], peers=[peer_that(attend)])
    forward, backward = (found["other:attend", name] for name in ("forward", "backward"))
    assert isinstance(forward.result, Timing) and forward.detached == detached
    assert forward.check.failure is None and set(forward.check.deviations) == {"out"}
    assert backward.result == NoSpeed("-", reason) and not backward.detached
    assert isinstance(found["standard", "backward"].result, Timing)


def test_the_forward_of_a_peer_is_timed_on_inputs_that_require_gradients_as_a_variants_is(variant_that):
    """Each call tells what it was given, within a reading."""
    given, reading = [], []

    class Listening:
        def read(self, call):
            reading.append(1)
            call()
            reading.pop()
            return lambda: 1.0

    def listen(name, x):
        if reading:
            given.append((name, x.requires_grad, x.grad_fn))

    def attend_variant(q, *rest):
        listen("variant", q)
        return VARIANTS["sdpa_math"].attend(q, *rest)

    def attend(q, k, v, causal):
        listen("peer", q)
        return right(q, k, v, causal)

    def attend_detached(q, k, v, causal):
        listen("detached", q)
        return refuses_gradients(q, k, v, causal)

    peers = [peer_that(attend), Peer("other:detached", attend_detached)]
    measured([variant_that(attend_variant)], passes=["forward"], clock=Listening(), peers=peers, rounds=1)
    assert sorted(given) == [("detached", False, None), ("peer", True, None), ("variant", True, None)]


def test_a_peer_says_which_masks_it_cannot_do():
    found = measured(["standard"], Intervals.window(3, 0), peers=[peer_that(right)])
    for pass_name in ("forward", "backward"):
        result = found["other:attend", pass_name].result
        assert result.reason == "takes the full and the causal mask, not window(3, 0)"
        assert isinstance(found["standard", pass_name].result, Timing)


def test_a_peer_that_raises_is_told_in_place_of_its_speed():
    def attend(q, k, v, causal):
        raise RuntimeError("needs a GPU\nof some kind")

    found = measured(["standard"], peers=[peer_that(attend)])
    assert found["other:attend", "forward"].result == NoSpeed("failed: RuntimeError: needs a GPU")
    assert found["other:attend", "backward"].result == NoSpeed("failed: RuntimeError: needs a GPU")
    assert found["other:attend", "forward"].check is None
    assert isinstance(found["standard", "forward"].result, Timing)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_peer_that_does_not_fit_is_not_one_without_a_backward(where):
    class Large(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal):
            if where == "forward":
                raise torch.OutOfMemoryError("too much")
            return right(q, k, v, causal)

        @staticmethod
        def backward(ctx, dout):
            raise torch.OutOfMemoryError("too much")

    found = measured(["standard"], peers=[peer_that(lambda *inputs, causal: Large.apply(*inputs, causal))])
    for pass_name in ("forward", "backward"):
        assert found["other:attend", pass_name].result == NoSpeed("failed: out of memory")


def scaled_in_place(q, k, v, causal):
    out = right(q, k, v, causal)
    with torch.no_grad():
        k.mul_(3)
    return out


def plain_in_place(q, k, v, causal):
    out = right(q, k, v, causal)
    q.mul_(3)
    return out


def in_place_and_raises(q, k, v, causal):
    v.data.mul_(3)
    raise RuntimeError("too late")


class InPlaceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, dout):
        dout.mul_(3)
        return dout / 3


@pytest.mark.parametrize(
    "attend",
    [
        scaled_in_place,
        plain_in_place,
        in_place_and_raises,
        lambda *inputs, causal: InPlaceBackward.apply(right(*inputs, causal)),
    ],
    ids=["k", "q that requires no gradient", "raises", "dout"],
)
def test_a_peer_that_changes_its_inputs_is_the_one_that_has_no_speed(attend):
    peers = [Peer("other:bad", attend), Peer("other:good", right)]
    found = measured(["standard"], peers=peers)
    for pass_name in ("forward", "backward"):
        assert found["other:bad", pass_name].result == NoSpeed("failed: changes its inputs")
        for name in ("standard", "other:good"):
            assert isinstance(found[name, pass_name].result, Timing)


def test_a_peer_that_changes_its_inputs_when_it_is_checked_has_no_speed():
    calls = []

    def attend(q, k, v, causal):
        calls.append(1)
        return (right if len(calls) == 1 else scaled_in_place)(q, k, v, causal)

    found = measured(["standard"], peers=[Peer("other:bad", attend), Peer("other:good", right)])
    assert found["other:bad", "forward"].result == NoSpeed("failed: changes its inputs")
    assert found["other:bad", "forward"].check is None
    assert isinstance(found["other:good", "backward"].result, Timing)


def test_a_peer_that_exits_ends_nothing():
    class Exits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            raise SystemExit(3)

    def attend(q, k, v, causal):
        raise SystemExit("this needs a licence")

    peers = [peer_that(attend), Peer("other:half", lambda *inputs, causal: Exits.apply(right(*inputs, causal)))]
    found = measured(["standard"], peers=peers)
    word = "failed: RuntimeError: raised SystemExit('this needs a licence')"
    assert found["other:attend", "forward"].result == NoSpeed(word)
    assert isinstance(found["other:half", "forward"].result, Timing)
    assert found["other:half", "backward"].result == NoSpeed("-", "has no backward: it raises SystemExit: 3")
    assert isinstance(found["standard", "backward"].result, Timing)
