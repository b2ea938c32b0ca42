"""The online softmax: any split of a row into any blocks, in any order, gives the whole row's softmax.

The functions that the kernels call run here on float64, in which nothing hides behind rounding: what is left is a few
float64 roundings for each block. Two kernels of the test's own fold blocks as flash_v2 does, by `softmax_update`, and
join them as flash_v1 does, by `softmax_merge`.
"""

import math

import pytest
import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
tl = triton.language
online_softmax = pytest.importorskip("flashtrain.kernels.attention.online_softmax")
softmax_start, softmax_update = online_softmax.softmax_start, online_softmax.softmax_update
softmax_finish, softmax_merge = online_softmax.softmax_finish, online_softmax.softmax_merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, MOST, COLUMNS = 4, 16, 2
EPS = torch.finfo(torch.float64).eps


@triton.jit
def load_block(s_ptr, v_ptr, start, stop, length, ROWS: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr):
    """Scores (ROWS, MOST), -inf beyond the block, and values (MOST, COLUMNS)."""
    key = start + tl.arange(0, MOST)
    in_block = key < stop
    s_ptrs = s_ptr + tl.arange(0, ROWS)[:, None] * length + key[None, :]
    s = tl.load(s_ptrs, mask=in_block[None, :], other=float("-inf"))
    v_ptrs = v_ptr + key[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return s, tl.load(v_ptrs, mask=in_block[:, None], other=0.0)


@triton.jit
def store_row(out_ptr, lse_ptr, out, lse, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    tl.store(out_ptr + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], out)
    tl.store(lse_ptr + row, lse)


@triton.jit
def fold_kernel(
    s_ptr, v_ptr, ends_ptr, out_ptr, lse_ptr, length, num_blocks,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As flash_v2: an output not yet divided, maximum and sum go from block to block, of scores in bits."""
    row_max, row_sum = softmax_start(ROWS)
    row_max, row_sum = row_max.to(tl.float64), row_sum.to(tl.float64)
    acc = tl.zeros([ROWS, COLUMNS], tl.float64)
    start = 0
    for block in range(num_blocks):
        stop = tl.load(ends_ptr + block)
        s, v = load_block(s_ptr, v_ptr, start, stop, length, ROWS, MOST, COLUMNS)
        p, rescale, row_max = softmax_update(s, tl.max(s, 1), row_max, 1.0, True)
        acc = acc * rescale[:, None] + tl.sum(p[:, :, None] * v[None, :, :], 1)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        start = stop
    factor, lse = softmax_finish(row_max, row_sum, 1.0)
    store_row(out_ptr, lse_ptr, acc * factor[:, None], lse, ROWS, COLUMNS)


@triton.jit
def merge_kernel(
    s_ptr, v_ptr, ends_ptr, out_ptr, lse_ptr, length, num_blocks,
    ROWS: tl.constexpr, MOST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As flash_v1: the softmax of each block is joined with the output so far, divided each time, of scores in nats."""
    m = tl.full([ROWS], float("-inf"), tl.float64)
    l = tl.zeros([ROWS], tl.float64)  # noqa: E741
    out = tl.zeros([ROWS, COLUMNS], tl.float64)
    start = 0
    for block in range(num_blocks):
        stop = tl.load(ends_ptr + block)
        s, v = load_block(s_ptr, v_ptr, start, stop, length, ROWS, MOST, COLUMNS)
        m_block = tl.max(s, 1)
        p = tl.exp(s - tl.where(m_block == float("-inf"), 0.0, m_block)[:, None])
        m, l_new, old, new = softmax_merge(m, l, m_block, tl.sum(p, 1))
        f = (l * old)[:, None] * out + new[:, None] * tl.sum(p[:, :, None] * v[None, :, :], 1)
        out = f / tl.where(l_new == 0.0, 1.0, l_new)[:, None]
        l = l_new  # noqa: E741
        start = stop
    store_row(out_ptr, lse_ptr, out, m + tl.log(l), ROWS, COLUMNS)


def in_blocks(kernel, s, v, order, ends):
    """out (ROWS, COLUMNS) and the natural-log LSE (ROWS) of keys in that order, in blocks that end there."""
    s, v = s[:, order].contiguous().to(DEVICE), v[order].contiguous().to(DEVICE)
    out = torch.empty(ROWS, COLUMNS, dtype=torch.float64, device=DEVICE)
    lse = torch.empty(ROWS, dtype=torch.float64, device=DEVICE)
    ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    kernel[(1,)](s, v, ends, out, lse, len(order), len(ends), ROWS, MOST, COLUMNS)
    return out.cpu(), lse.cpu()


def whole(s, v, exp, nats):
    """The same of the whole row at once, of scores that are worth so many nats; 0 and -inf where nothing is seen."""
    top = s.max(1).values
    weights = exp(s - top.masked_fill(top == -math.inf, 0.0)[:, None])
    total = weights.sum(1)
    return weights @ v / total.masked_fill(total == 0, 1.0)[:, None], top * nats + total.log()


# Scores that are hidden, that differ by less than a rounding of their size, and that overflow any exponential.
scores = st.one_of(
    st.floats(-10.0, 10.0),
    st.just(-math.inf),
    st.sampled_from([-1e300, -1e30, -1e4, -745.0, 710.0, 1e4, 1e4 + 0.5, 1e30, 1e300]),
)


@st.composite
def rows(draw):
    """Scores (ROWS, keys), values (keys, COLUMNS), an order of the keys, and where blocks of up to MOST of them end."""
    sizes = draw(st.lists(st.integers(0, MOST), min_size=1, max_size=6).filter(any))
    length = sum(sizes)
    s = [draw(st.lists(scores, min_size=length, max_size=length)) for _ in range(ROWS)]
    v = draw(st.lists(st.floats(-3.0, 3.0), min_size=length * COLUMNS, max_size=length * COLUMNS))
    order = draw(st.permutations(range(length)))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return (
        torch.tensor(s, dtype=torch.float64).reshape(ROWS, length),
        torch.tensor(v, dtype=torch.float64).reshape(length, COLUMNS),
        list(order),
        ends,
    )


INF, HUGE = math.inf, 1e300
NOTHING_AT_FIRST = (
    torch.tensor([[-INF] * 3, [-INF, HUGE, -INF], [-HUGE, -HUGE, HUGE], [HUGE, HUGE, -HUGE]], dtype=torch.float64),
    torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]], dtype=torch.float64),
    [0, 1, 2],
    [0, 1, 1, 2, 3],
)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("kernel", "exp", "nats"),
    [(fold_kernel, torch.exp2, math.log(2)), (merge_kernel, torch.exp, 1.0)],
    ids=["update", "merge"],
)
def test_any_blocks_in_any_order_give_the_whole_row(kernel, exp, nats, number):
    @seed(number)
    @settings(max_examples=25, database=None)
    @given(rows())
    @example(NOTHING_AT_FIRST)
    def hold(problem):
        s, v, order, ends = problem
        out, lse = in_blocks(kernel, s, v, order, ends)
        right_out, right_lse = whole(s, v, exp, nats)
        # A few roundings for each of six blocks, of what is at most 3 and of the LSE itself.
        torch.testing.assert_close(out, right_out, rtol=0, atol=3 * 30 * EPS)
        torch.testing.assert_close(lse, right_lse, rtol=30 * EPS, atol=30 * EPS)

    hold()


@pytest.mark.parametrize("kernel", [fold_kernel, merge_kernel], ids=["update", "merge"])
def test_a_row_that_sees_nothing_is_zero(kernel):
    s = torch.full((ROWS, 5), -INF, dtype=torch.float64)
    out, lse = in_blocks(kernel, s, torch.ones(5, COLUMNS, dtype=torch.float64), list(range(5)), [2, 2, 5])
    assert (out == 0).all() and (lse == -INF).all()
