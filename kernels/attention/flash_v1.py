"""FlashAttention's first algorithm as published, for study: keys in the outer loop, queries in the inner.

A program has a batch row and a head. It keeps a block of keys on chip while all queries that see it pass by, and the
output, the row maximum m and the row sum l travel through HBM in every step. flash_v2 turns the loops around, which
keeps those on chip and cuts a head into many programs. Names are the paper's: j counts blocks of keys, i of queries;
BLOCK_N is B_c, BLOCK_M is B_r. As in flash_v2, the mask comes from geometry.py and its limits from limits.py.

What a program writes to HBM it reads again in the next turn of the outer loop, maybe by another thread, and Triton
orders no store before another thread's load: hence a barrier. Within a step Triton's own do: what threads share of a
row goes through shared memory, in the row's maximum or a change of layout, after its loads and before its stores.

Source: FlashAttention (arXiv:2205.14135), algorithms 1, 2 and 4, without dropout.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geometry import block_ranges, inside, key_bounds, mask_arguments, query_bounds
from .intervals import Intervals
from .online_softmax import softmax_merge
from .tiles import block_sizes
from .views import VARYING, addressable, load_tile, padded_head_dim, store_tile, view

NUM_WARPS = 8


@triton.jit
def _queries_of(j, b, q_len, kv_len, left, right, bounds, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The queries [start, stop) of whole blocks that see something of the keys from j."""
    mask = (b, q_len, kv_len, left, right, bounds)
    last = min(j + BLOCK_N, kv_len) - 1
    begin, _, _, end = block_ranges(*query_bounds(j, *mask), *query_bounds(last, *mask), BLOCK_M)
    return begin * BLOCK_M, end * BLOCK_M


@triton.jit
def _visible(i_M, j_N, b, q_len, kv_len, left, right, bounds):
    """Whether queries see keys; none sees a key past the last."""
    lo_M, hi_M = key_bounds(i_M, b, q_len, kv_len, left, right, bounds)
    return inside(j_N[None, :], lo_M[:, None], hi_M[:, None])


@triton.jit(do_not_specialize=VARYING)
def _fwd_kernel(
    q, k, v, out, l_ptr, m_ptr, scale, q_len, kv_len, num_q_heads, group_size, left, right, bounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 with the scale and the mask of algorithm 2. Grid (batch * heads,)."""
    b = tl.program_id(0) // num_q_heads
    h = tl.program_id(0) % num_q_heads
    mask = (b, q_len, kv_len, left, right, bounds)
    l_ptr += tl.program_id(0).to(tl.int64) * q_len
    m_ptr += tl.program_id(0).to(tl.int64) * q_len
    for j in range(0, kv_len, BLOCK_N):
        j_N = j + tl.arange(0, BLOCK_N)
        k_ND = load_tile(k, b, h // group_size, j, BLOCK_N, BLOCK_D, True)
        v_ND = load_tile(v, b, h // group_size, j, BLOCK_N, BLOCK_DV, True)
        start, stop = _queries_of(j, *mask, BLOCK_M, BLOCK_N)
        for i in range(start, stop, BLOCK_M):
            i_M = i + tl.arange(0, BLOCK_M)
            q_MD = load_tile(q, b, h, i, BLOCK_M, BLOCK_D, True)
            out_MD = load_tile(out, b, h, i, BLOCK_M, BLOCK_DV, True)
            l_M = tl.load(l_ptr + i_M, mask=i_M < q_len, other=0.0)
            m_M = tl.load(m_ptr + i_M, mask=i_M < q_len, other=0.0)

            # The softmax of this block alone.
            s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale
            s_MN = tl.where(_visible(i_M, j_N, *mask), s_MN, float("-inf"))
            m_block_M = tl.max(s_MN, 1)
            shift_M = tl.where(m_block_M == float("-inf"), 0.0, m_block_M)
            p_MN = tl.exp(s_MN - shift_M[:, None])
            l_block_M = tl.sum(p_MN, 1)

            # Joined with all blocks before it.
            m_new_M, l_new_M, old_M, block_M = softmax_merge(m_M, l_M, m_block_M, l_block_M)
            pv_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, input_precision="ieee")
            divisor_M = tl.where(l_new_M == 0.0, 1.0, l_new_M)
            out_MD = ((l_M * old_M)[:, None] * out_MD + block_M[:, None] * pv_MD) / divisor_M[:, None]
            store_tile(out, out_MD, b, h, i, BLOCK_M, BLOCK_DV)
            tl.store(l_ptr + i_M, l_new_M, mask=i_M < q_len)
            tl.store(m_ptr + i_M, m_new_M, mask=i_M < q_len)
        tl.debug_barrier()


@triton.jit(do_not_specialize=VARYING)
def _bwd_kernel(
    q, k, v, out, dout, dq, dk, dv, lse_ptr, dlse_ptr, scale,
    q_len, kv_len, num_kv_heads, group_size, left, right, bounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Algorithm 4, with l and m as one number, the LSE. Grid (batch * KV heads,).

    The query heads of a group go one after the other through the block of keys that they share. dK and dV are made
    transposed: only loaded operands of a product are, never an accumulator (NOTES.md, backward).
    """
    b = tl.program_id(0) // num_kv_heads
    h_kv = tl.program_id(0) % num_kv_heads
    mask = (b, q_len, kv_len, left, right, bounds)
    for j in range(0, kv_len, BLOCK_N):
        j_N = j + tl.arange(0, BLOCK_N)
        k_ND = load_tile(k, b, h_kv, j, BLOCK_N, BLOCK_D, True)
        v_ND = load_tile(v, b, h_kv, j, BLOCK_N, BLOCK_DV, True)
        dk_DN = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)
        dv_DN = tl.zeros([BLOCK_DV, BLOCK_N], tl.float32)
        start, stop = _queries_of(j, *mask, BLOCK_M, BLOCK_N)
        for member in range(group_size):
            h = h_kv * group_size + member
            row = (tl.program_id(0).to(tl.int64) * group_size + member) * q_len
            for i in range(start, stop, BLOCK_M):
                i_M = i + tl.arange(0, BLOCK_M)
                q_MD = load_tile(q, b, h, i, BLOCK_M, BLOCK_D, True)
                out_MD = load_tile(out, b, h, i, BLOCK_M, BLOCK_DV, True)
                dout_MD = load_tile(dout, b, h, i, BLOCK_M, BLOCK_DV, True)
                lse_M = tl.load(lse_ptr + row + i_M, mask=i_M < q_len, other=0.0)
                dlse_M = tl.load(dlse_ptr + row + i_M, mask=i_M < q_len, other=0.0)

                s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale
                p_MN = tl.exp(s_MN - lse_M[:, None])
                p_MN = tl.where(_visible(i_M, j_N, *mask), p_MN, 0.0)
                dv_DN = tl.dot(dout_MD.T, p_MN.to(dout_MD.dtype), dv_DN, input_precision="ieee")
                dp_MN = tl.dot(dout_MD, v_ND.T, input_precision="ieee")
                # D_i of the paper; 0 in rows that saw no key, whatever their LSE's gradient.
                delta_M = tl.sum(dout_MD.to(tl.float32) * out_MD.to(tl.float32), 1) - dlse_M
                delta_M = tl.where(lse_M == float("-inf"), 0.0, delta_M)
                ds_MN = (p_MN * (dp_MN - delta_M[:, None])).to(q_MD.dtype)
                dq_MD = load_tile(dq, b, h, i, BLOCK_M, BLOCK_D, True)
                dq_MD += tl.dot(ds_MN, k_ND, input_precision="ieee") * scale
                store_tile(dq, dq_MD, b, h, i, BLOCK_M, BLOCK_D)
                dk_DN = tl.dot(q_MD.T, ds_MN, dk_DN, input_precision="ieee")
        store_tile(dk, (dk_DN * scale).T, b, h_kv, j, BLOCK_N, BLOCK_D)
        store_tile(dv, dv_DN.T, b, h_kv, j, BLOCK_N, BLOCK_DV)
        tl.debug_barrier()


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, sram_elements: int
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Sq, Hq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in fp32."""
    batch, q_len, num_q_heads, _ = q.shape
    kv_len, num_kv_heads, v_head_dim = v.shape[1:]
    # fp32 while it accumulates: rounded in every step, it would lose what 16 bits lose as often as there are blocks.
    out = q.new_zeros(batch, q_len, num_q_heads, v_head_dim, dtype=torch.float32)
    l_BHS = q.new_zeros(batch, num_q_heads, q_len, dtype=torch.float32)
    m_BHS = torch.full_like(l_BHS, -math.inf)
    if kv_len > 0 and out.numel() > 0:
        inputs = _views(*map(addressable, (q, k, v)))
        launch = _launch(q, v, intervals, sram_elements)
        _fwd_kernel[(batch * num_q_heads,)](
            *inputs, *_views(out), l_BHS, m_BHS, scale, num_q_heads=num_q_heads, **launch
        )
    return out.to(q.dtype), m_BHS + l_BHS.log()


def backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, intervals: Intervals, scale: float, sram_elements: int,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, like q, k and v, those that are not None; one kernel makes all three.

    out and lse are the forward's, dlse is the gradient of the natural-log LSE (B, Hq, Sq).
    """
    dq_sum = q.new_zeros(q.shape, dtype=torch.float32) if dq is None or dq.dtype != torch.float32 else dq.zero_()
    dk, dv = (x.new_zeros(x.shape) if dx is None else dx.zero_() for x, dx in ((k, dk), (v, dv)))
    if k.shape[1] > 0 and out.numel() > 0:
        batch, _, num_kv_heads, _ = k.shape
        inputs = _views(*map(addressable, (q, k, v, out, dout)))
        launch = _launch(q, v, intervals, sram_elements)
        _bwd_kernel[(batch * num_kv_heads,)](
            *inputs, *_views(dq_sum, dk, dv), lse, dlse.contiguous(), scale, num_kv_heads=num_kv_heads, **launch
        )
    if dq is not None and dq is not dq_sum:
        dq.copy_(dq_sum)


def _views(*tensors: Tensor) -> list[tuple]:
    return [view(x, rows=1, use_tma=False) for x in tensors]


def _launch(q: Tensor, v: Tensor, intervals: Intervals, sram_elements: int) -> dict[str, object]:
    """What both kernels are launched with, by name."""
    q_len, kv_len = q.shape[1], v.shape[1]
    BLOCK_D, BLOCK_DV = padded_head_dim(q), padded_head_dim(v)
    BLOCK_M, BLOCK_N = block_sizes(sram_elements, max(BLOCK_D, BLOCK_DV))
    return dict(
        q_len=q_len, kv_len=kv_len, group_size=q.shape[2] // v.shape[2], **mask_arguments(intervals, q_len, kv_len),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip
