"""Cross-entropy of logits and, in their place, its gradient: a program per row reads it twice and writes it once.

A block of columns is LANES runs of WIDTH neighbours. Each lane keeps a maximum and a sum of its own through the first
pass, and the lanes are joined once, at its end; in the second pass the row comes from the L2 cache.
Source: Milakov and Gimelshein, arXiv:1805.02867; in place as in Liger-Kernel, arXiv:2410.10989.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention.online_softmax import LOG2_E

# What a thread, which has one lane, loads at once: eight 16-bit numbers. H200, 4,096 rows of 50,304 in bf16, medians
# of 10: 0.245 ms with gradient and 0.130 without; 512 lanes 0.305 and 0.115, 256 0.316 and 0.111: of
# more rows at once, four and eight to an SM, L2 no longer holds what the second pass reads. Loads ahead by num_stages,
# 2 or 3: 0.29 to 0.40. torch.compile of the plain path with gradient: 0.678.
WIDTH_BYTES = 16
LANES = 1024
NUM_WARPS = LANES // (64 if torch.version.hip else 32)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _load(logits_ptr, column_LW, vocab_size, WHOLE: tl.constexpr):
    """Loads logits in fp32, -inf from vocab_size on; WHOLE says that no column lies there."""
    if WHOLE:
        x_LW = tl.load(logits_ptr + column_LW)
    else:
        x_LW = tl.load(logits_ptr + column_LW, mask=column_LW < vocab_size, other=float("-inf"))
    return x_LW.to(tl.float32)


@triton.jit
def _shift(maximum):
    """What to subtract for a maximum: (-inf) - (-inf) is NaN, so 0 where nothing was seen yet."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _add_columns(
    max_L, sum_L, logits_ptr, start, stop, offset_LW, vocab_size, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each lane's maximum m and sum of exp(x - m), with those columns too."""
    for first in range(start, stop, BLOCK):
        x_LW = _load(logits_ptr, first + offset_LW, vocab_size, WHOLE)
        new_max_L = tl.maximum(max_L, tl.max(x_LW, 1))
        shift_L = _shift(new_max_L)
        sum_L = sum_L * _exp(max_L - shift_L) + tl.sum(_exp(x_LW - shift_L[:, None]), 1)
        max_L = new_max_L
    return max_L, sum_L


@triton.jit
def _write_probabilities(
    logits_ptr, maximum, factor, start, stop, offset_LW, num_columns, vocab_size, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes exp(x - maximum) factor in the place of those columns' logits."""
    for first in range(start, stop, BLOCK):
        column_LW = first + offset_LW
        p_LW = _exp(_load(logits_ptr, column_LW, vocab_size, WHOLE) - maximum) * factor
        tl.store(logits_ptr + column_LW, p_LW, mask=None if WHOLE else column_LW < num_columns)


@triton.jit(do_not_specialize=["vocab_size"])
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, nll_ptr, row_stride, num_columns, vocab_size,
    IGNORED: tl.constexpr, GRADIENT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes a row's nll and, if GRADIENT, p - onehot over its logits. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    token = tl.where((target >= 0) & (target < vocab_size), target, -1).to(tl.int32)
    BLOCK: tl.constexpr = LANES * WIDTH
    offset_LW = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if target == IGNORED:
        tl.store(nll_ptr + row, 0.0)
        if GRADIENT:
            for first in range(0, num_columns, BLOCK):
                column_LW = first + offset_LW
                zero_LW = tl.zeros([LANES, WIDTH], logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + column_LW, zero_LW, mask=column_LW < num_columns)
    else:
        # Before the lanes are joined, which no thread passes before all have come so far: none overwrites it too early.
        x_target = tl.load(logits_ptr + token, mask=token >= 0, other=float("-inf")).to(tl.float32)
        whole = vocab_size // BLOCK * BLOCK
        max_L = tl.full([LANES], float("-inf"), tl.float32)
        sum_L = tl.zeros([LANES], tl.float32)
        max_L, sum_L = _add_columns(max_L, sum_L, logits_ptr, 0, whole, offset_LW, vocab_size, True, BLOCK)
        max_L, sum_L = _add_columns(max_L, sum_L, logits_ptr, whole, vocab_size, offset_LW, vocab_size, False, BLOCK)
        maximum = tl.max(max_L, 0)
        total = tl.sum(sum_L * _exp(max_L - _shift(maximum)), 0)
        # The maximum is subtracted first, and exactly: added to log(total) it would round away what counts.
        tl.store(nll_ptr + row, tl.log(total) - (x_target - maximum))
        if GRADIENT:
            factor = 1.0 / total
            _write_probabilities(
                logits_ptr, maximum, factor, 0, whole, offset_LW, num_columns, vocab_size, True, BLOCK
            )  # fmt: skip
            _write_probabilities(
                logits_ptr, maximum, factor, whole, num_columns, offset_LW, num_columns, vocab_size, False, BLOCK
            )  # fmt: skip
            # The target's is written last, once all have written theirs.
            tl.debug_barrier()
            tl.store(logits_ptr + token, _exp(x_target - maximum) * factor - 1.0, mask=token >= 0)


def nll(logits: Tensor, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
    """Return -log softmax(logits)[target] (n,) fp32, computed in fp32; 0 for ignored rows.

    NaN and infinities go the way they go in `torch.log_softmax`; a target that is no token gives +inf, where these
    do not make it NaN.

    Args:
        logits: (n, V) fp32, fp16 or bf16, neighbours of a row side by side in memory.
        targets: (n,) int64 token ids below vocab_size.
        vocab_size: columns from here on are padding and get no probability.
        ignored: the target of rows that count for nothing.
    """
    return _launch(logits, targets, vocab_size, ignored, gradient=False)


def nll_and_gradient_(logits: Tensor, targets: Tensor, vocab_size: int, ignored: int) -> Tensor:
    """Return what `nll` does, and overwrite the logits by the gradient of its sum, p - onehot.

    The gradient is 0 in ignored rows and, where the loss is a number, in padding. Arguments as in `nll`.
    """
    return _launch(logits, targets, vocab_size, ignored, gradient=True)


def _launch(logits: Tensor, targets: Tensor, vocab_size: int, ignored: int, gradient: bool) -> Tensor:
    rows, num_columns = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"cross_entropy: rows of logits must be contiguous, and their stride is {logits.stride(1)}")
    if not 0 < vocab_size <= num_columns:
        raise ValueError(f"cross_entropy: vocab_size must be 1 to {num_columns}, logits' columns, not {vocab_size}")
    nll_n = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(rows,)](
            logits, targets.contiguous(), nll_n, logits.stride(0), num_columns, vocab_size,
            IGNORED=ignored, GRADIENT=gradient, LANES=LANES, WIDTH=WIDTH_BYTES // logits.element_size(),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return nll_n
