"""Corners of our kernels, each named after what went wrong elsewhere (interpreted where there is no GPU).

Where each kind of mistake that attention kernels are known for is tested:

- Masks. Here: NaN from rows that see no key, finite sentinels for -inf, an LSE of -inf or a very negative one in the
  backward, memory that nobody wrote, softcap before the mask and its derivative. In test_geometry, test_intervals and
  test_parity: alignment where Sq != Sk, windows off by one, tails of queries and of keys that fill no tile.
- Shapes and addresses. Here: offsets beyond 2^31, grids beyond 65,535, lengths of 0, strides of all inputs and of the
  output's gradient, misaligned descriptors, heads of a group. In test_parity: lengths around the tile sizes and of 1,
  padded head dimensions, stores past an end into the neighbour, batches of 2 with several heads. In test_properties:
  all of these mixed.
- Numerics. Here: fp16 gradients that overflow, gradients through the LSE, merging by LSE. In test_parity: exact fp32
  products, grouped heads summed in fp32, the natural logarithm.
- Autograd and torch.compile. In test_ops: gradients for some inputs or through the LSE alone, second derivatives,
  opcheck, strides of the fakes, recompiling. In test_deterministic: the same bits every run. Here: CUDA graphs, a
  device that is not current.
- Generated code. In test_compile_only: no atomics but flash_hopper's sum of dQ, spills, shared memory, TMA and WGMMA.
  On the GPU, test_parity.
- Barriers and warp roles written by hand. In test_flash_hopper: exact integers, and the same bits a thousand times.

Not possible here: ALiBi, sinks and dropout are not offered; nothing is autotuned; there are no semaphores; delta has no
tile size to share; rings and paged caches are built on top.
"""

import math

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals, attention, ops
from flashtrain.kernels.attention.intervals import Bounds
from flashtrain.kernels.attention.tiles import INTERPRETER, Tiles

CAUSAL, FULL, WINDOW = Intervals.causal(), Intervals.full(), Intervals.window(30, 2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

each_softcap = pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["", "softcap"])


def documents(*rows):
    """(R, S) ids of rows that hold documents of these lengths."""
    ids = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in rows]
    return torch.stack(ids).to(DEVICE)


def assert_equal(results, others):
    for a, b in zip(results, others, strict=True):
        assert torch.equal(a, b)


def everything(flash, inputs, intervals=CAUSAL, dout=None, **options):
    """out, lse, dq, dk and dv, for an output gradient of ones unless given."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out, lse = flash(*leaves, intervals, **options)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)
    return out.detach(), lse.detach(), *gradients


def gradients(*arguments, **options):
    return everything(*arguments, **options)[2:]


def test_pointers_and_descriptors_agree_to_the_bit():
    from flashtrain.kernels.attention.flash_v2.backward import backward
    from flashtrain.kernels.attention.flash_v2.forward import forward

    pointers = Tiles(INTERPRETER.forward, INTERPRETER.dkdv, INTERPRETER.dq, use_tma=False)
    q, k, v = make_qkv(2, 70, 100, 2, 1, 24, device=DEVICE)
    results = []
    for launch in (INTERPRETER, pointers):
        out, lse = forward(q, k, v, WINDOW, 0.2, 0.0, launch)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        backward(*gradients, out, lse, q, k, v, out, lse, WINDOW, 0.2, 0.0, launch)
        results.append((out, lse, *gradients))
    assert_equal(*results)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_empty_lengths_return_early(flash, lengths, mask, nan_filled_outputs):
    q, k, v = flash.qkv(2, *lengths, 4, 2, 16)
    ids = [torch.zeros(2, length, dtype=torch.int32, device=DEVICE) for length in lengths]
    intervals = CAUSAL if mask == "causal" else CAUSAL.in_documents(*ids)
    out, lse = flash(q, k, v, intervals)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for x, gradient in zip((q, k, v), gradients(flash, (q, k, v), intervals), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


# The queries of the last have documents without a key, among them whole tiles, and keys have some without a query.
@pytest.mark.parametrize(
    "intervals",
    [
        CAUSAL,
        Intervals.window(4, 2),
        FULL.in_documents(documents([10, 0, 70, 10, 10]), documents([5, 15, 0, 10, 10])),
    ],
    ids=["causal", "window", "documents"],
)
@each_softcap
def test_rows_that_see_no_key_are_exactly_zero(flash, intervals, softcap, nan_filled_outputs):
    q, k, v = flash.qkv(1, 100, 40, 2, 2, 16)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out, lse = flash(*leaves, intervals, softcap=softcap)
    empty = ~intervals.dense(100, 40, DEVICE)[0].any(dim=1)
    assert empty.sum() > 50
    assert (out[:, empty] == 0).all() and (lse[..., empty] == float("-inf")).all()
    # What arrives for an lse of -inf may be anything: a merge of partial results divides 0 by 0 there.
    dlse = torch.where(empty, float("nan"), 1.0).expand_as(lse)
    dq, dk, dv = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), dlse])
    assert (dq[:, empty] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))
    unseen = ~intervals.dense(100, 40, DEVICE)[0].any(dim=0)
    assert (dk[:, unseen] == 0).all() and (dv[:, unseen] == 0).all()


@each_softcap
def test_what_masked_keys_hold_does_not_matter(flash, softcap):
    """Their scores overflow any exponential, and saturate a cap, within blocks that are not wholly masked."""
    q, k, v = flash.qkv(1, 70, 70, 2, 2, 16)
    intervals = FULL.in_documents(documents([35, 0, 35]), documents([30, 10, 30]))
    results = []
    for size in (1.0, 1e18):
        k[:, 30:40] = size
        results.append(everything(flash, (q, k, v), intervals, softcap=softcap))
        assert all((gradient[:, 30:40] == 0).all() for gradient in results[-1][3:])
    assert_equal(*results)


def test_valid_scores_below_a_finite_sentinel_count(flash, nan_filled_outputs):
    q, k, v = flash.qkv(1, 40, 40, 1, 1, 16)
    # In 16 bits a score is one operand of a fused multiply-add, which from some 2^20 on is off by a part of a bit of P.
    magnitude, sentinel = (1e9, -1e15) if flash.dtype == torch.float32 else (300, -1e4)
    q, k = q.abs() * magnitude, -k.abs() * magnitude
    out, lse = flash(q, k, v)
    assert lse.isfinite().all() and lse.max() < sentinel
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T
    best = scores.masked_fill(~CAUSAL.dense(40, 40, DEVICE)[0], -math.inf).argmax(1)
    torch.testing.assert_close(out[0, :, 0], v[0, best, 0], rtol=4 * torch.finfo(flash.dtype).eps, atol=0)


def test_strongly_negative_lse_on_a_ragged_tail(flash):
    q, k, v = flash.qkv(1, 65, 65, 1, 1, 16)
    inputs = (q.abs() * 40, -k.abs() * 40, v)
    assert flash(*inputs)[1].max() < -100
    assert all(gradient.isfinite().all() for gradient in gradients(flash, inputs))


LAYOUTS = {
    "heads before sequence": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed qkv": lambda x: torch.stack((x, x, x), dim=2)[:, :, 1],
    "sliced rows": lambda x: x[:, 3::2],
    "last stride 2": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "misaligned start": lambda x: torch.cat((x, x), dim=-1)[..., 3:19],
    "misaligned rows": lambda x: torch.nn.functional.pad(x, (0, 3))[..., :16],
    "broadcast heads": lambda x: x[:, :, :1].expand(-1, -1, 2, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides(flash, layout):
    q, k, v = map(layout, flash.qkv(2, 70, 70, 2, 2, 16))
    assert_as_accurate_as_standard(flash, (q, k, v), CAUSAL)


@pytest.mark.parametrize("dout", ["expanded", "transposed", "last stride 0"])
def test_any_strides_of_the_output_gradient(flash, dout):
    q, k, v = flash.qkv(2, 70, 70, 2, 2, 16)
    given = {
        "expanded": q.new_ones(1, 1, 1, 1).expand(2, 70, 2, 16),
        "transposed": torch.randn_like(q).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        "last stride 0": torch.randn_like(q)[..., :1].expand(-1, -1, -1, 16),
    }[dout]
    assert_equal(gradients(flash, (q, k, v), dout=given), gradients(flash, (q, k, v), dout=given.contiguous()))


def test_dimensions_of_size_one_may_have_any_stride(flash):
    q, k, v = (x.as_strided(x.shape, (3, *x.stride()[1:])) for x in flash.qkv(1, 33, 33, 2, 2, 16))
    assert_as_accurate_as_standard(flash, (q, k, v), CAUSAL)


@each_softcap
def test_fp16_with_large_output_gradients(flash, softcap):
    q, k, v = flash.qkv(1, 65, 65, 2, 2, 64, dtype=torch.float16)
    dout = torch.full_like(q, 1000.0)
    assert_as_accurate_as_standard(
        lambda q, k, v: flash(q, k, v, softcap=softcap), (q, k, v), CAUSAL, softcap=softcap, dout=dout
    )


@pytest.mark.parametrize(("scores", "cap"), [(1e-3, 2.0), (1e-3, 1000.0), (100.0, 2.0)], ids=str)
def test_softcap_of_scores_far_below_and_above_it(flash, scores, cap):
    q, k, v = flash.qkv(1, 65, 65, 2, 2, 16)
    assert_as_accurate_as_standard(
        lambda q, k, v: flash(q, k, v, softcap=cap), (q * scores, k, v), CAUSAL, softcap=cap, lse_gradient=True
    )


@pytest.mark.parametrize("dims", [(16, 72), (72, 16), (40, 96), (128, 64)], ids=str)
def test_values_with_a_head_dimension_of_their_own(flash, dims):
    inputs = flash.qkv(2, 70, 70, 4, 2, *dims, dtype=torch.float16)
    intervals = CAUSAL.in_documents(documents([30, 40], [5, 65]))
    assert_as_accurate_as_standard(lambda q, k, v: flash(q, k, v, intervals), inputs, intervals, lse_gradient=True)


@each_softcap
def test_gradient_through_the_lse_alone(flash, softcap):
    inputs = flash.qkv(2, 70, 70, 4, 2, 16)
    intervals = CAUSAL.in_documents(documents([30, 40], [5, 65]))
    assert_as_accurate_as_standard(
        lambda q, k, v: flash(q, k, v, intervals, softcap=softcap),
        inputs, intervals, softcap=softcap, dout=torch.zeros_like(inputs[0]), lse_gradient=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("intervals", [FULL, CAUSAL], ids=str)
def test_small_integers_are_exact_up_to_the_last_rounding(flash, intervals, dtype):
    """At scale ln 2 every probability is a power of two, so all sums are exact: a misplaced element shows."""
    if dtype.itemsize > flash.dtype.itemsize:
        pytest.skip(f"{flash.name} computes in 16 bits")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-2, 3, (1, 200, 2, 64), generator=generator).to(DEVICE, dtype) for _ in range(3))
    q[..., 2:], q[..., :2] = 0, q[..., :2].clamp(-1, 1)
    out, _ = flash(q, k, v, intervals, scale=math.log(2))
    weights = torch.exp2(torch.einsum("bihd,bjhd->bhij", q.double(), k.double()))
    weights = weights * intervals.dense(200, 200, DEVICE)
    exact = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v.double())
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()


def test_one_hot_attention_copies_values_bit_for_bit(flash):
    q, _, v = flash.qkv(1, 16, 16, 1, 1, 16)
    eye = torch.eye(16, device=DEVICE, dtype=flash.dtype)[None, :, None]
    out, _ = flash(eye * 1024, eye, v, FULL, scale=1.0)
    assert torch.equal(out, v)


def test_each_query_head_reads_its_own_group(flash):
    q, k, v = flash.qkv(1, 33, 33, 6, 3, 16)
    grouped = flash(q, k, v)[0]
    repeated = flash(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))[0]
    assert torch.equal(grouped, repeated)


@each_softcap
def test_each_row_of_the_batch_has_its_own_documents(flash, softcap):
    q, k, v = flash.qkv(3, 70, 70, 4, 2, 16)
    ids = documents([70], [30, 40], [5, 60, 5])
    together = everything(flash, (q, k, v), CAUSAL.in_documents(ids), softcap=softcap)
    for b in range(3):
        alone = [x[b : b + 1] for x in (q, k, v)]
        assert_equal(
            [x[b : b + 1] for x in together],
            everything(flash, alone, CAUSAL.in_documents(ids[b : b + 1]), softcap=softcap),
        )


def test_documents_given_once_are_those_of_all_rows(flash):
    inputs = flash.qkv(3, 70, 70, 4, 2, 16)
    shared, copied = (CAUSAL.in_documents(documents(*[[30, 40]] * R)) for R in (1, 3))
    assert_equal(everything(flash, inputs, shared), everything(flash, inputs, copied))


@each_softcap
def test_a_changed_document_changes_no_other(flash, softcap):
    ids = documents([30, 50, 20])
    intervals, others = CAUSAL.in_documents(ids), (ids != 1)[0]
    q, k, v = flash.qkv(1, 100, 100, 4, 2, 16)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    results = []
    for change in (0.0, 5.0):
        inputs = [x + (change * ~others[:, None, None]).to(x) for x in (q, k, v, dout)]
        out, lse, *gradients = everything(flash, inputs[:3], intervals, inputs[3], softcap=softcap)
        results.append([lse[..., others], *(x[:, others] for x in (out, *gradients))])
    assert_equal(*results)


def test_the_order_of_keys_does_not_matter_where_all_are_seen(flash):
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    inputs = flash.qkv(1, 70, 100, 4, 2, 16)
    assert_as_accurate_as_standard(
        lambda q, k, v: flash(q, k[:, order], v[:, order], FULL), inputs, FULL, lse_gradient=True
    )


@pytest.mark.parametrize("intervals", [FULL, CAUSAL], ids=str)
@each_softcap
def test_keys_in_two_parts_merge_by_their_lse(flash, intervals, softcap):
    """Many queries see nothing of the second part under a causal mask: their LSE is -inf there."""

    def merged(q, k, v):
        # The first part lacks the last 60 keys, so the queries stand 60 keys further on.
        first = FULL if intervals.is_full else Intervals.window(None, 60)
        out_a, lse_a = flash(q, k[:, :40], v[:, :40], first, softcap=softcap)
        out_b, lse_b = flash(q, k[:, 40:], v[:, 40:], intervals, softcap=softcap)
        lse = torch.logaddexp(lse_a, lse_b)
        of_a, of_b = (torch.exp(part - lse).transpose(1, 2)[..., None] for part in (lse_a, lse_b))
        return (of_a * out_a + of_b * out_b).to(q.dtype), lse

    inputs = flash.qkv(1, 100, 100, 4, 2, 16)
    assert_as_accurate_as_standard(merged, inputs, intervals, softcap=softcap, lse_gradient=True)


def test_a_changed_key_changes_only_the_queries_that_see_it(flash):
    q, k, v = flash.qkv(1, 100, 100, 1, 1, 16)
    window = Intervals.window(10, 2)
    before = flash(q, k, v, window)[0]
    k[:, 50], v[:, 50] = 7.0, -7.0
    changed = (flash(q, k, v, window)[0] != before).any(-1)[0, :, 0]
    assert torch.equal(changed, window.dense(100, 100, DEVICE)[0, :, 50])


@pytest.mark.gpu
def test_more_than_65535_heads_times_batch(flash):
    inputs = flash.qkv(40_000, 16, 16, 2, 2, 16, dtype=torch.float16)
    assert_as_accurate_as_standard(flash, inputs, CAUSAL)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["sm_90", "sm_80"], ids=["descriptors", "pointers"])
def test_offsets_beyond_two_to_the_31(flash, architecture, monkeypatch):
    monkeypatch.setattr(ops, "architecture", lambda device: architecture)
    # The last rows of a view whose storage spans more than 2^31 elements must equal those of a small copy, to the bit:
    # the rows before the copy are whole tiles and nothing compared sees them, so both walk the same blocks.
    rows = (2**31 // (128 * 64) // 384 + 2) * 384
    wide = torch.zeros(1, rows, 128, 64, device="cuda", dtype=torch.bfloat16)
    far = wide[:, :, 127:]
    near = torch.randn(1, 384, 1, 64, device="cuda", dtype=torch.bfloat16)
    far[:, -384:] = near
    window = Intervals.window(100, 0)
    results = []
    for x in (far, near):
        out, lse, *gradients = everything(flash, (x, x, x), window)
        results.append([lse[..., -128:], *(y[:, -128:] for y in (out, *gradients))])
    assert_equal(*results)


@pytest.mark.gpu
def test_bounds_beyond_two_to_the_31(flash):
    q, k, v = flash.qkv(2, 384, 384, 2, 1, 64, dtype=torch.bfloat16)
    near = CAUSAL.in_documents(documents([100, 284], [300, 84]))
    far = []
    for bounds in (near.bounds.keys, near.bounds.queries):
        storage = torch.empty(2**31 + 2 * 384, device="cuda", dtype=torch.int32)
        far.append(storage.as_strided(bounds.shape, (384, 2**31, 1)).copy_(bounds))
    far = Intervals(bounds=Bounds(*far))
    assert_equal(*(everything(flash, (q, k, v), intervals, deterministic=True) for intervals in (near, far)))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current(flash):
    inputs = make_qkv(1, 65, 65, 2, 2, 64, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_as_accurate_as_standard(flash, inputs, CAUSAL)


@pytest.mark.gpu
def test_captures_in_a_cuda_graph_and_replays_with_new_documents(flash):
    """More tiles than multiprocessors: programs that take them from a counter need it at 0 in each replay."""
    inputs = flash.qkv(2, 256, 256, 80, 2, 64, dtype=torch.bfloat16)
    masks = [CAUSAL.in_documents(documents(*rows)) for rows in (([256], [256]), ([100, 156], [1, 255]))]
    captured = CAUSAL.in_documents(documents([256], [256]))
    expected = [everything(flash, inputs, intervals) for intervals in masks]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = everything(flash, inputs, captured)
    for intervals, right in zip(masks, expected, strict=True):
        captured.bounds.keys.copy_(intervals.bounds.keys)
        captured.bounds.queries.copy_(intervals.bounds.queries)
        graph.replay()
        assert_equal(results, right)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_torch_compile_makes_graphs_of_its_first_calls(flash, mask):
    """What a first call makes to keep, tables and counters, must not lie in the memory of the graphs."""
    q, k, v = flash.qkv(2, 318, 318, 40, 2, 64, dtype=torch.bfloat16)  # a shape that no other test has planned
    intervals = CAUSAL if mask == "causal" else CAUSAL.in_documents(documents([100, 218], [300, 18]))
    torch._dynamo.reset()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def attend(q, k, v):
        return attention(q, k, v, intervals, variant=flash.name)

    results = [attend(q, k, v).clone() for _ in range(4)]
    for result in results:
        assert torch.equal(result, attention(q, k, v, intervals, variant=flash.name))


@pytest.mark.gpu
def test_documents_on_two_streams_at_once(flash):
    problems = [
        (flash.qkv(2, 384, 384, 80, 2, 64, dtype=torch.bfloat16), CAUSAL.in_documents(documents(*rows)))
        for rows in (([384], [384]), ([100, 284], [300, 84]))
    ]
    expected = [flash(*inputs, intervals)[0] for inputs, intervals in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, (inputs, intervals) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                results.append(flash(*inputs, intervals)[0])
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))
