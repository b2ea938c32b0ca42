"""Corners of flash_v2, each named after what went wrong elsewhere (interpreted where there is no GPU)."""

import math

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals, ops
from flashtrain.kernels.attention.tiles import INTERPRETER, Tiles

CAUSAL, FULL, WINDOW = Intervals.causal(), Intervals.full(), Intervals.window(30, 2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def flash_v2(q, k, v, intervals=CAUSAL, scale=None):
    return ops.flash_v2(q, k, v, intervals, q.shape[-1] ** -0.5 if scale is None else scale)


def gradients(inputs, intervals=CAUSAL, dout=None, **options):
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out, _ = flash_v2(*leaves, intervals, **options)
    return torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)


def test_pointers_and_descriptors_agree_to_the_bit():
    from flashtrain.kernels.attention.flash_v2.backward import backward
    from flashtrain.kernels.attention.flash_v2.forward import forward

    pointers = Tiles(INTERPRETER.forward, INTERPRETER.dkdv, INTERPRETER.dq, use_tma=False)
    q, k, v = make_qkv(2, 70, 100, 2, 1, 24, device=DEVICE)
    results = []
    for launch in (INTERPRETER, pointers):
        out, lse = forward(q, k, v, WINDOW, 0.2, 0.0, launch)
        results.append((out, lse, *backward(out, lse, q, k, v, out, lse, WINDOW, 0.2, 0.0, launch, True, True)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty_lengths_return_early(lengths, nan_filled_outputs):
    q, k, v = make_qkv(2, *lengths, 4, 2, 16, device=DEVICE)
    out, lse = flash_v2(q, k, v)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for x, gradient in zip((q, k, v), gradients((q, k, v)), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("intervals", [CAUSAL, Intervals.window(4, 2)], ids=str)
def test_rows_that_see_no_key_are_exactly_zero(intervals, nan_filled_outputs):
    q, k, v = make_qkv(1, 100, 40, 2, 2, 16, device=DEVICE)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out, lse = flash_v2(*leaves, intervals)
    empty = ~intervals.dense(100, 40, DEVICE)[0].any(dim=1)
    assert empty.sum() > 50
    assert (out[:, empty] == 0).all() and (lse[..., empty] == float("-inf")).all()
    # What arrives for an lse of -inf may be anything: a merge of partial results divides 0 by 0 there.
    dlse = torch.where(empty, float("nan"), 1.0).expand_as(lse)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), dlse])
    assert (dq[:, empty] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_valid_scores_below_any_finite_sentinel_count(nan_filled_outputs):
    q, k, v = make_qkv(1, 40, 40, 1, 1, 16, device=DEVICE)
    q, k = q.abs() * 1e9, -k.abs() * 1e9
    out, lse = flash_v2(q, k, v)
    assert lse.isfinite().all() and lse.max() < -1e15
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T
    best = scores.masked_fill(~CAUSAL.dense(40, 40, DEVICE)[0], -math.inf).argmax(1)
    assert torch.equal(out[0, :, 0], v[0, best, 0])


def test_strongly_negative_lse_on_a_ragged_tail():
    q, k, v = make_qkv(1, 65, 65, 1, 1, 16, device=DEVICE)
    inputs = (q.abs() * 40, -k.abs() * 40, v)
    assert flash_v2(*inputs)[1].max() < -100
    assert all(gradient.isfinite().all() for gradient in gradients(inputs))


@pytest.mark.parametrize(
    "layout",
    [
        "heads before sequence",
        "packed qkv",
        "sliced rows",
        "last stride 2",
        "misaligned start",
        "misaligned rows",
        "broadcast heads",
    ],
)
def test_any_strides(layout):
    q, k, v = make_qkv(2, 70, 70, 2, 2, 16, device=DEVICE)
    if layout == "heads before sequence":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "packed qkv":
        q, k, v = torch.stack((q, k, v), dim=2).unbind(2)
    elif layout == "sliced rows":
        q, k, v = (x[:, 3::2] for x in (q, k, v))
    elif layout == "last stride 2":
        q, k, v = (torch.stack((x, x), dim=-1)[..., 0] for x in (q, k, v))
    elif layout == "misaligned start":
        q, k, v = (torch.cat((x, x), dim=-1)[..., 3:19] for x in (q, k, v))
    elif layout == "misaligned rows":
        q, k, v = (torch.nn.functional.pad(x, (0, 3))[..., :16] for x in (q, k, v))
    else:
        k, v = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v))
    assert_as_accurate_as_standard(flash_v2, (q, k, v), CAUSAL)


@pytest.mark.parametrize("dout", ["expanded", "transposed", "last stride 0"])
def test_any_strides_of_the_output_gradient(dout):
    q, k, v = make_qkv(2, 70, 70, 2, 2, 16, device=DEVICE)
    given = {
        "expanded": torch.randn(1, 1, 1, 1, device=DEVICE).expand(2, 70, 2, 16),
        "transposed": torch.randn(16, 2, 70, 2, device=DEVICE).permute(3, 2, 1, 0),
        "last stride 0": torch.randn(2, 70, 2, 1, device=DEVICE).expand(-1, -1, -1, 16),
    }[dout]
    for strided, dense in zip(
        gradients((q, k, v), dout=given), gradients((q, k, v), dout=given.contiguous()), strict=True
    ):
        assert torch.equal(strided, dense)


def test_dimensions_of_size_one_may_have_any_stride():
    q, k, v = (x.as_strided(x.shape, (3, *x.stride()[1:])) for x in make_qkv(1, 33, 33, 2, 2, 16, device=DEVICE))
    assert_as_accurate_as_standard(flash_v2, (q, k, v), CAUSAL)


def test_fp16_with_large_output_gradients():
    q, k, v = make_qkv(1, 65, 65, 2, 2, 64, dtype=torch.float16, device=DEVICE)
    dout = torch.full_like(q, 1000.0)
    assert_as_accurate_as_standard(flash_v2, (q, k, v), CAUSAL, dout=dout)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("intervals", [FULL, CAUSAL], ids=str)
def test_small_integers_are_exact_up_to_the_last_rounding(intervals, dtype):
    """At scale ln 2 every probability is a power of two, so all sums are exact: a misplaced element shows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (1, 200, 2, 64), generator=generator).to(DEVICE, dtype) for _ in range(3))
    q[..., 2:], q[..., :2] = 0, q[..., :2].clamp(-1, 1)
    out, _ = flash_v2(q, k, v, intervals, scale=math.log(2))
    weights = torch.exp2(torch.einsum("bihd,bjhd->bhij", q.double(), k.double()))
    weights = weights * intervals.dense(200, 200, DEVICE)
    exact = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v.double())
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


def test_one_hot_attention_copies_values_bit_for_bit():
    q, _, v = make_qkv(1, 16, 16, 1, 1, 16, device=DEVICE)
    eye = torch.eye(16, device=DEVICE)[None, :, None]
    out, _ = flash_v2(eye * 1024, eye, v, FULL, scale=1.0)
    assert torch.equal(out, v)


def test_each_query_head_reads_its_own_group():
    q, k, v = make_qkv(1, 33, 33, 6, 3, 16, device=DEVICE)
    grouped = flash_v2(q, k, v)[0]
    repeated = flash_v2(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))[0]
    assert torch.equal(grouped, repeated)


@pytest.mark.gpu
def test_the_backward_gives_the_same_bits_every_time():
    inputs = make_qkv(2, 1000, 1000, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    for first, second in zip(gradients(inputs), gradients(inputs), strict=True):
        assert torch.equal(first, second)


def test_a_changed_key_changes_only_the_queries_that_see_it():
    q, k, v = make_qkv(1, 100, 100, 1, 1, 16, device=DEVICE)
    window = Intervals.window(10, 2)
    before = flash_v2(q, k, v, window)[0]
    k[:, 50], v[:, 50] = 7.0, -7.0
    changed = (flash_v2(q, k, v, window)[0] != before).any(-1)[0, :, 0]
    assert torch.equal(changed, window.dense(100, 100, DEVICE)[0, :, 50])


@pytest.mark.gpu
def test_more_than_65535_heads_times_batch():
    inputs = make_qkv(40_000, 16, 16, 2, 2, 16, dtype=torch.float16, device="cuda")
    assert_as_accurate_as_standard(flash_v2, inputs, CAUSAL)


@pytest.mark.gpu
@pytest.mark.parametrize("use_tma", [True, False], ids=["descriptors", "pointers"])
def test_offsets_beyond_two_to_the_31(use_tma):
    from flashtrain.kernels.attention.flash_v2.backward import backward
    from flashtrain.kernels.attention.flash_v2.forward import forward
    from flashtrain.kernels.attention.tiles import HALF

    # The last rows of a view whose storage spans more than 2^31 elements must equal those of a small copy, to the bit:
    # the rows before the copy are whole tiles and nothing compared sees them, so both walk the same blocks.
    rows = 2**31 // (128 * 64) + 384
    wide = torch.zeros(1, rows, 128, 64, device="cuda", dtype=torch.bfloat16)
    far = wide[:, :, 127:]
    near = torch.randn(1, 384, 1, 64, device="cuda", dtype=torch.bfloat16)
    far[:, -384:] = near
    window = Intervals.window(100, 0)
    launch = HALF["sm_90" if use_tma else "sm_80"][64]
    results = []
    for x in (far, near):
        out, lse = forward(x, x, x, window, 0.125, 0.0, launch)
        dq, dk, dv = backward(out, lse, x, x, x, out, lse, window, 0.125, 0.0, launch, True, True)
        results.append([lse[..., -128:], *(y[:, -128:] for y in (out, dq, dk, dv))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current():
    inputs = make_qkv(1, 65, 65, 2, 2, 64, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_as_accurate_as_standard(flash_v2, inputs, CAUSAL)


@pytest.mark.gpu
def test_captures_in_a_cuda_graph():
    q, k, v = make_qkv(1, 256, 256, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    expected = flash_v2(q, k, v)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flash_v2(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
