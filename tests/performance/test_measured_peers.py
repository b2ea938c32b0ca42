"""Functions of other packages, checked and timed beside the variants."""

import pytest
import torch
from measuring import measured
from torch.nn.functional import scaled_dot_product_attention

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.variants import VARIANTS
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.peers import Peer
from flashtrain.performance.timing import Timing


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
