"""What the backward needs of every row of queries before its kernel runs, and makes of it behind: plain Triton.

Before: the numbers that accumulators start with, zeros where dQ is summed, and who adds first. Behind: dQ, scaled and
rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..online_softmax import LOG2_E
from ..views import VARYING, load_tile, padded_head_dim, store_tile, view
from .accumulators import SIDE, load_pieces
from .schedule import last_key_tile


@triton.jit
def _block_of_rows(q_len, num_q_heads, BLOCK_M: tl.constexpr):
    """Batch row, head, their place (batch and head), and the program's first query."""
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    batch_head = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_M
    return batch_head // num_q_heads, batch_head % num_q_heads, batch_head.to(tl.int64), first


@triton.jit(do_not_specialize=VARYING)
def _bwd_start_kernel(
    out, dout, lse_ptr, dlse_ptr, dq_sum_ptr, next_ptr, s_start_ptr, dp_start_ptr, units, q_len, kv_len, left, right,
    padded_len, num_q_heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Where S and dP start: -LSE in units that are so many to a natural one, and -delta = dLSE - rowsum(dO * O).

    -inf and 0 in rows that saw no key and in those behind the last. The sum of dQ is zeroed; where tiles of BLOCK_N
    keys add to it in order, the last that the block sees is the first. Grid (batch * heads * blocks,).
    """
    b, h, batch_head, first = _block_of_rows(q_len, num_q_heads, BLOCK_M)
    out_MD = load_tile(out, b, h, first, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    dout_MD = load_tile(dout, b, h, first, BLOCK_M, BLOCK_DV, True).to(tl.float32)
    i_M = first + tl.arange(0, BLOCK_M)
    row = batch_head * q_len
    lse_M = tl.load(lse_ptr + row + i_M, mask=i_M < q_len, other=float("-inf"))
    dlse_M = tl.load(dlse_ptr + row + i_M, mask=i_M < q_len, other=0.0)
    is_empty_M = lse_M == float("-inf")
    place = batch_head * padded_len
    tl.store(s_start_ptr + place + i_M, tl.where(is_empty_M, float("-inf"), -lse_M * units))
    tl.store(dp_start_ptr + place + i_M, tl.where(is_empty_M, 0.0, dlse_M - tl.sum(out_MD * dout_MD, 1)))
    sum_ptr = dq_sum_ptr + (place + first) * COLUMNS
    tl.store(sum_ptr + tl.arange(0, BLOCK_M * COLUMNS), tl.zeros([BLOCK_M * COLUMNS], tl.float32))
    if next_ptr is not None:
        last_query = tl.minimum(first + BLOCK_M, q_len) - 1
        last_tile = last_key_tile(last_query, q_len, kv_len, left, right, BLOCK_N)
        tl.store(next_ptr + (place + first) // BLOCK_M, last_tile)


@triton.jit(do_not_specialize=VARYING)
def _bwd_dq_kernel(dq_sum_ptr, dq, scale, q_len, padded_len, num_q_heads, COLUMNS: tl.constexpr):
    """Writes dq, the scaled sum. Grid (batch * heads * blocks,)."""
    b, h, batch_head, first = _block_of_rows(q_len, num_q_heads, SIDE)
    dq_MD = load_pieces(dq_sum_ptr, (batch_head * padded_len + first) // SIDE * (COLUMNS // SIDE), COLUMNS)
    store_tile(dq, dq_MD * scale, b, h, first, SIDE, COLUMNS)


def start(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor, columns: int, BLOCK_M: int, BLOCK_N: int,
    kv_len: int, mask: dict[str, int | tuple | None], scale_log2e: float, cap: float | None, in_order: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns what S and dP start with, (B, Hq, Sq rounded up to BLOCK_M) in fp32, zeros for dQ's sum, who adds first.

    Scores start at -LSE in the units in which they are held, or, if they are capped afterwards, -LSE is in bits. out,
    lse and dlse are contiguous, dout is addressable; dQ's sum is fp32, in the pieces of accumulators.py, of as many
    rows and of 64 or 128 columns. Who adds first, int32, is a tile of BLOCK_N keys for each block of rows, -1 where
    none does; None unless `in_order`.
    """
    batch, q_len, num_q_heads, _ = out.shape
    blocks = triton.cdiv(q_len, BLOCK_M)
    s_start = lse.new_empty(batch, num_q_heads, blocks * BLOCK_M)
    dp_start = torch.empty_like(s_start)
    dq_sum = lse.new_empty(s_start.numel() * columns)
    dq_next = lse.new_empty(batch, num_q_heads, blocks, dtype=torch.int32) if in_order else None
    _bwd_start_kernel[(batch * num_q_heads * blocks,)](
        *(view(x, BLOCK_M, False) for x in (out, dout)), lse, dlse, dq_sum, dq_next, s_start, dp_start,
        LOG2_E.value / scale_log2e if cap is None else LOG2_E.value, q_len, kv_len, mask["left"], mask["right"],
        blocks * BLOCK_M, num_q_heads,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, COLUMNS=columns, BLOCK_DV=padded_head_dim(out),
    )  # fmt: skip
    return s_start, dp_start, dq_sum, dq_next


def finish(dq_sum: Tensor, dq: Tensor, columns: int, scale: float) -> None:
    """Writes dq, (B, Sq, Hq, D), from its sum, whose rows have so many columns."""
    batch, q_len, num_q_heads, _ = dq.shape
    padded_len = dq_sum.numel() // (batch * num_q_heads * columns)
    _bwd_dq_kernel[(batch * num_q_heads * triton.cdiv(q_len, SIDE.value),)](
        dq_sum, view(dq, SIDE.value, False), scale, q_len, padded_len, num_q_heads, COLUMNS=columns
    )
