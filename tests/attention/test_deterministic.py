"""`deterministic`: the same bits every run, or a refusal, by the argument and by PyTorch's switch alike.

Who is refused is in test_variants.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import AttentionSpec, Intervals, attention, refusal
from flashtrain.kernels.attention.variants import VARIANTS, attend_of

CAUSAL = Intervals.causal()
RUNS = 20


@pytest.fixture
def switch():
    """PyTorch's, which is off again after the test."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def gradients(inputs, intervals, **options):
    """out, dq, dk and dv of a loss that the gradients of all queries are a part of."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out = attention(*leaves, intervals, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize(
    ("deterministic", "keeps_order", "expected"),
    [(False, False, "flash_hopper"), (True, True, "flash_hopper in order"), (True, False, "flash_v2")],
)
def test_flash_hopper_then_keeps_an_order_or_has_the_backward_of_flash_v2(
    deterministic, keeps_order, expected, monkeypatch
):
    called = []

    def backward(name):
        def stand_in(*_, in_order=False):
            called.append(name + " in order" * in_order)

        return SimpleNamespace(backward=stand_in, can_keep_order=lambda *_: keeps_order)

    forward = SimpleNamespace(forward=lambda q, k, v, *_: (torch.zeros_like(q), q.new_zeros(1, 2, 4)))
    package = "flashtrain.kernels.attention"
    monkeypatch.setitem(sys.modules, f"{package}.flash_hopper.forward", forward)
    for name in ("flash_hopper", "flash_v2"):
        monkeypatch.setitem(sys.modules, f"{package}.{name}.backward", backward(name))
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 4, 4, 2, 2, 16))
    attend_of("flash_hopper", deterministic=deterministic, needs_lse=True)(q, k, v, CAUSAL, 0.25)[0].sum().backward()
    assert called == [expected]


def test_the_argument_and_the_switch_ask_for_the_same(switch):
    inputs = make_qkv(1, 4, 4, 2, 2, 16)
    asked = {"deterministic": True}
    for settings, argument, expected in (
        ((False, False), {}, (False, False)),
        ((False, False), asked, (True, False)),
        ((True, True), {}, (False, False)),
        ((True, True), asked, (True, False)),
        ((True, False), {}, (True, True)),
    ):
        mode, warn_only = settings
        switch(mode, warn_only=warn_only)
        spec = AttentionSpec.of(*inputs, CAUSAL, **argument)
        assert (spec.deterministic, spec.torch_deterministic) == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_deterministic_is_called(compiled, switch, monkeypatch):
    def adding(number):
        return lambda q, k, v, intervals, scale, softcap: (q + number, None)

    made = replace(VARIANTS["standard"], attend_alone=adding(0), attend_deterministic=adding(1))
    monkeypatch.setitem(VARIANTS, "standard", made)
    torch._dynamo.reset()

    def added(**options):
        call = torch.compile(attention, fullgraph=True, backend="eager") if compiled else attention
        return call(q, q, q, CAUSAL, variant="standard", **options).unique().tolist()

    q = torch.zeros(1, 2, 2, 16)
    assert added() == [0] and added(deterministic=True) == [1]
    switch(True)
    assert added() == [1]
    switch(True, warn_only=True)
    assert added() == [0]
    switch(False)
    assert added() == [0]


def test_cublas_is_fixed_where_its_workspace_is(monkeypatch):
    inputs = make_qkv(1, 4, 4, 2, 2, 16)
    for value, fixed in ((":4096:8", True), (":16:8", True), (":4096:2:16:8", False)):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        assert AttentionSpec.of(*inputs, CAUSAL).fixed_cublas is fixed


def test_our_kernels_run_where_only_deterministic_algorithms_may(flash, switch):
    switch(True)
    inputs = flash.qkv(2, 70, 70, 4, 2, 16)
    expected = gradients(inputs, CAUSAL, variant=flash.name)
    for found, right in zip(gradients(inputs, CAUSAL, variant=flash.name), expected, strict=True):
        assert torch.equal(found, right)


MASKS = {
    "causal": lambda S: CAUSAL,
    "window": lambda S: Intervals.window(300, 0),
    "documents": lambda S: CAUSAL.in_documents(torch.arange(S, device="cuda")[None] // 301),
}


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["argument", "switch"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_every_run(variant, mask, head_dim, by, switch):
    S = 2000
    inputs = make_qkv(2, S, S, 16, 8, head_dim, dtype=torch.bfloat16, device="cuda")
    intervals, asked = MASKS[mask](S), {"deterministic": by == "argument"}
    switch(by == "switch")
    leaves = [x.detach().requires_grad_() for x in inputs]
    reason = refusal(variant, AttentionSpec.of(*leaves, intervals, **asked))
    if reason is not None:
        pytest.skip(f"{variant} {reason}")
    first = gradients(inputs, intervals, variant=variant, **asked)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS - 1):
        for now, before in zip(gradients(inputs, intervals, variant=variant, **asked), first, strict=True):
            changed += (now != before).sum()
    assert changed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["", "softcap"])
def test_deterministic_gradients_are_as_accurate(flash, head_dim, softcap, nan_filled_outputs):
    inputs = flash.qkv(2, 1000, 1000, 4, 2, head_dim, dtype=torch.bfloat16)
    assert_as_accurate_as_standard(
        lambda q, k, v: flash(q, k, v, softcap=softcap, deterministic=True),
        inputs, CAUSAL, softcap=softcap, lse_gradient=True,
    )  # fmt: skip
