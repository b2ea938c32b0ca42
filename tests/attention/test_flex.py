"""FlexAttention behind the contract: block lists against the dense mask, values, one compile for all documents."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_as_accurate_as_standard, make_qkv
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from flashtrain.kernels.attention import Intervals, attention, flex
from flashtrain.kernels.attention.standard import standard

EXTRA = (None, 0, 1, 2, 5)
WINDOWS = [Intervals.window(left, right) for left, right in itertools.product(EXTRA, EXTRA)]
LENGTHS = list(itertools.product((1, 2, 3, 7, 9), (1, 3, 4, 9, 11)))


def listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """(R, rows, columns): how often each block is listed."""
    within = torch.arange(indices.shape[-1]) < num_blocks[..., None]
    times = torch.zeros(indices.shape, dtype=torch.int32)
    return times.scatter_add_(-1, indices.long(), within.int())[:, 0]


def blocks_of(dense: Tensor) -> tuple[Tensor, Tensor]:
    """(any, all), each (R, rows, columns): what a block shows; what lies beyond the mask is not visible."""
    R, Sq, Sk = dense.shape
    padded = torch.nn.functional.pad(dense, (0, -Sk % flex.BLOCK, 0, -Sq % flex.BLOCK))
    tiles = padded.unflatten(2, (-1, flex.BLOCK)).unflatten(1, (-1, flex.BLOCK))
    return tiles.any(4).any(2), tiles.all(4).all(2)


def lists_are_right(intervals: Intervals, Sq: int, Sk: int) -> None:
    """Nothing visible is left out, nothing is listed twice, and the full blocks are those that the mask fills.

    Of a window no block without a visible pair is visited; of documents one may be, between two that are. In
    blocks of three tokens, so that lengths of a few are several of them and a rest.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 3)
        _lists_are_right(intervals, Sq, Sk)


def _lists_are_right(intervals: Intervals, Sq: int, Sk: int) -> None:
    dense = intervals.dense(Sq, Sk)
    mask = flex.block_mask(intervals, len(dense), Sq, Sk)
    assert torch.equal(torch_flex.create_mask(mask.mask_mod, len(dense), 1, Sq, Sk, device="cpu")[:, 0], dense)
    sides = [
        (dense, mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        (dense.mT, mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices),
    ]
    for seen, num_blocks, indices, num_full, full_indices in sides:
        shows, filled = blocks_of(seen)
        masked, full = listed(num_blocks, indices), listed(num_full, full_indices)
        assert torch.equal(full, filled.int())
        assert (masked + full <= 1).all()
        assert (masked + full >= shows.int()).all()
        if intervals.bounds is None:
            assert torch.equal(masked + full, shows.int())
        for tensor in (num_blocks, indices, num_full, full_indices):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert all((x >= 0).all() and (x < shows.shape[2]).all() for x in (indices, full_indices))


@pytest.mark.parametrize("intervals", WINDOWS, ids=str)
def test_lists_of_windows(intervals):
    for Sq, Sk in LENGTHS:
        lists_are_right(intervals, Sq, Sk)


windows = st.sampled_from(WINDOWS)
documents = st.lists(st.integers(0, 4), min_size=1, max_size=14).map(sorted)


@given(windows, documents, documents)
def test_lists_of_documents(window, q_documents, k_documents):
    intervals = window.in_documents(torch.tensor([q_documents]), torch.tensor([k_documents]))
    lists_are_right(intervals, len(q_documents), len(k_documents))


@given(windows, documents, st.integers(1, 8))
def test_lists_of_rows_and_chunks_of_their_own(window, documents, size):
    S = len(documents)
    rows = window.in_documents(torch.tensor([documents, [7] * S]))
    for intervals in (rows, window.in_chunks(size, S, S + 3), rows & Intervals.causal().in_chunks(size, S, S)):
        lists_are_right(intervals, *(x.shape[-1] for x in (intervals.bounds.keys, intervals.bounds.queries)))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 11), st.integers(1, 11))
def test_lists_of_prefixes(prefixes, Sq, Sk):
    lists_are_right(Intervals.prefix_lm(torch.tensor(prefixes), Sq, Sk), Sq, Sk)


@pytest.mark.parametrize("intervals", [Intervals.causal(), Intervals.window(200, 30)], ids=str)
@pytest.mark.parametrize(("Sq", "Sk"), [(128, 128), (512, 512), (300, 700), (700, 300)])
def test_lists_are_those_that_pytorch_finds_from_the_dense_mask(intervals, Sq, Sk):
    ours = flex.block_mask(intervals, 1, Sq, Sk)
    theirs = torch_flex.create_block_mask(ours.mask_mod, 1, 1, Sq, Sk, device="cpu", BLOCK_SIZE=flex.BLOCK)
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in ("kv", "q", "full_kv", "full_q"):
        found, expected = ((getattr(x, f"{name}_num_blocks"), getattr(x, f"{name}_indices")) for x in (ours, theirs))
        assert torch.equal(listed(*found), listed(*expected)), name


def test_lists_are_made_without_looking_at_values():
    """Meta tensors have none: so nothing waits for a GPU, and torch.compile meets no branch on data."""
    intervals = Intervals.causal().in_documents(torch.zeros(2, 300, dtype=torch.int32, device="meta"))
    mask = flex.block_mask(intervals, 2, 300, 300, "meta")
    assert mask.kv_indices.shape == (2, 1, 3, 3) and mask.shape == (2, 1, 300, 300)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """PyTorch's reference for the kernels, which has a backward on a CPU too, though FlexAttention refuses it there."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()


def attend_on_the_cpu(intervals: Intervals, scale: float, softcap: float):
    return lambda q, k, v: flex.attend_with(torch_flex.flex_attention, q, k, v, intervals, scale, softcap)


DOCUMENTS = Intervals.window(20, 3).in_documents(torch.tensor([[0] * 50 + [1] * 20, [0] * 69 + [1]]))
CASES = [
    (Intervals.full(), 70, 33),
    (Intervals.causal(), 33, 70),
    (Intervals.causal(), 70, 33),
    (Intervals.window(20, 3), 70, 70),
    (DOCUMENTS, 70, 70),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize(("heads", "Dv"), [((4, 2), 24), ((3, 1), 16), ((2, 2), 40)], ids=["GQA", "MQA", "wider-v"])
@pytest.mark.parametrize(("intervals", "Sq", "Sk"), CASES, ids=lambda x: str(x))
def test_the_reference_behind_the_contract(intervals, Sq, Sk, heads, Dv, softcap, on_the_cpu):
    """Scale, softcap, mask, LSE, grouped heads and their gradients, as the kernels get them."""
    assert_as_accurate_as_standard(
        attend_on_the_cpu(intervals, 0.3, softcap),
        make_qkv(2, Sq, Sk, *heads, 24, Dv),
        intervals,
        scale=0.3,
        softcap=softcap,
        lse_gradient=True,
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rows_that_see_no_key(on_the_cpu):
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 40, 16, 4, 2, 16))
    out, lse = attend_on_the_cpu(Intervals.causal(), 0.3, 0.0)(q, k, v)
    assert (out[:, :24] == 0).all() and (lse[..., :24] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert (dq[:, :24] == 0).all() and all(x.isfinite().all() for x in (dq, dk, dv))


def three_masks() -> list[Intervals]:
    return [
        Intervals.causal().in_documents(torch.tensor([ids], dtype=torch.int32))
        for ids in ([0] * 64, [0] * 30 + [1] * 34, [0] + [1] * 62 + [2])
    ]


def is_right(result: tuple[Tensor, Tensor], inputs, intervals: Intervals, softcap: float) -> None:
    torch.testing.assert_close(result, standard(*inputs, intervals, 0.25, softcap))


def test_new_documents_compile_nothing_anew():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(torch_flex.flex_attention, backend=counter, fullgraph=True, dynamic=False)
    inputs = make_qkv(2, 64, 64, 4, 2, 16)
    for intervals in [*three_masks(), Intervals.window(9, 0), Intervals.causal()]:
        is_right(flex.attend_with(compiled, *inputs, intervals, 0.25, 0.7), inputs, intervals, 0.7)
    assert counter.frame_count == 1
    inputs = make_qkv(2, 65, 64, 4, 2, 16)
    is_right(flex.attend_with(compiled, *inputs, Intervals.causal(), 0.25, 0.7), inputs, Intervals.causal(), 0.7)
    assert counter.frame_count == 2


def test_a_shape_too_many_is_an_error_and_no_slow_way_out(monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(torch_flex.flex_attention, backend="eager", fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "MAX_SHAPES", 2)
    for S in (8, 9):
        flex.flex(*make_qkv(1, S, S, 2, 2, 16), Intervals.causal(), 0.25)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        flex.flex(*make_qkv(1, 10, 10, 2, 2, 16), Intervals.causal(), 0.25)


def test_it_is_part_of_a_graph_that_is_compiled():
    """The mask is made within the graph, which new documents do not change either."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex.flex, backend=counter, fullgraph=True)
    inputs = make_qkv(2, 64, 64, 4, 2, 16)
    for intervals in three_masks():
        is_right(compiled(*inputs, intervals, 0.25, 0.7), inputs, intervals, 0.7)
    assert counter.frame_count == 1


GPU_CASES = [
    (Intervals.full(), 129, 1000, 64, 64, 0.0),
    (Intervals.causal(), 1000, 65, 128, 64, 0.0),
    (Intervals.causal(), 1024, 1024, 72, 72, 20.0),
    (Intervals.window(200, 0), 4097, 4097, 64, 256, 0.0),
    (Intervals.window(20, 3), 63, 63, 256, 256, 0.0),
    (Intervals.causal(), 300, 300, 192, 128, 20.0),
]


def attend_on_the_gpu(intervals: Intervals, softcap: float):
    return lambda q, k, v: attention(q, k, v, intervals, variant="flex", softcap=softcap, return_lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("intervals", "Sq", "Sk", "D", "Dv", "softcap"), GPU_CASES, ids=lambda x: str(x))
def test_kernels(intervals, Sq, Sk, D, Dv, softcap, dtype):
    inputs = make_qkv(2, Sq, Sk, 6, 2, D, Dv, dtype=dtype, device="cuda")
    attend = attend_on_the_gpu(intervals, softcap)
    assert_as_accurate_as_standard(attend, inputs, intervals, softcap=softcap, lse_gradient=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_kernels_with_documents(compiles):
    torch._dynamo.reset()
    inputs = make_qkv(2, 700, 700, 4, 2, 64, dtype=torch.bfloat16, device="cuda")

    def attend(q, k, v, intervals):
        return attention(q, k, v, intervals, variant="flex", return_lse=True)

    attend = torch.compile(attend, fullgraph=True) if compiles else attend
    torch._dynamo.utils.counters.clear()
    for ends in ((250, 600), (1, 699), (128, 512)):
        ids = torch.bucketize(torch.arange(700), torch.tensor(ends), right=True).expand(2, -1)
        intervals = Intervals.window(300, 0).in_documents(ids.cuda())
        assert_as_accurate_as_standard(
            lambda q, k, v, intervals=intervals: attend(q, k, v, intervals), inputs, intervals, lse_gradient=True
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
