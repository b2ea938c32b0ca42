"""The running state of a softmax over keys that arrive block by block: start, update, finish.

The row maximum is in units of the raw scores, the row sum relative to it. Exponentials are base 2 with
scale * log2(e) folded into one multiply-add, so the scale must be positive. No key so far: maximum -inf,
sum 0.
flash_v1 joins states instead, of exponentials to base e and scores that are scaled already: merge.
Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; Milakov and Gimelshein, arXiv:1805.02867; FlashAttention
(arXiv:2205.14135), section 3.1.
"""

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr):
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    return row_max_M, row_sum_M


@triton.jit
def softmax_update(s_MN, block_max_M, row_max_M, scale_log2e, MASKED: tl.constexpr):
    """Takes in a block of scores and the maximum of each of its rows, with a key for every row unless MASKED.

    Returns its probabilities, the factor for what came before, and the new maximum. Reductions along a row are the
    caller's: what is the fastest depends on which thread has what.
    """
    new_max_M = tl.maximum(row_max_M, block_max_M)
    # (-inf) - (-inf) is NaN: a row without a key so far subtracts 0.
    shift_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
    p_MN = tl.exp2(s_MN * scale_log2e - (shift_M * scale_log2e)[:, None])
    # Subtracted before it is scaled, so that a maximum that stays gives exactly 1: the other order, as a fused
    # multiply-add, is off by one rounding in every block, and the row sum drifts with the length.
    rescale_M = tl.exp2((row_max_M - shift_M) * scale_log2e)
    return p_MN, rescale_M, new_max_M


@triton.jit
def softmax_finish(row_max_M, row_sum_M, scale_log2e):
    """Returns the factor that makes the output of what was summed, and the natural-log LSE, -inf without a key."""
    divisor_M = tl.where(row_sum_M == 0.0, 1.0, row_sum_M)
    # An empty row's maximum is -inf already.
    lse_M = (row_max_M * scale_log2e + tl.log2(divisor_M)) * LN_2
    return 1.0 / divisor_M, lse_M


@triton.jit
def softmax_merge(m_a, l_a, m_b, l_b):
    """Joins maximum m and sum l = sum exp(s - m) of two parts of a row, elementwise.

    Returns m, l, and the factors exp(m_a - m) and exp(m_b - m), by which the numerators f = sum exp(s - m) v of the
    parts add up to that of both.
    """
    m = tl.maximum(m_a, m_b)
    # (-inf) - (-inf) is NaN: where neither part has a key, subtract 0.
    shift = tl.where(m == float("-inf"), 0.0, m)
    factor_a = tl.exp(m_a - shift)
    factor_b = tl.exp(m_b - shift)
    return m, factor_a * l_a + factor_b * l_b, factor_a, factor_b
