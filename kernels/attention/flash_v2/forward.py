"""The forward kernel and its launch: a program per query tile and head loops over the key blocks it sees.

What a problem may look like is stated in limits.py, which blocks to visit in geometry.py, tile sizes in
tiles.py.
Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import any_masked, block_of_step, block_ranges, inside, key_bounds, mask_arguments, steps
from ..intervals import Intervals
from ..online_softmax import softmax_finish, softmax_start, softmax_update
from ..softcap import cap_scores, score_units
from ..tiles import Tiles
from ..views import VARYING, addressable, load_tile, padded_head_dim, store_tile, view
from .programs import query_tile


@triton.jit
def _attend(
    acc_MD, row_max_M, row_sum_M, q_MD, k, v, b, h_kv, lo_M, hi_M, blocks, scale_log2e, cap,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Folds key blocks into output and softmax state: those that need a mask, or the free."""
    start, stop = steps(blocks, MASKED)
    for step in range(start, stop):
        j = block_of_step(step, blocks, MASKED) * BLOCK_N
        k_ND = load_tile(k, b, h_kv, j, BLOCK_N, BLOCK_D, MASKED)
        s_MN = cap_scores(tl.dot(q_MD, k_ND.T, input_precision="ieee"), cap)
        if MASKED:
            j_N = j + tl.arange(0, BLOCK_N)
            s_MN = tl.where(inside(j_N[None, :], lo_M[:, None], hi_M[:, None]), s_MN, float("-inf"))
        p_MN, rescale_M, row_max_M = softmax_update(s_MN, tl.max(s_MN, 1), row_max_M, scale_log2e, MASKED)
        # Before the product, which leaves registers to that.
        gain_M = tl.sum(p_MN, 1)
        v_ND = load_tile(v, b, h_kv, j, BLOCK_N, BLOCK_DV, MASKED)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * rescale_M[:, None], input_precision="ieee")
        row_sum_M = row_sum_M * rescale_M + gain_M
    return acc_MD, row_max_M, row_sum_M


@triton.jit(do_not_specialize=VARYING)
def _fwd_kernel(
    q, k, v, out, lse_ptr, scale_log2e, cap, q_len, kv_len, num_q_heads, group_size, left, right, bounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED_FIRST: tl.constexpr, ANY_MASKED: tl.constexpr,
):  # fmt: skip
    """Writes one tile of out and lse. Grid (batch * heads * query tiles,)."""
    b, h, h_kv, batch_head, first = query_tile(q_len, num_q_heads, group_size, BLOCK_M)
    mask = (b, q_len, kv_len, left, right, bounds)
    last = min(first + BLOCK_M, q_len) - 1
    blocks = block_ranges(*key_bounds(first, *mask), *key_bounds(last, *mask), BLOCK_N)

    i_M = first + tl.arange(0, BLOCK_M)
    lo_M, hi_M = key_bounds(i_M, *mask)
    q_MD = load_tile(q, b, h, first, BLOCK_M, BLOCK_D, True)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max_M, row_sum_M = softmax_start(BLOCK_M)
    for turn in tl.static_range(2):
        if ANY_MASKED or turn == MASKED_FIRST:
            acc_MD, row_max_M, row_sum_M = _attend(
                acc_MD, row_max_M, row_sum_M, q_MD, k, v, b, h_kv, lo_M, hi_M, blocks, scale_log2e, cap,
                turn != MASKED_FIRST, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip

    factor_M, lse_M = softmax_finish(row_max_M, row_sum_M, scale_log2e)
    store_tile(out, acc_MD * factor_M[:, None], b, h, first, BLOCK_M, BLOCK_DV)
    tl.store(lse_ptr + batch_head * q_len + i_M, lse_M, mask=i_M < q_len)


def forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Returns out (B, Sq, Hq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in fp32."""
    batch, q_len, num_q_heads, _ = q.shape
    kv_len, num_kv_heads, v_head_dim = v.shape[1:]
    out = q.new_empty(batch, q_len, num_q_heads, v_head_dim)
    lse = q.new_empty(batch, num_q_heads, q_len, dtype=torch.float32)
    if kv_len == 0 or out.numel() == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = addressable(q), addressable(k), addressable(v)
    tile = tiles.forward
    q_view, out_view = (view(x, tile.BLOCK_M, tiles.use_tma) for x in (q, out))
    k_view, v_view = (view(x, tile.BLOCK_N, tiles.use_tma) for x in (k, v))
    grid = (batch * num_q_heads * triton.cdiv(q_len, tile.BLOCK_M),)
    _fwd_kernel[grid](
        q_view, k_view, v_view, out_view, lse, **score_units(scale, softcap),
        q_len=q_len, kv_len=kv_len, num_q_heads=num_q_heads, group_size=num_q_heads // num_kv_heads,
        **mask_arguments(intervals, q_len, kv_len),
        BLOCK_D=padded_head_dim(q), BLOCK_DV=padded_head_dim(v), **vars(tile),
        ANY_MASKED=any_masked(intervals, q_len, kv_len, tile.BLOCK_N),
    )  # fmt: skip
    return out, lse
