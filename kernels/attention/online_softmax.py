"""The running state of a softmax over keys that arrive block by block: start, update, finish.

The row maximum is in units of the raw scores, the row sum relative to it. Exponentials are base 2 with
scale * log2(e) folded into one multiply-add, so the scale must be positive. No key so far: maximum -inf,
sum 0.
Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; Milakov and Gimelshein, arXiv:1805.02867.
"""

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr):
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    return row_max_M, row_sum_M


@triton.jit
def softmax_update(s_MN, row_max_M, scale_log2e, MASKED: tl.constexpr):
    """Takes in a block of scores, with a key for every row unless MASKED.

    Returns its probabilities, the factor for what came before, the new maximum, and what the row sum gains: the
    caller adds it after its product, which leaves registers to that.
    """
    new_max_M = tl.maximum(row_max_M, tl.max(s_MN, 1))
    # (-inf) - (-inf) is NaN: a row without a key so far subtracts 0.
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
    p_MN = tl.exp2(s_MN * scale_log2e - (shift_M * scale_log2e)[:, None])
    # Subtracted before it is scaled, so that a maximum that stays gives exactly 1: the other order, as a fused
    # multiply-add, is off by one rounding in every block, and the row sum drifts with the length.
    rescale_M = tl.exp2((row_max_M - shift_M) * scale_log2e)
    return p_MN, rescale_M, new_max_M, tl.sum(p_MN, 1)


@triton.jit
def softmax_finish(acc_MD, row_max_M, row_sum_M, scale_log2e):
    """Returns the output and the natural-log LSE; 0 and -inf in rows that saw no key."""
    divisor_M = tl.where(row_sum_M == 0.0, 1.0, row_sum_M)
    out_MD = acc_MD * (1.0 / divisor_M)[:, None]
    # An empty row's maximum is -inf already.
    lse_M = (row_max_M * scale_log2e + tl.log2(divisor_M)) * LN_2
    return out_MD, lse_M
