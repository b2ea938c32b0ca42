"""What a kernel with barriers and warp roles written by hand may get wrong: races, and a compiler that breaks them.

Its other corners are in test_corners, all its features in test_parity, its tables and loops in test_schedule.
"""

import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from flash_kernels import hopper
from tolerance import make_qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtrain.kernels.attention import Intervals, ops
from flashtrain.kernels.attention.flash_hopper import toolchain
from flashtrain.kernels.attention.flash_hopper.exact_problems import (
    BITS,
    CASES,
    KV_HEADS,
    MOST_QUERIES,
    SCALE,
    Case,
    exact_backward,
    exact_forward,
)
from flashtrain.kernels.attention.flash_hopper.toolchain import backward_mistakes, forward_mistakes
from flashtrain.kernels.attention.limits import FLASH_HOPPER_HEAD_DIMS
from flashtrain.kernels.attention.standard import standard

CAUSAL, FULL = Intervals.causal(), Intervals.full()
GPU = torch.device("cuda")

LARGER = [
    Case(head_dim, intervals, q_len, kv_len)
    for head_dim in (64, 128)
    for intervals in (CAUSAL, FULL, Intervals.window(None, 77))
    for q_len, kv_len in ((1, 4096), (127, 129), (1000, 4097), (2048, 2048), (4095, 4095), (8192, 8192))
]


@pytest.mark.parametrize("case", [Case(64, CAUSAL, 50, 70), Case(128, FULL, 33, 1000)], ids=str)
def test_the_exact_forward_is_attention(case):
    q, k, v, out, lse = exact_forward(case, torch.device("cpu"))
    found = standard(q.double(), k.double(), v.double(), case.intervals, SCALE, 0.0)
    torch.testing.assert_close((out, lse), found, rtol=1e-12, atol=1e-12)
    assert k.shape[2] == v.shape[2] == KV_HEADS and (q != 0).any((0, 1, 2)).all() and (k != 0).any((0, 1, 2)).all()


@pytest.mark.parametrize("case", [Case(128, FULL, 33, 1000), *CASES], ids=str)
def test_the_exact_backward_is_that_of_attention(case):
    exact = exact_backward(case, torch.device("cpu"))
    q, k, v, dout, out = (x[0].transpose(0, 1).double() for x in (exact.q, exact.k, exact.v, exact.dout, exact.out))
    group = q.shape[0] // KV_HEADS
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    visible = case.intervals.dense(case.q_len, case.kv_len)[0]
    p = torch.exp(SCALE * q @ k.mT - exact.lse[0][..., None]) * visible
    dp = dout @ v.mT - ((dout * out).sum(-1) - exact.dlse[0])[..., None]
    ds = p * dp
    summed = {"dq": (ds, k, 1), "dk": (ds.mT, q, group), "dv": (p.mT, dout, group)}
    for name, (weights, rows, of_heads) in summed.items():
        factor = 1.0 if name == "dv" else SCALE
        found = (factor * weights @ rows).unflatten(0, (-1, of_heads)).sum(1).transpose(0, 1)[None]
        torch.testing.assert_close(getattr(exact, name), found, rtol=1e-12, atol=1e-9)
        assert (found != 0).any((0, 1, 2)).all()
        # fp32 holds each sum, in whatever order: its terms are multiples of one unit, and dP has few bits.
        assert (weights.abs() @ rows.abs()).unflatten(0, (-1, of_heads)).sum(1).max() < 2 ** (24 - BITS)
    assert dp.abs().max() < 2**7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_mistake_is_a_number_that_is_not_the_right_one_rounded(dtype, monkeypatch):
    case, device = Case(64, CAUSAL, 40, 60), torch.device("cpu")
    _, _, _, right_out, right_lse = exact_forward(case, device)
    out, lse = right_out.to(dtype).repeat(toolchain.ROWS, 1, 1, 1), right_lse.float().repeat(toolchain.ROWS, 1, 1)
    kernel = SimpleNamespace(forward=lambda *arguments: (out, lse))
    monkeypatch.setitem(sys.modules, "flashtrain.kernels.attention.flash_hopper.forward", kernel)
    assert forward_mistakes(case, dtype, device) == 0
    at = tuple((right_out.abs() > 0.1).nonzero()[0])
    out[3][at[1:]] *= 1 + 3 * torch.finfo(dtype).eps
    assert forward_mistakes(case, dtype, device) == 1
    lse[2, 1, 5] += 1e-4
    out[0, 0, 0] = float("nan")
    assert forward_mistakes(case, dtype, device) == 2 + case.head_dim


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_mistake_of_the_backward(name, dtype, monkeypatch):
    case, device = Case(64, CAUSAL, 40, 60), torch.device("cpu")
    exact = exact_backward(case, device)
    right = {name: getattr(exact, name) for name in ("dq", "dk", "dv")}
    found = {name: x.to(dtype).repeat(toolchain.ROWS, 1, 1, 1) for name, x in right.items()}

    def backward(*arguments, in_order):
        for written, x in zip(arguments, found.values(), strict=False):
            written.copy_(x)

    kernel = SimpleNamespace(backward=backward)
    monkeypatch.setitem(sys.modules, "flashtrain.kernels.attention.flash_hopper.backward", kernel)
    assert backward_mistakes(case, dtype, device) == 0
    at = tuple((right[name].abs() > 0.1).nonzero()[0])
    found[name][3][at[1:]] *= 1 + 3 * torch.finfo(dtype).eps
    assert backward_mistakes(case, dtype, device) == 1
    found[name][0, 0, 0] = float("nan")
    assert backward_mistakes(case, dtype, device) == 1 + case.head_dim


def test_the_trial_needs_a_gpu_that_the_kernel_runs_on(monkeypatch):
    monkeypatch.setattr(toolchain, "_verdict", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert toolchain.wrong(64, "forward") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert toolchain.wrong(64, "forward") is None


def test_the_trial_is_made_once_and_not_in_a_capture(monkeypatch):
    verdicts = {(64, "forward"): [None], (64, "backward"): ["computes wrong numbers"], (128, "forward"): [None]}
    capturing = [True]
    monkeypatch.setattr(toolchain, "_verdicts", {})
    monkeypatch.setattr(toolchain, "_verdict", lambda device, head_dim, name: verdicts[head_dim, name].pop())
    for name, answer in {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: capturing[0],
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    both = "forward", "backward"
    assert "while a CUDA graph is captured" in toolchain.wrong(64, *both)
    capturing[0] = False
    assert toolchain.wrong(64, "forward") is None and toolchain.wrong(128, "forward") is None
    assert toolchain.wrong(64, *both) == "computes wrong numbers"
    capturing[0] = True
    assert toolchain.wrong(64, *both) == "computes wrong numbers" and toolchain.wrong(64, "forward") is None
    assert "while a CUDA graph is captured" in toolchain.wrong(128, *both)


@pytest.mark.parametrize("name", ["forward", "backward", "backward in order"])
def test_a_wrong_toolchain_is_named(name, monkeypatch):
    tried = []
    monkeypatch.setitem(toolchain._MISTAKES, name, lambda case, *_: tried.append(case) or torch.tensor(3))
    verdict = toolchain._verdict(torch.device("cpu"), 64, name)
    assert tried == [case for case in CASES if case.head_dim == 64] and len(tried) == len(CASES) // 2
    assert verdict.startswith(f"computes wrong numbers in its {name} with this toolchain (triton 3.")
    assert "TRITON_PTXAS_PATH" in verdict


def test_a_trial_is_of_real_tensors_whatever_mode_asks(monkeypatch):
    monkeypatch.setitem(toolchain._MISTAKES, "forward", lambda *_: torch.zeros((), dtype=torch.int64))
    with FakeTensorMode():
        assert toolchain._verdict(torch.device("cpu"), 64, "forward") is None


@hopper
@pytest.mark.parametrize("head_dim", FLASH_HOPPER_HEAD_DIMS)
def test_this_toolchain_is_right(head_dim):
    assert toolchain.wrong(head_dim, "forward", "backward", "backward in order") is None


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_small_integers_are_exact_up_to_the_last_rounding(case, dtype, nan_filled_outputs):
    assert forward_mistakes(case, dtype, GPU) == 0


@hopper
@pytest.mark.parametrize("in_order", [False, True], ids=["", "in order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *(case for case in LARGER if case.q_len <= MOST_QUERIES)], ids=str)
def test_the_gradients_of_small_integers_are_exact_up_to_the_last_rounding(case, dtype, in_order, nan_filled_outputs):
    assert backward_mistakes(case, dtype, GPU, in_order) == 0


@hopper
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_gradients_in_order_have_the_same_bits_a_thousand_times(mask, head_dim, group_size):
    q, k, v = make_qkv(2, 2000, 2000, 4 * group_size, 4, head_dim, dtype=torch.bfloat16, device=GPU)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ops.flash_hopper_deterministic(*leaves, MASKS[mask](2000), head_dim**-0.5)
    dout = torch.randn_like(out)

    def gradients():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    first, changed = gradients(), torch.zeros((), dtype=torch.int64, device=GPU)
    for _ in range(1000):
        for now, before in zip(gradients(), first, strict=True):
            changed += (now != before).sum()
    assert changed == 0


MASKS = {
    "causal": lambda S: CAUSAL,
    "full": lambda S: FULL,
    "window": lambda S: Intervals.window(300, 0),
    "documents": lambda S: CAUSAL.in_documents(torch.arange(S, device=GPU)[None] // 301),
}


@hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_a_thousand_times(head_dim, mask, nan_filled_outputs):
    S = 2000
    q, k, v = make_qkv(2, S, S, 16, 8, head_dim, dtype=torch.bfloat16, device=GPU)
    intervals = MASKS[mask](S)
    first = ops.flash_hopper(q, k, v, intervals, head_dim**-0.5)
    changed = torch.zeros((), dtype=torch.int64, device=GPU)
    for _ in range(1000):
        for now, before in zip(ops.flash_hopper(q, k, v, intervals, head_dim**-0.5), first, strict=True):
            changed += (now != before).sum()
    assert changed == 0


@hopper
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_a_launch_costs_the_host_at_most_ten_microseconds_more_than_flash_v2s(mask):
    q, k, v = make_qkv(1, 128, 128, 2, 2, 64, dtype=torch.bfloat16, device=GPU)
    intervals = MASKS[mask](128)

    def microseconds(attend):
        """Of a launch, in a row of launches so short that the host never waits for the device."""
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(20):
            attend(q, k, v, intervals, 0.125)
        return (time.perf_counter_ns() - start) / 20 / 1000

    with torch.no_grad():
        rounds = [(microseconds(ops.flash_v2), microseconds(ops.flash_hopper)) for _ in range(50)]
    flash_v2, flash_hopper = map(statistics.median, zip(*rounds, strict=True))
    print(f"{mask}: {flash_v2:.1f} us a launch of flash_v2, {flash_hopper:.1f} of flash_hopper")
    assert statistics.median(hopper - v2 for v2, hopper in rounds) <= 10
