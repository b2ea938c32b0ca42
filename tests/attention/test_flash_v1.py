"""flash_v1: its blocks, its corners, and its operators (interpreted where there is no GPU)."""

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals, attention, block_sizes, ops

CAUSAL, FULL = Intervals.causal(), Intervals.full()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KIB = 1024


def flash_v1(q, k, v, intervals=CAUSAL):
    return ops.flash_v1(q, k, v, intervals, q.shape[-1] ** -0.5)


def everything(inputs, intervals=CAUSAL):
    """out, lse, dq, dk and dv, for an output gradient of ones."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out, lse = flash_v1(*leaves, intervals)
    return out.detach(), lse.detach(), *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize(
    ("sram_elements", "head_dim", "expected"),
    [
        pytest.param(96 * KIB, 64, (64, 256), id="192 KB of fp16, B_c 384"),
        pytest.param(58_112, 64, (64, 128), id="H200, B_c 227"),
        pytest.param(58_112, 128, (64, 64), id="H200, B_c 114"),
        pytest.param(58_112, 256, (32, 32), id="H200, B_c 57"),
        pytest.param(16 * KIB, 64, (64, 64), id="exact"),
        pytest.param(16 * KIB + 1, 64, (64, 64), id="rounded up, then down"),
        pytest.param(16 * KIB - 1, 64, (64, 64), id="rounded up"),
        pytest.param(16 * KIB - 256, 64, (32, 32), id="one less"),
        pytest.param(58_112, 16, (16, 512), id="B_r is d"),
        pytest.param(58_112, 24, (16, 512), id="d is no power of two"),
        pytest.param(1000, 256, (16, 16), id="at least 16"),
    ],
)
def test_block_sizes(sram_elements, head_dim, expected):
    assert block_sizes(sram_elements, head_dim) == expected


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_blocks_fit_the_sram(head_dim):
    """Four blocks of head_dim columns, unless 16 rows are too many; twice the keys would not fit."""
    for sram_elements in (16_384, 25_344, 41_728, 58_112):
        queries, keys = block_sizes(sram_elements, head_dim)
        assert 2 * (queries + keys) * head_dim <= sram_elements
        assert 4 * 2 * keys * head_dim > sram_elements
        assert queries == min(keys, head_dim)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty_lengths(lengths, nan_filled_outputs):
    inputs = make_qkv(2, *lengths, 4, 2, 16, device=DEVICE)
    out, lse, *gradients = everything(inputs)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


def test_rows_that_see_no_key_are_exactly_zero(nan_filled_outputs):
    leaves = tuple(x.requires_grad_() for x in make_qkv(1, 100, 40, 2, 2, 16, device=DEVICE))
    out, lse = flash_v1(*leaves)
    empty = torch.arange(100, device=DEVICE) < 60
    assert (out[:, empty] == 0).all() and (lse[..., empty] == float("-inf")).all()
    assert lse[..., ~empty].isfinite().all()
    # What arrives for an lse of -inf may be anything: a merge of partial results divides 0 by 0 there.
    dlse = torch.where(empty, float("nan"), 1.0).expand_as(lse)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), dlse])
    assert (dq[:, empty] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_scores_that_overflow_any_exponential(nan_filled_outputs):
    q, k, v = make_qkv(1, 40, 40, 1, 1, 64, device=DEVICE)
    q, k = q.abs() * 1e9, -k.abs() * 1e9
    out, lse = flash_v1(q, k, v)
    assert lse.isfinite().all() and lse.max() < -1e15
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T
    best = scores.masked_fill(~CAUSAL.dense(40, 40, DEVICE)[0], -float("inf")).argmax(1)
    assert torch.equal(out[0, :, 0], v[0, best, 0])


def test_any_strides_and_gradients_for_what_asks():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make_qkv(2, 40, 70, 4, 2, 24, 16, device=DEVICE))
    k = torch.stack((k, k), dim=-1)[..., 0]
    assert_as_accurate_as_standard(flash_v1, (q, k, v), CAUSAL, lse_gradient=True)
    _, _, dq, dk, _ = everything((q, k, v))
    k = k.detach().requires_grad_()
    assert torch.equal(torch.autograd.grad(flash_v1(q, k, v)[0].sum(), k)[0], dk)
    q = q.detach().requires_grad_()
    assert torch.equal(torch.autograd.grad(flash_v1(q, k.detach(), v)[0].sum(), q)[0], dq)


def test_the_gradient_of_the_lse_alone():
    inputs = make_qkv(1, 33, 40, 4, 2, 16, device=DEVICE)
    nothing = torch.zeros_like(inputs[0])
    assert_as_accurate_as_standard(flash_v1, inputs, CAUSAL, dout=nothing, lse_gradient=True)


@pytest.mark.parametrize("sram_elements", [1, 8 * KIB, 32 * KIB], ids=["16 x 16", "32 x 64", "32 x 256"])
def test_blocks_of_any_size(sram_elements, monkeypatch):
    monkeypatch.setattr(ops, "sram_elements", lambda device: sram_elements)
    inputs = make_qkv(1, 70, 100, 2, 1, 32, device=DEVICE)
    assert_as_accurate_as_standard(flash_v1, inputs, CAUSAL, lse_gradient=True)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=["all", "dq", "dkdv"])
def test_opcheck(needs):
    q, k, v = make_qkv(1, 33, 40, 4, 2, 16, 24, device=DEVICE)
    mask = None, 0, None, None, 0.25, 0.0
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.flashtrain.flash_v1.default, (*leaves, *mask))
    out, lse = torch.ops.flashtrain.flash_v1(q, k, v, *mask)
    inputs = (out, lse, q, k, v, out, lse, *mask, *needs, False)
    torch.library.opcheck(torch.ops.flashtrain.flash_v1_backward.default, inputs)


def test_compiles_whole():
    torch._dynamo.reset()
    compiled = torch.compile(flash_v1, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_as_accurate_as_standard(compiled, make_qkv(1, 33, 40, 4, 2, 16, device=DEVICE), CAUSAL, lse_gradient=True)


def test_second_derivatives_are_refused_in_one_sentence():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 8, 8, 1, 1, 16, device=DEVICE))
    out = attention(q, k, v, FULL, variant="flash_v1")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_v1 has no second derivative; use"):
        dq.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_same_bits_every_time(head_dim):
    """A store that another thread reads too early would show."""
    inputs = make_qkv(2, 1000, 1000, 8, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    first = everything(inputs)
    for _ in range(20):
        for a, b in zip(first, everything(inputs), strict=True):
            assert torch.equal(a, b)
