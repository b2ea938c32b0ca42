"""The backward kernels and their launches: delta, then dK and dV by key tile, then dQ by query tile.

Seven matrix products where five would do, so that no two programs write the same element: no atomics, the
same bits every run. For dK and dV the scores are computed as S^T = K Q^T, so no accumulator is ever
transposed. dS stays in units of P * dP, which fp16 holds; the softmax scale is applied in fp32 at the end.
Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2. NOTES.md has the derivation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import block_of_step, block_ranges, inside, key_bounds, mask_arguments, query_bounds, steps
from ..intervals import Intervals
from ..online_softmax import LOG2_E
from ..softcap import cap_gradient, cap_scores, score_units
from ..tiles import Tiles
from ..views import VARYING, addressable, load_tile, padded_head_dim, store_tile, view
from .programs import key_tile, query_tile

DELTA_ROWS = 64


@triton.jit
def _load_rows(ptr, i_M, q_len, CLIP: tl.constexpr):
    """Loads one number per query row; 0, which keeps all that follows finite, beyond the last row."""
    return tl.load(ptr + i_M, mask=i_M < q_len, other=0.0) if CLIP else tl.load(ptr + i_M)


@triton.jit(do_not_specialize=VARYING)
def _bwd_delta_kernel(
    out, dout, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, q_len, num_q_heads,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dLSE, 0 in rows that saw no key; lse2 is the LSE to base 2.

    Grid (batch * heads * row blocks,).
    """
    b, h, _, batch_head, first = query_tile(q_len, num_q_heads, 1, BLOCK_M)
    out_MD = load_tile(out, b, h, first, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    dout_MD = load_tile(dout, b, h, first, BLOCK_M, BLOCK_DV, True).to(tl.float32)

    i_M = first + tl.arange(0, BLOCK_M)
    row = batch_head * q_len
    lse_M = _load_rows(lse_ptr + row, i_M, q_len, True)
    dlse_M = _load_rows(dlse_ptr + row, i_M, q_len, True)
    delta_M = tl.where(lse_M == float("-inf"), 0.0, tl.sum(out_MD * dout_MD, 1) - dlse_M)
    tl.store(delta_ptr + row + i_M, delta_M, mask=i_M < q_len)
    tl.store(lse2_ptr + row + i_M, lse_M * LOG2_E, mask=i_M < q_len)


@triton.jit
def _add_queries(
    dk_ND, dv_ND, k_ND, v_ND, q, dout, lse2_ptr, delta_ptr, q_len, b, h, lo_N, hi_N, blocks, scale_log2e, cap,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Adds to a key tile's dK and dV what a head's query blocks give: those that need a mask, or the free."""
    start, stop = steps(blocks, MASKED)
    for step in range(start, stop):
        i = block_of_step(step, blocks, MASKED) * BLOCK_M
        i_M = i + tl.arange(0, BLOCK_M)
        q_MD = load_tile(q, b, h, i, BLOCK_M, BLOCK_D, MASKED)
        dout_MD = load_tile(dout, b, h, i, BLOCK_M, BLOCK_DV, MASKED)
        lse2_M = _load_rows(lse2_ptr, i_M, q_len, MASKED)
        s_NM = cap_scores(tl.dot(k_ND, q_MD.T, input_precision="ieee"), cap)
        p_NM = tl.exp2(s_NM * scale_log2e - lse2_M[None, :])
        if MASKED:
            p_NM = tl.where(inside(i_M[None, :], lo_N[:, None], hi_N[:, None]), p_NM, 0.0)
        dv_ND = tl.dot(p_NM.to(dout_MD.dtype), dout_MD, dv_ND, input_precision="ieee")
        dp_NM = tl.dot(v_ND, dout_MD.T, input_precision="ieee")
        delta_M = _load_rows(delta_ptr, i_M, q_len, MASKED)
        ds_NM = cap_gradient(p_NM * (dp_NM - delta_M[None, :]), s_NM, cap)
        dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=VARYING)
def _bwd_dkdv_kernel(
    q, k, v, dout, dk, dv, lse2_ptr, delta_ptr, scale, scale_log2e, cap,
    q_len, kv_len, num_kv_heads, group_size, left, right, bounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes one tile of dk and dv, summed over the query heads of its group in fp32 and in order.

    Grid (batch * key heads * key tiles,).
    """
    b, h_kv, batch_head, first = key_tile(kv_len, num_kv_heads, BLOCK_N)
    mask = (b, q_len, kv_len, left, right, bounds)
    last = min(first + BLOCK_N, kv_len) - 1
    blocks = block_ranges(*query_bounds(first, *mask), *query_bounds(last, *mask), BLOCK_M)

    lo_N, hi_N = query_bounds(first + tl.arange(0, BLOCK_N), *mask)
    k_ND = load_tile(k, b, h_kv, first, BLOCK_N, BLOCK_D, True)
    v_ND = load_tile(v, b, h_kv, first, BLOCK_N, BLOCK_DV, True)
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(group_size):
        h = h_kv * group_size + member
        row = (batch_head * group_size + member) * q_len
        for turn in tl.static_range(2):
            dk_ND, dv_ND = _add_queries(
                dk_ND, dv_ND, k_ND, v_ND, q, dout, lse2_ptr + row, delta_ptr + row, q_len, b, h, lo_N, hi_N, blocks,
                scale_log2e, cap, turn != MASKED_FIRST, BLOCK_M, BLOCK_D, BLOCK_DV,
            )  # fmt: skip

    store_tile(dk, dk_ND * scale, b, h_kv, first, BLOCK_N, BLOCK_D)
    store_tile(dv, dv_ND, b, h_kv, first, BLOCK_N, BLOCK_DV)


@triton.jit
def _add_keys(
    dq_MD, q_MD, dout_MD, lse2_M, delta_M, k, v, b, h_kv, lo_M, hi_M, blocks, scale_log2e, cap,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Adds to a query tile's dQ what key blocks give: those that need a mask, or the free."""
    start, stop = steps(blocks, MASKED)
    for step in range(start, stop):
        j = block_of_step(step, blocks, MASKED) * BLOCK_N
        k_ND = load_tile(k, b, h_kv, j, BLOCK_N, BLOCK_D, MASKED)
        v_ND = load_tile(v, b, h_kv, j, BLOCK_N, BLOCK_DV, MASKED)
        s_MN = cap_scores(tl.dot(q_MD, k_ND.T, input_precision="ieee"), cap)
        p_MN = tl.exp2(s_MN * scale_log2e - lse2_M[:, None])
        if MASKED:
            j_N = j + tl.arange(0, BLOCK_N)
            p_MN = tl.where(inside(j_N[None, :], lo_M[:, None], hi_M[:, None]), p_MN, 0.0)
        dp_MN = tl.dot(dout_MD, v_ND.T, input_precision="ieee")
        ds_MN = cap_gradient(p_MN * (dp_MN - delta_M[:, None]), s_MN, cap)
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")
    return dq_MD


@triton.jit(do_not_specialize=VARYING)
def _bwd_dq_kernel(
    q, k, v, dout, dq, lse2_ptr, delta_ptr, scale, scale_log2e, cap,
    q_len, kv_len, num_q_heads, group_size, left, right, bounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes one tile of dq. Grid (batch * heads * query tiles,)."""
    b, h, h_kv, batch_head, first = query_tile(q_len, num_q_heads, group_size, BLOCK_M)
    mask = (b, q_len, kv_len, left, right, bounds)
    last = min(first + BLOCK_M, q_len) - 1
    blocks = block_ranges(*key_bounds(first, *mask), *key_bounds(last, *mask), BLOCK_N)

    i_M = first + tl.arange(0, BLOCK_M)
    lo_M, hi_M = key_bounds(i_M, *mask)
    row = batch_head * q_len
    lse2_M = _load_rows(lse2_ptr + row, i_M, q_len, True)
    delta_M = _load_rows(delta_ptr + row, i_M, q_len, True)
    q_MD = load_tile(q, b, h, first, BLOCK_M, BLOCK_D, True)
    dout_MD = load_tile(dout, b, h, first, BLOCK_M, BLOCK_DV, True)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for turn in tl.static_range(2):
        dq_MD = _add_keys(
            dq_MD, q_MD, dout_MD, lse2_M, delta_M, k, v, b, h_kv, lo_M, hi_M, blocks, scale_log2e, cap,
            turn != MASKED_FIRST, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    store_tile(dq, dq_MD * scale, b, h, first, BLOCK_M, BLOCK_D)


def backward(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, intervals: Intervals, scale: float, softcap: float, tiles: Tiles,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, addressable, like q, k and v; dq may be None, or dk and dv, where it is not needed.

    out and lse are the forward's, contiguous, dlse is the gradient of the natural-log LSE (B, Hq, Sq).
    """
    batch, q_len, num_q_heads, _ = q.shape
    kv_len, num_kv_heads = k.shape[1:3]
    if kv_len == 0 or out.numel() == 0:
        for x in (dq, dk, dv):
            if x is not None:
                x.zero_()
        return
    dout, q, k, v = addressable(dout), addressable(q), addressable(k), addressable(v)
    BLOCK_D, BLOCK_DV = padded_head_dim(q), padded_head_dim(v)

    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    grid = (batch * num_q_heads * triton.cdiv(q_len, DELTA_ROWS),)
    out_view, dout_view = (view(x, DELTA_ROWS, tiles.use_tma) for x in (out, dout))
    _bwd_delta_kernel[grid](
        out_view, dout_view, lse, dlse.contiguous(), delta, lse2, q_len, num_q_heads,
        BLOCK_M=DELTA_ROWS, BLOCK_DV=BLOCK_DV,
    )  # fmt: skip

    shared = dict(
        lse2_ptr=lse2, delta_ptr=delta, scale=scale, **score_units(scale, softcap),
        q_len=q_len, kv_len=kv_len, group_size=num_q_heads // num_kv_heads,
        **mask_arguments(intervals, q_len, kv_len), BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV,
    )  # fmt: skip
    if dk is not None:
        tile = tiles.dkdv
        q_view, dout_view = (view(x, tile.BLOCK_M, tiles.use_tma) for x in (q, dout))
        k_view, v_view, dk_view, dv_view = (view(x, tile.BLOCK_N, tiles.use_tma) for x in (k, v, dk, dv))
        grid = (batch * num_kv_heads * triton.cdiv(kv_len, tile.BLOCK_N),)
        _bwd_dkdv_kernel[grid](
            q_view, k_view, v_view, dout_view, dk_view, dv_view,
            num_kv_heads=num_kv_heads, **shared, **vars(tile),
        )  # fmt: skip
    if dq is not None:
        tile = tiles.dq
        q_view, dout_view, dq_view = (view(x, tile.BLOCK_M, tiles.use_tma) for x in (q, dout, dq))
        k_view, v_view = (view(x, tile.BLOCK_N, tiles.use_tma) for x in (k, v))
        grid = (batch * num_q_heads * triton.cdiv(q_len, tile.BLOCK_M),)
        _bwd_dq_kernel[grid](
            q_view, k_view, v_view, dout_view, dq_view, num_q_heads=num_q_heads, **shared, **vars(tile)
        )
