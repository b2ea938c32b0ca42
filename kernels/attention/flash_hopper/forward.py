"""The forward kernel for Hopper and its launch: one warp loads, two or three warpgroups compute, all at the same time.

Each computing warpgroup has 64 queries of a tile. While the tensor cores multiply P V of one block it takes the softmax
of the next, and the first scores of its next tile are made before this tile's output is stored.
Source: FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..geometry import any_masked, key_bounds, mask_arguments
from ..intervals import Intervals
from ..online_softmax import softmax_finish, softmax_update
from ..softcap import cap_scores, score_units
from ..tiles import num_sms
from ..views import VARYING, addressable
from .launch import ROWS, Launch, launch_of, view
from .masks import by_thread, inside_or
from .pipeline import (
    FIRST_BARRIER,
    fetch,
    fetch_with_message,
    give_turn,
    landed_anew,
    make_ring,
    message_at,
    release,
    room_for_messages,
    take_turn,
    tiles_of,
    wait_for,
)
from .products import as_operand, rounded, zeros
from .schedule import block_at, counter, query_tile, section, table, visits

# Triton compares every constant of a module that a kernel names, at each launch, for some 0.9 us of the host's time
# (NOTES.md): so few are named here, and what an argument says is taken from there.

# Named barriers: a turn for each warpgroup that computes, then those of the rings.
FIRST_TURN: gl.constexpr = FIRST_BARRIER


@gluon.jit
def _load(problem, rings, messages, inputs, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The loading warp: Q of every tile of the program, and K of each block before V of the block before.

    Beside Q it says where the tile is, or that there are no more, so that only this warp has to find out. It does so
    while the others have a block to go on with.
    """
    order_ptr, num_heads, group_size, mask, scale_log2e, cap = problem
    q_ring, k_ring, v_ring = rings
    q, k, v = inputs
    BLOCK_M: gl.constexpr = CONSUMERS * q.block_shape[2]
    more, b, h, first, blocks = query_tile(order_ptr, 0, num_heads, mask, BLOCK_M, BLOCK_N, FIRST=True)
    fetch_with_message(q_ring, messages, 0, (more, b, h, first) + blocks, q, b, h, first, more, CONSUMERS)
    block = block_at(0, blocks)
    fetch(k_ring, 0, k, b, h // group_size, block * BLOCK_N, CONSUMERS)
    n, count = 0, 0
    while more:
        h_kv, all_visits = h // group_size, visits(blocks)[1]
        block, count = _load_visits(
            1, tl.minimum(all_visits, 2), block, count, rings, inputs, b, h_kv, blocks, CONSUMERS, BLOCK_N
        )
        n += 1
        more, next_b, next_h, first, next_blocks = query_tile(order_ptr, n, num_heads, mask, BLOCK_M, BLOCK_N)
        message = (more, next_b, next_h, first) + next_blocks
        fetch_with_message(q_ring, messages, n, message, q, next_b, next_h, first, more, CONSUMERS)
        block, count = _load_visits(
            2, all_visits, block, count, rings, inputs, b, h_kv, blocks, CONSUMERS, BLOCK_N
        )  # fmt: skip
        next_block = block_at(0, next_blocks)
        if more:
            fetch(k_ring, count + 1, k, next_b, next_h // group_size, next_block * BLOCK_N, CONSUMERS)
        fetch(v_ring, count, v, b, h_kv, block * BLOCK_N, CONSUMERS)
        b, h, blocks, block = next_b, next_h, next_blocks, next_block
        count += 1


@gluon.jit
def _load_visits(
    start, stop, block, count, rings, inputs, b, h_kv, blocks, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """K of a tile's visits, and V of the visit before each, at first of `block`; returns the last block."""
    q_ring, k_ring, v_ring = rings
    q, k, v = inputs
    for visit in range(start, stop):
        next_block = block_at(visit, blocks)
        fetch(k_ring, count + 1, k, b, h_kv, next_block * BLOCK_N, CONSUMERS)
        fetch(v_ring, count, v, b, h_kv, block * BLOCK_N, CONSUMERS)
        block = next_block
        count += 1
    return block, count


@gluon.jit
def _tile(messages, n):
    """A computing warpgroup, after it has waited for Q of its n-th tile: what `query_tile` said of the tile."""
    exists, b, h, first, begin, free_begin, free_end, end = message_at(messages, n)
    return exists != 0, b, h, first, (begin, free_begin, free_end, end)


@gluon.jit
def _scores_and_output(
    q_MD, rings, count, needed, acc_MD, p_MN,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Issues S = Q K^T of the next block, and O += P V of block `count`, which finishes after it."""
    q_ring, k_ring, v_ring = rings
    k_ND = wait_for(k_ring, count + 1, needed=needed)
    if PING_PONG:
        take_turn(FIRST_TURN, CONSUMER)
    s_MN = warpgroup_mma(q_MD, k_ND.permute((1, 0)), zeros(BLOCK_N), use_acc=False, is_async=True)
    v_ND = wait_for(v_ring, count)
    acc_MD = warpgroup_mma(p_MN, v_ND, acc_MD, is_async=True)
    if PING_PONG:
        give_turn(FIRST_TURN, CONSUMER, CONSUMERS)
    return s_MN, acc_MD


@gluon.jit
def _softmax(s_MN, row_max_M, scale_log2e, cap, lo_M, hi_M, j, MASKED: gl.constexpr):
    """One step of the online softmax over keys from j; of the row sum's gain each thread has its part."""
    s_MN = cap_scores(s_MN, cap)
    if MASKED:
        s_MN = inside_or(s_MN, lo_M - j, hi_M - j, float("-inf"))
    # A thread has pairs of neighbours, BLOCK_N / 8 of them: their maxima first, for a shorter chain.
    pairs_max = gl.max(gl.max(gl.max(by_thread(s_MN), 3), 1), 1)
    block_max_M = gl.convert_layout(pairs_max, row_max_M.type.layout)
    p_MN, rescale_M, row_max_M = softmax_update(s_MN, block_max_M, row_max_M, scale_log2e, MASKED)
    gain_MT = gl.sum(gl.sum(by_thread(p_MN), 3), 1)
    return p_MN, rescale_M, row_max_M, gain_MT


@gluon.jit
def _across(x_M, like):
    """x as a factor of the rows of another matrix, (M, 1) in its layout."""
    return gl.convert_layout(x_M, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def _attend(
    state, n, rings, blocks, lo_M, hi_M, scale_log2e, cap,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    PING_PONG: gl.constexpr,
):  # fmt: skip
    """Folds key blocks of a tile but the first into output and softmax state: those that need a mask, or the free."""
    q_ring, k_ring, v_ring = rings
    q_MD = landed_anew(q_ring, n, CONSUMER)
    acc_MD, p_MN, row_max_M, row_sum_MT, count = state
    masked, all_visits = visits(blocks)
    if MASKED:
        start, stop = 1, masked
    else:
        start, stop = tl.maximum(masked, 1), all_visits
    for visit in range(start, stop):
        s_MN, acc_MD = _scores_and_output(
            q_MD, rings, count, True, acc_MD, p_MN, CONSUMER, CONSUMERS, BLOCK_N, PING_PONG
        )
        s_MN = warpgroup_mma_wait(1, (s_MN,))
        release(k_ring, count + 1, CONSUMERS)
        j = block_at(visit, blocks) * BLOCK_N
        next_p_MN, rescale_M, row_max_M, gain_MT = _softmax(s_MN, row_max_M, scale_log2e, cap, lo_M, hi_M, j, MASKED)
        row_sum_MT = row_sum_MT * _across(rescale_M, row_sum_MT) + gain_MT
        # P is named too: its registers are read until now.
        acc_MD = warpgroup_mma_wait(0, (acc_MD, p_MN))[0]
        release(v_ring, count, CONSUMERS)
        p_MN = as_operand(rounded(next_p_MN, p_MN.dtype), acc_MD, p_MN.dtype)
        acc_MD = acc_MD * _across(rescale_M, acc_MD)
        count += 1
    return acc_MD, p_MN, row_max_M, row_sum_MT, count


@gluon.jit
def _compute(
    problem, rings, messages, outputs, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    ANY_MASKED: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: its 64 rows of out and lse of every tile of the program."""
    order_ptr, num_heads, group_size, mask, scale_log2e, cap = problem
    all_heads, num_q_heads = num_heads
    q_ring, k_ring, v_ring = rings
    out, out_buffers, lse_ptr = outputs
    q_len = mask[0]
    ROWS: gl.constexpr = out.block_shape[2]
    S_ROWS: gl.constexpr = gl.SliceLayout(1, zeros(BLOCK_N).type.layout)
    i_M = CONSUMER * ROWS + gl.arange(0, ROWS, S_ROWS)
    no_max_M = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    out_buffer = out_buffers.index(CONSUMER)
    BLOCK_DV: gl.constexpr = out.block_shape[3]
    if PING_PONG and CONSUMER == CONSUMERS - 1:
        give_turn(FIRST_TURN, CONSUMER, CONSUMERS)

    q_MD = wait_for(q_ring, 0, CONSUMER)
    more, b, h, first, blocks = _tile(messages, 0)
    lo_M, hi_M = key_bounds(first + i_M, b, *mask)
    s_MN = warpgroup_mma(q_MD, wait_for(k_ring, 0).permute((1, 0)), zeros(BLOCK_N), use_acc=False, is_async=True)
    s_MN = warpgroup_mma_wait(0, (s_MN,))
    release(k_ring, 0, CONSUMERS)
    j = block_at(0, blocks) * BLOCK_N
    p_MN, unused_M, row_max_M, row_sum_MT = _softmax(s_MN, no_max_M, scale_log2e, cap, lo_M, hi_M, j, ANY_MASKED)
    p_MN = as_operand(rounded(p_MN, q_MD.dtype), zeros(BLOCK_DV), q_MD.dtype)
    n, count = 0, 0
    while more:
        state = (zeros(BLOCK_DV), p_MN, row_max_M, row_sum_MT, count)
        if ANY_MASKED:
            state = _attend(
                state, n, rings, blocks, lo_M, hi_M, scale_log2e, cap,
                True, CONSUMER, CONSUMERS, BLOCK_N, PING_PONG,
            )  # fmt: skip
        acc_MD, p_MN, row_max_M, row_sum_MT, count = _attend(
            state, n, rings, blocks, lo_M, hi_M, scale_log2e, cap,
            False, CONSUMER, CONSUMERS, BLOCK_N, PING_PONG,
        )  # fmt: skip
        release(q_ring, n, CONSUMERS)

        # The last product of this tile beside the first scores of the next, which mean nothing behind the last.
        q_MD = wait_for(q_ring, n + 1, CONSUMER)
        more, next_b, next_h, next_first, next_blocks = _tile(messages, n + 1)
        lo_M, hi_M = key_bounds(next_first + i_M, next_b, *mask)
        s_MN, acc_MD = _scores_and_output(
            q_MD, rings, count, more, acc_MD, p_MN, CONSUMER, CONSUMERS, BLOCK_N, PING_PONG
        )
        s_MN = warpgroup_mma_wait(1, (s_MN,))
        j = block_at(0, next_blocks) * BLOCK_N
        next_p_MN, unused_M, next_max_M, next_sum_MT = _softmax(
            s_MN, no_max_M, scale_log2e, cap, lo_M, hi_M, j, ANY_MASKED
        )
        b, h, first = _tile(messages, n)[1:4]
        row_sum_M = gl.convert_layout(gl.sum(row_sum_MT, 1), S_ROWS)
        factor_M, lse_M = softmax_finish(row_max_M, row_sum_M, scale_log2e)
        tile_lse_ptr = lse_ptr + (b * num_q_heads + h).to(gl.int64) * q_len + first
        gl.store(tile_lse_ptr + i_M, lse_M, mask=first + i_M < q_len)
        acc_MD = warpgroup_mma_wait(0, (acc_MD, p_MN))[0]
        release(v_ring, count, CONSUMERS)
        count += 1
        if more:
            release(k_ring, count, CONSUMERS)

        out_MD = (acc_MD * _across(factor_M, acc_MD)).to(out.dtype)
        tma.store_wait(0)
        out_buffer.reshape([ROWS, BLOCK_DV]).store(out_MD)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [b, h, first + CONSUMER * ROWS, 0], out_buffer)
        p_MN = as_operand(rounded(next_p_MN, q_MD.dtype), acc_MD, q_MD.dtype)
        row_max_M, row_sum_MT = next_max_M, next_sum_MT
        blocks = next_blocks
        n += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*VARYING, "all_heads"))
def _fwd_kernel(
    q, k, v, out, lse_ptr, order_ptr, scale_log2e, cap, q_len, kv_len, all_heads, num_q_heads, group_size, left, right,
    bounds,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, NAMED: gl.constexpr, PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr, ANY_MASKED: gl.constexpr,
):  # fmt: skip
    """Writes out and lse. Grid (programs,), which share the tiles in the order of the table or the counter."""
    q_ring = make_ring(q, 2, CONSUMERS, CONSUMERS, None)
    FIRST_RING: gl.constexpr = FIRST_TURN + CONSUMERS
    k_ring = make_ring(k, SLOTS, 1, CONSUMERS, FIRST_RING if NAMED else None)
    v_ring = make_ring(v, SLOTS, 1, CONSUMERS, FIRST_RING + SLOTS if NAMED else None)
    rings = (q_ring, k_ring, v_ring)
    messages = room_for_messages(q_ring)
    out_buffers = tiles_of(out, CONSUMERS)
    fence_async_shared()
    mask = (q_len, kv_len, left, right, bounds)
    problem = (order_ptr, (all_heads, num_q_heads), group_size, mask, scale_log2e, cap)
    inputs = (q, k, v)
    outputs = (out, out_buffers, lse_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_compute, (problem, rings, messages, outputs, 0, CONSUMERS, BLOCK_N, ANY_MASKED, PING_PONG)),
                (_compute, (problem, rings, messages, outputs, 1, CONSUMERS, BLOCK_N, ANY_MASKED, PING_PONG)),
                (_load, (problem, rings, messages, inputs, CONSUMERS, BLOCK_N)),
            ],
            [4, 1],
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (problem, rings, messages, outputs, 0, CONSUMERS, BLOCK_N, ANY_MASKED, PING_PONG)),
                (_compute, (problem, rings, messages, outputs, 1, CONSUMERS, BLOCK_N, ANY_MASKED, PING_PONG)),
                (_compute, (problem, rings, messages, outputs, 2, CONSUMERS, BLOCK_N, ANY_MASKED, PING_PONG)),
                (_load, (problem, rings, messages, inputs, CONSUMERS, BLOCK_N)),
            ],
            [4, 4, 1],
            REGISTERS,
        )


class Plan(NamedTuple):
    """What the shapes of a call decide. No tiles where the mask comes as bounds, for a counter decides then."""

    launch: Launch
    num_programs: int
    tiles: Tensor | None
    any_masked: bool


# Never forgotten, because a captured CUDA graph may hold a table's address. Four bytes a tile: 17 KB at 32k tokens and
# 16 heads, 1 MB at 1M and 32, which the host deals out in 20 ms and in a second. Lengths that change with every call
# pay for that each time.
@functools.cache
def _plan(
    intervals: Intervals | None, batch: int, q_len: int, kv_len: int, num_q_heads: int, num_kv_heads: int,
    head_dim: int, v_head_dim: int, element_size: int, device: torch.device,
) -> Plan:  # fmt: skip
    """The plan of a call whose mask is `intervals`, or comes as bounds where that is None."""
    launch = launch_of(max(head_dim, v_head_dim), intervals, q_len, kv_len)
    heads = batch * num_q_heads
    num_programs = min(num_sms(device), heads * triton.cdiv(q_len, launch.BLOCK_M))
    if intervals is None:
        return Plan(launch, num_programs, None, any_masked=True)
    heads_in_section = section(kv_len * (head_dim + v_head_dim) * element_size, num_q_heads // num_kv_heads)
    tiles = table(
        intervals, q_len, kv_len, heads, heads_in_section, launch.BLOCK_M, launch.BLOCK_N, num_programs, device
    )
    return Plan(launch, num_programs, tiles, any_masked(intervals, q_len, kv_len, launch.BLOCK_N))


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Sq, Hq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in fp32.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), fp16 or bf16, D and Dv at most 128.
    """
    batch, q_len, num_q_heads, head_dim = q.shape
    kv_len, num_kv_heads, v_head_dim = v.shape[1:]
    out = q.new_empty(batch, q_len, num_q_heads, v_head_dim)
    lse = q.new_empty(batch, num_q_heads, q_len, dtype=torch.float32)
    if kv_len == 0 or out.numel() == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = addressable(q), addressable(k), addressable(v)
    plan = _plan(
        intervals if intervals.bounds is None else None, batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim,
        v_head_dim, q.element_size(), q.device,
    )  # fmt: skip
    order = counter(q.device) if plan.tiles is None else plan.tiles
    _fwd_kernel[(plan.num_programs,)](
        view(q, ROWS.value), view(k, plan.launch.BLOCK_N), view(v, plan.launch.BLOCK_N), view(out, ROWS.value),
        lse, order, **score_units(scale, softcap),
        q_len=q_len, kv_len=kv_len, all_heads=batch * num_q_heads, num_q_heads=num_q_heads,
        group_size=num_q_heads // num_kv_heads,
        **mask_arguments(intervals, q_len, kv_len), ANY_MASKED=plan.any_masked, **vars(plan.launch), num_warps=4,
    )  # fmt: skip
    return out, lse
