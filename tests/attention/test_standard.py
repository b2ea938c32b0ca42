"""The oracle against the definition written out row by row, and against numerical derivatives."""

import math

import pytest
import torch
from tolerance import make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.standard import standard

MASKS = (Intervals.full(), Intervals.causal(), Intervals.window(1, 0), Intervals.window(2, 1))
LENGTHS = ((4, 4), (3, 6), (6, 3), (1, 5))
SCALE = 0.3

masks = pytest.mark.parametrize("intervals", MASKS, ids=str)
lengths = pytest.mark.parametrize(("Sq", "Sk"), LENGTHS, ids=[f"Sq{q}-Sk{k}" for q, k in LENGTHS])


def assert_is_the_definition(intervals, Sq, Sk, softcap=0.0):
    q, k, v = make_qkv(2, Sq, Sk, 4, 2, 3, 5, dtype=torch.float64)
    out, lse = standard(q, k, v, intervals, SCALE, softcap)
    bounds_BS2 = intervals.bounds_of(Sq, Sk).keys.expand(-1, 2, -1).permute(1, 2, 0)
    for b in range(2):
        for h in range(4):
            for i, (lo, hi) in enumerate(bounds_BS2[b].tolist()):
                keys, values = k[b, lo:hi, h // 2], v[b, lo:hi, h // 2]
                scores = SCALE * keys @ q[b, i, h]
                weights = torch.exp(softcap * torch.tanh(scores / softcap) if softcap else scores)
                torch.testing.assert_close(lse[b, h, i], weights.sum().log())
                torch.testing.assert_close(out[b, i, h] * weights.sum(), weights @ values)


@masks
@lengths
def test_out_and_lse_are_the_definition(intervals, Sq, Sk):
    assert_is_the_definition(intervals, Sq, Sk)


def test_each_row_of_the_batch_has_documents_of_its_own():
    q_documents, k_documents = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert_is_the_definition(Intervals.causal().in_documents(q_documents, k_documents), 4, 3)


def test_scores_are_capped():
    assert_is_the_definition(Intervals.causal(), 3, 6, softcap=0.7)


@masks
@lengths
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_gradients_are_the_numerical_ones(intervals, Sq, Sk, softcap):
    inputs = [x.requires_grad_() for x in make_qkv(1, Sq, Sk, 2, 1, 3, 2, dtype=torch.float64)]

    def finite(q, k, v):
        out, lse = standard(q, k, v, intervals, SCALE, softcap)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    assert torch.autograd.gradcheck(finite, inputs)


def test_second_derivatives_are_the_numerical_ones():
    inputs = [x.requires_grad_() for x in make_qkv(1, 3, 2, 2, 1, 2, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: standard(q, k, v, Intervals.causal(), SCALE)[0], inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_that_see_no_key_are_zero_and_pass_no_gradient(dtype):
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 7, 3, 4, 2, 8, dtype=dtype))
    out, lse = standard(q, k, v, Intervals.causal(), SCALE)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out[:, :4] == 0).all() and (out[:, 4:] != 0).any()
    assert (lse[:, :, :4] == -math.inf).all() and lse[:, :, 4:].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert (dq[:, :4] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize(("Sq", "Sk"), [(3, 0), (0, 3)], ids=["no-keys", "no-queries"])
def test_empty_sequences(Sq, Sk):
    q, k, v = (x.requires_grad_() for x in make_qkv(1, Sq, Sk, 2, 1, 4))
    out, lse = standard(q, k, v, Intervals.full(), SCALE)
    assert out.shape == (1, Sq, 2, 4) and (out == 0).all()
    assert lse.shape == (1, 2, Sq) and (lse == -math.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@masks
def test_grouped_heads_are_repeated_heads(intervals):
    q, k, v = make_qkv(2, 9, 7, 6, 2, 4, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grouped = standard(*inputs, intervals, SCALE)
    repeated = standard(q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2), intervals, SCALE)
    torch.testing.assert_close(grouped, repeated)
    dout = torch.randn_like(grouped[0])
    torch.testing.assert_close(
        torch.autograd.grad(grouped[0], inputs, dout), torch.autograd.grad(repeated[0], inputs, dout)
    )


def test_strides_do_not_matter():
    q, k, v = make_qkv(2, 6, 6, 4, 2, 8, dtype=torch.float64)
    strided = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (q, k, v)]
    torch.testing.assert_close(
        standard(*strided, Intervals.causal(), SCALE), standard(q, k, v, Intervals.causal(), SCALE)
    )
