"""The backward kernel for Hopper and its launch: one warp loads, two warpgroups compute, dQ, dK and dV in one pass.

A program has a tile of keys, 64 for each warpgroup, and visits the blocks of queries that see them, of all query heads
of the group: five matrix products a block. S and dP are made as S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T
are operands of dV and dK in the registers where they were made; S starts at -LSE and dP at -delta, in place of
subtractions. dQ alone needs dS in shared memory, and that of the other warpgroup too. It is made a block later, when
both were stored long ago: so neither waits for the other, and they drift apart until one takes exponentials while the
other multiplies. dS stays in units of P * dP, which fp16 holds; the softmax scale is applied in fp32 at the end. dK and
dV have the same bits every run. What a tile gives to dQ is added up in global memory, in fp32: in no fixed order, or,
for the same bits every run, in that from the last tile that sees a block to the first.
Source: FlashAttention-3 (arXiv:2407.08608) and its backward; ThunderKittens (arXiv:2410.20399) for where S starts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..geometry import any_masked, block_of_step, mask_arguments, steps
from ..intervals import Intervals
from ..softcap import cap_gradient, cap_scores, score_units
from ..tiles import num_sms
from ..views import VARYING, addressable
from . import query_rows
from .accumulators import add_piece, next_at, pass_to
from .launch import BACKWARD, ROWS, columns_of, numbers_view, view
from .masks import inside_or
from .pipeline import (
    FIRST_BARRIER,
    fetch,
    fetch_with_numbers,
    give_turn,
    hear,
    make_ring,
    mbarriers,
    meet,
    numbers_at,
    numbers_of,
    release,
    resident,
    say,
    take_turn,
    wait_for,
)
from .products import as_operand, half_of, rows_of, zeros
from .schedule import block_at, key_tile, seen_by

# Warpgroups that compute.
CONSUMERS: gl.constexpr = gl.constexpr(2)

# Named barriers: two turns for each warpgroup, one where both meet, one where both tell who keeps the order, then those
# of the rings.
FIRST_TURN: gl.constexpr = FIRST_BARRIER
BOTH_HERE: gl.constexpr = gl.constexpr(FIRST_TURN.value + 2 * CONSUMERS.value)
ADDED: gl.constexpr = gl.constexpr(BOTH_HERE.value + 1)
RINGS: gl.constexpr = gl.constexpr(ADDED.value + 1)


@gluon.jit
def _load(problem, rings, numbers, inputs, BLOCK_M: gl.constexpr):
    """The loading warp: K and V of the tile, then Q and dO of each block with what its rows start with."""
    num_kv_heads, heads_at_once, group_size, mask, padded_len, scale, scale_log2e, cap = problem
    k_ring, v_ring, q_ring, dout_ring = rings
    s_starts, dp_starts = numbers
    k, v, q, dout, s_start, dp_start = inputs
    b, h_kv, first, blocks = key_tile(num_kv_heads, heads_at_once, mask, CONSUMERS * ROWS, BLOCK_M)
    fetch(k_ring, 0, k, b, h_kv, first, CONSUMERS)
    fetch(v_ring, 0, v, b, h_kv, first, CONSUMERS)
    begin, _, _, end = blocks
    count = 0
    for member in range(group_size):
        h = h_kv * group_size + member
        place = (b * num_kv_heads * group_size + h) * padded_len
        for visit in range(end - begin):
            i = block_at(visit, blocks) * BLOCK_M
            fetch_with_numbers(q_ring, s_starts, count, q, s_start, b, h, i, place + i, CONSUMERS)
            fetch_with_numbers(dout_ring, dp_starts, count, dout, dp_start, b, h, i, place + i, CONSUMERS)
            count += 1


@gluon.jit
def _turn(n):
    """First of the named barriers at which a warpgroup lets the other store dS of use n and read that of use n - 1.

    It has then stored the latter and read that of use n - 2, in whose place n is stored. Two sets, since a warpgroup
    may be a use ahead.
    """
    return FIRST_TURN + n % 2 * CONSUMERS


@gluon.jit
def _dq_of(n, k_ring, ds_buffers, CONSUMER: gl.constexpr, BY_ROWS: gl.constexpr):
    """Issues this warpgroup's half of use n's dQ = dS K, over the tile's keys: half of the rows, or of the columns."""
    dq_MD = zeros(ROWS)
    for part in gl.static_range(CONSUMERS):
        ds_NM, k_ND = ds_buffers.index(n % 2 * CONSUMERS + part), resident(k_ring, part)
        if BY_ROWS:
            ds_NM = half_of(ds_NM, CONSUMER)
        else:
            k_ND = half_of(k_ND, CONSUMER)
        dq_MD = warpgroup_mma(ds_NM.permute((1, 0)), k_ND, dq_MD, use_acc=part > 0, is_async=True)
    return dq_MD


@gluon.jit
def _add_dq(n, dq_MD, dq, place, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr):
    """Adds this warpgroup's half of use n's dQ to the sum of the rows from `place` on, in order or at once."""
    dq_sum, dq_next, may_add = dq
    if dq_next is not None:
        mbarrier.wait(may_add, n & 1)
    add_piece(dq_sum, place // BLOCK_M * CONSUMERS + CONSUMER, dq_MD)
    if dq_next is not None:
        say(ADDED, CONSUMERS)


@gluon.jit
def _keep_order(problem, dq, BLOCK_M: gl.constexpr):
    """The warp that waits until the tile is the next to add to a block's dQ, lets the warpgroups add, and makes the
    tile before it the next; idle where there is no order.

    It looks who is next at the following block while they add, so as to be back before they want to add again.
    """
    num_kv_heads, heads_at_once, group_size, mask, padded_len, scale, scale_log2e, cap = problem
    dq_sum, dq_next, may_add = dq
    if dq_next is not None:
        b, h_kv, first, blocks = key_tile(num_kv_heads, heads_at_once, mask, CONSUMERS * ROWS, BLOCK_M)
        tile = first // (CONSUMERS * ROWS)
        begin, _, _, end = blocks
        uses = group_size * (end - begin)
        first_head = (b * num_kv_heads + h_kv) * group_size
        next_ptr, next_tile = _next_of(0, dq_next, first_head, padded_len // BLOCK_M, blocks), tile + 1
        for n in range(uses):
            while next_tile != tile:
                next_tile = next_at(next_ptr)
            mbarrier.arrive(may_add)
            ptr_after = _next_of(tl.minimum(n + 1, uses - 1), dq_next, first_head, padded_len // BLOCK_M, blocks)
            next_tile = next_at(ptr_after)
            hear(ADDED, CONSUMERS)
            pass_to(next_ptr, tile - 1)
            next_ptr = ptr_after


@gluon.jit
def _next_of(n, dq_next, first_head, blocks_of_head, blocks):
    """Where it says which tile is the next to add to the block of use n."""
    begin, _, _, end = blocks
    visits = tl.maximum(end - begin, 1)
    return dq_next + ((first_head + n // visits) * blocks_of_head + block_at(n % visits, blocks))


@gluon.jit
def _add_queries(
    state, problem, rings, numbers, ds_buffers, dq, head_place, blocks, lo_N, hi_N,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Adds to dK and dV what a head's query blocks give, those that need a mask, or the free, and to dQ what the block
    before each gives."""
    num_kv_heads, heads_at_once, group_size, mask, padded_len, scale, scale_log2e, cap = problem
    k_ring, v_ring, q_ring, dout_ring = rings
    s_starts, dp_starts = numbers
    dk_ND, dv_ND, place_before, count = state
    dtype: gl.constexpr = ds_buffers.dtype
    BY_ROWS: gl.constexpr = BLOCK_M == CONSUMERS * ROWS
    QUERIES: gl.constexpr = gl.SliceLayout(0, zeros(BLOCK_M).type.layout)
    start, stop = steps(blocks, MASKED)
    for step in range(start, stop):
        i = block_of_step(step, blocks, MASKED) * BLOCK_M
        q_MD, dout_MD = wait_for(q_ring, count), wait_for(dout_ring, count)
        s_start_M = numbers_at(q_ring, s_starts, count, QUERIES)
        s_NM = rows_of(s_start_M) if cap is None else zeros(BLOCK_M)
        dp_NM = rows_of(numbers_at(dout_ring, dp_starts, count, QUERIES))
        k_ND, v_ND = resident(k_ring, CONSUMER, True), resident(v_ring, CONSUMER, True)
        s_NM = warpgroup_mma(k_ND, q_MD.permute((1, 0)), s_NM, use_acc=cap is None, is_async=True)
        dp_NM = warpgroup_mma(v_ND, dout_MD.permute((1, 0)), dp_NM, is_async=True)

        s_NM = cap_scores(warpgroup_mma_wait(1, (s_NM,)), cap)
        bits_NM = s_NM * scale_log2e
        p_NM = gl.exp2(bits_NM if cap is None else bits_NM + s_start_M[None, :])
        if MASKED:
            p_NM = inside_or(p_NM, lo_N - i, hi_N - i, 0.0)
        p_operand = as_operand(p_NM, dv_ND, dtype)
        dv_ND = warpgroup_mma(p_operand, dout_MD, dv_ND, is_async=True)

        # dS = P dP, times the derivative of the cap: P takes that first, so that the scores need not wait for dP.
        p_NM = cap_gradient(p_NM, s_NM, cap)
        ds_NM = (p_NM * warpgroup_mma_wait(1, (dp_NM,))).to(dtype)
        take_turn(_turn(count), CONSUMER)
        ds_buffers.index(count % 2 * CONSUMERS + CONSUMER).store(ds_NM)
        fence_async_shared()
        ds_operand = as_operand(ds_NM, dk_ND, dtype)
        # Before the first block there is none: what this makes then is not added.
        dq_MD = _dq_of(count + 1, k_ring, ds_buffers, CONSUMER, BY_ROWS)
        dk_ND = warpgroup_mma(ds_operand, q_MD, dk_ND, is_async=True)

        # P and dS are named too: their registers are read until now.
        dv_ND = warpgroup_mma_wait(CONSUMERS + 1, (dv_ND, p_operand))[0]
        release(dout_ring, count, CONSUMERS)
        dq_MD = warpgroup_mma_wait(1, (dq_MD,))
        give_turn(_turn(count + 1), CONSUMER, CONSUMERS)
        if count > 0:
            _add_dq(count - 1, dq_MD, dq, place_before, CONSUMER, BLOCK_M)
        dk_ND = warpgroup_mma_wait(0, (dk_ND, ds_operand))[0]
        release(q_ring, count, CONSUMERS)
        place_before = head_place + i
        count += 1
    return dk_ND, dv_ND, place_before, count


@gluon.jit
def _compute(
    problem, rings, numbers, ds_buffers, outputs,
    CONSUMER: gl.constexpr, ANY_MASKED: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dK and dV of its 64 keys, summed over the group in fp32, and what the tile gives to dQ."""
    num_kv_heads, heads_at_once, group_size, mask, padded_len, scale, scale_log2e, cap = problem
    k_ring, v_ring, q_ring, dout_ring = rings
    dk, dv, dq = outputs
    KEYS: gl.constexpr = gl.SliceLayout(1, zeros(BLOCK_M).type.layout)
    b, h_kv, tile_first, blocks = key_tile(num_kv_heads, heads_at_once, mask, CONSUMERS * ROWS, BLOCK_M)
    first = tile_first + CONSUMER * ROWS
    lo_N, hi_N = seen_by(first + gl.arange(0, ROWS, KEYS), b, *mask)
    give_turn(_turn(0), CONSUMER, CONSUMERS)
    state = (zeros(dk.block_shape[3]), zeros(dv.block_shape[3]), 0, 0)
    k_ND, v_ND = wait_for(k_ring, 0, CONSUMER), wait_for(v_ring, 0, CONSUMER)
    for member in range(group_size):
        head_place = (b * num_kv_heads * group_size + h_kv * group_size + member) * padded_len
        if ANY_MASKED:
            state = _add_queries(
                state, problem, rings, numbers, ds_buffers, dq, head_place, blocks, lo_N, hi_N,
                True, CONSUMER, BLOCK_M,
            )  # fmt: skip
        state = _add_queries(
            state, problem, rings, numbers, ds_buffers, dq, head_place, blocks, lo_N, hi_N,
            False, CONSUMER, BLOCK_M,
        )  # fmt: skip

    dk_ND, dv_ND, place, count = state
    take_turn(_turn(count), CONSUMER)
    if count > 0:
        BY_ROWS: gl.constexpr = BLOCK_M == CONSUMERS * ROWS
        dq_MD = _dq_of(count + 1, k_ring, ds_buffers, CONSUMER, BY_ROWS)
        _add_dq(count - 1, warpgroup_mma_wait(0, (dq_MD,)), dq, place, CONSUMER, BLOCK_M)
    # Until here the other warpgroup may read this one's keys for dQ.
    meet(BOTH_HERE, CONSUMERS)
    k_ND.store((dk_ND * scale).to(dk.dtype))
    v_ND.store(dv_ND.to(dv.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk, [b, h_kv, first, 0], k_ring[0].index(CONSUMER))
    tma.async_copy_shared_to_global(dv, [b, h_kv, first, 0], v_ring[0].index(CONSUMER))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*VARYING, "heads_at_once"))
def _bwd_kernel(
    k, v, q, dout, s_start, dp_start, dk, dv, dq_sum, dq_next, scale, scale_log2e, cap,
    q_len, kv_len, num_kv_heads, heads_at_once, group_size, padded_len, left, right, bounds,
    BLOCK_M: gl.constexpr, SLOTS: gl.constexpr, NAMED: gl.constexpr, REGISTERS: gl.constexpr,
    ANY_MASKED: gl.constexpr,
):  # fmt: skip
    """Writes one tile of dk and dv, and adds to dq_sum; where dq_next says which tile is next to, in that order.

    Grid (batch * KV heads * key tiles,). With an order it ends only if programs start in that of their numbers, as on
    every GPU so far.
    """
    k_ring = make_ring(k, 1, CONSUMERS, CONSUMERS, None)
    v_ring = make_ring(v, 1, CONSUMERS, CONSUMERS, None)
    q_ring = make_ring(q, SLOTS, 1, CONSUMERS, RINGS if NAMED else None)
    dout_ring = make_ring(dout, SLOTS, 1, CONSUMERS, RINGS + SLOTS if NAMED else None)
    rings = (k_ring, v_ring, q_ring, dout_ring)
    numbers = (numbers_of(s_start, SLOTS), numbers_of(dp_start, SLOTS))
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], k.dtype)
    ds_buffers = gl.allocate_shared_memory(k.dtype, [2 * CONSUMERS, ROWS, BLOCK_M], DS_LAYOUT)
    fence_async_shared()
    mask = (q_len, kv_len, left, right, bounds)
    problem = (num_kv_heads, heads_at_once, group_size, mask, padded_len, scale, scale_log2e, cap)
    inputs = (k, v, q, dout, s_start, dp_start)
    dq = (dq_sum, dq_next, mbarriers(1, 1).index(0))
    outputs = (dk, dv, dq)
    gl.warp_specialize(
        [
            (_compute, (problem, rings, numbers, ds_buffers, outputs, 0, ANY_MASKED, BLOCK_M)),
            (_compute, (problem, rings, numbers, ds_buffers, outputs, 1, ANY_MASKED, BLOCK_M)),
            (_load, (problem, rings, numbers, inputs, BLOCK_M)),
            (_keep_order, (problem, dq, BLOCK_M)),
        ],
        [4, 1, 1],
        REGISTERS,
    )


def can_keep_order(intervals: Intervals, q_len: int, kv_len: int) -> bool:
    """Whether tiles can add to dQ in order, and as a rule none waits for the end of another.

    Where a mask ends to the left each would: a tile visits first what it sees in part, so the block there too, to which
    those behind it add in the end.
    """
    return intervals.bounds is None and intervals.at(q_len, kv_len).left is None


def _heads_at_once(device: torch.device, tiles: int) -> int:
    """As many heads by turns as have all their tiles on the device at once, or one: programs that start one after the
    other are then of different heads, where those of one would each wait for the one before."""
    return max(num_sms(device) // tiles, 1)


def backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, intervals: Intervals, scale: float, softcap: float, in_order: bool = False,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, addressable, like q, k and v, those that are not None; one kernel makes all three.

    out and lse are the forward's, contiguous, dlse is the gradient of the natural-log LSE (B, Hq, Sq). With `in_order`,
    under masks that `can_keep_order`, all have the same bits every run.
    """
    assert not in_order or can_keep_order(intervals, q.shape[1], k.shape[1]), "no order is kept under this mask"
    dq, dk, dv = (x.new_empty(x.shape) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
    if k.shape[1] == 0 or out.numel() == 0:
        for x in (dq, dk, dv):
            x.zero_()
    else:
        _launch(dq, dk, dv, dout, dlse, q, k, v, out, lse, intervals, scale, softcap, in_order)


def _launch(
    dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, intervals: Intervals, scale: float, softcap: float, in_order: bool,
) -> None:  # fmt: skip
    batch, q_len, num_q_heads, head_dim = q.shape
    kv_len, num_kv_heads = k.shape[1:3]
    dout, q, k, v = addressable(dout), addressable(q), addressable(k), addressable(v)
    # Of Q and K as many as of V, at least, so that half of dQ is whole where a launch is for 128.
    columns = max(columns_of(q), columns_of(v))
    launch = BACKWARD[columns]
    keys = CONSUMERS.value * ROWS.value
    tiles = triton.cdiv(kv_len, keys)
    units = score_units(scale, softcap)
    mask = mask_arguments(intervals, q_len, kv_len)
    s_start, dp_start, dq_sum, dq_next = query_rows.start(
        out, dout, lse, dlse.contiguous(), columns, launch.BLOCK_M, keys, kv_len, mask, **units, in_order=in_order
    )
    _bwd_kernel[(batch * num_kv_heads * tiles,)](
        view(k, ROWS.value, columns), view(v, ROWS.value),
        view(q, launch.BLOCK_M, columns), view(dout, launch.BLOCK_M),
        *(numbers_view(x, launch.BLOCK_M) for x in (s_start, dp_start)),
        view(dk, ROWS.value, columns), view(dv, ROWS.value),
        dq_sum, dq_next,
        scale, **units, q_len=q_len, kv_len=kv_len, num_kv_heads=num_kv_heads,
        heads_at_once=_heads_at_once(k.device, tiles) if in_order else None,
        group_size=num_q_heads // num_kv_heads, padded_len=s_start.shape[-1],
        **mask,
        ANY_MASKED=any_masked(intervals, q_len, kv_len, keys) or (not in_order and q_len % launch.BLOCK_M != 0),
        **vars(launch), num_warps=4,
    )  # fmt: skip
    query_rows.finish(dq_sum, dq, columns, scale)
