"""What the backward needs of every row of queries before its kernel runs, and makes of it behind: plain Triton.

Before: the numbers that accumulators start with, and zeros where dQ is summed. Behind: dQ, scaled and rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..online_softmax import LOG2_E
from ..views import VARYING, load_tile, padded_head_dim, store_tile, view

# Of dQ that a program rounds.
ROWS = 64


@triton.jit
def _block_of_rows(q_len, num_q_heads, BLOCK_M: tl.constexpr):
    """Batch row, head, their place (batch and head), and the program's first query."""
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    batch_head = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_M
    return batch_head // num_q_heads, batch_head % num_q_heads, batch_head.to(tl.int64), first


@triton.jit(do_not_specialize=VARYING)
def _bwd_start_kernel(
    out, dout, lse_ptr, dlse_ptr, dq_sum, s_start_ptr, dp_start_ptr, units, q_len, padded_len, num_q_heads,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Where S and dP start: -LSE in units that are so many to a natural one, and -delta = dLSE - rowsum(dO * O).

    -inf and 0 in rows that saw no key and in those behind the last. dq_sum is zeroed. Grid (batch * heads * blocks,).
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
    store_tile(dq_sum, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b, h, first, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=VARYING)
def _bwd_dq_kernel(dq_sum, dq, scale, q_len, num_q_heads, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes dq, the scaled sum. Grid (batch * heads * blocks,)."""
    b, h, _, first = _block_of_rows(q_len, num_q_heads, BLOCK_M)
    dq_MD = load_tile(dq_sum, b, h, first, BLOCK_M, BLOCK_D, True)
    store_tile(dq, dq_MD * scale, b, h, first, BLOCK_M, BLOCK_D)


def start(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor, head_dim: int, BLOCK_M: int,
    scale_log2e: float, cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns what S and dP start with, (B, Hq, Sq rounded up to BLOCK_M) in fp32, and zeros for dQ's sum.

    Scores start at -LSE in the units in which they are held, or, if they are capped afterwards, -LSE is in bits. out,
    lse and dlse are contiguous, dout is addressable; dQ's sum is (B, Sq, Hq, D) in fp32, each head's rows together.
    """
    batch, q_len, num_q_heads, _ = out.shape
    blocks = triton.cdiv(q_len, BLOCK_M)
    s_start = lse.new_empty(batch, num_q_heads, blocks * BLOCK_M)
    dp_start = torch.empty_like(s_start)
    dq_sum = lse.new_empty(batch, num_q_heads, q_len, head_dim).transpose(1, 2)
    _bwd_start_kernel[(batch * num_q_heads * blocks,)](
        *(view(x, BLOCK_M, False) for x in (out, dout)), lse, dlse, view(dq_sum, BLOCK_M, False), s_start, dp_start,
        LOG2_E.value / scale_log2e if cap is None else LOG2_E.value, q_len, blocks * BLOCK_M, num_q_heads,
        BLOCK_M=BLOCK_M, BLOCK_D=padded_head_dim(dq_sum), BLOCK_DV=padded_head_dim(out),
    )  # fmt: skip
    return s_start, dp_start, dq_sum


def finish(dq_sum: Tensor, dq: Tensor, scale: float) -> None:
    """Writes dq, (B, Sq, Hq, D), from its sum."""
    batch, q_len, num_q_heads, _ = dq.shape
    _bwd_dq_kernel[(batch * num_q_heads * triton.cdiv(q_len, ROWS),)](
        *(view(x, ROWS, False) for x in (dq_sum, dq)), scale, q_len, num_q_heads,
        BLOCK_M=ROWS, BLOCK_D=padded_head_dim(dq),
    )  # fmt: skip
