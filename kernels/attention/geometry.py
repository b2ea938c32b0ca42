"""Which keys a query sees, which blocks a tile visits, and which of those need masking; both directions.

The only place that turns an interval mask into loop bounds; tile sizes and tile order are decided
elsewhere. Everything that a kernel calls is flat integer arithmetic that runs in Triton, in Gluon and,
through `.fn` and with Python's min and max for Triton's, on Python ints, where the tests compare it with
`Intervals.dense`. Bounds never decrease along the rows, so those of a tile's first and last row hold for all
of it. Triton's `//` truncates where Python's floors: numerators are clamped at zero.
"""

import triton
import triton.language as tl

from .intervals import Intervals


def mask_arguments(intervals: Intervals, q_len: int, kv_len: int) -> dict[str, int | tuple | None]:
    """Kernel arguments for a mask: the window's `left` and `right`, or the `bounds` of each row, else None.

    A side without a bound, or with one past all of these lengths, reaches exactly past them: nothing overflows.
    """
    plain, bounds = intervals.at(q_len, kv_len), intervals.bounds
    return {
        "left": kv_len if plain.left is None else plain.left,
        "right": q_len if plain.right is None else plain.right,
        "bounds": None if bounds is None else (_rows(bounds.keys), _rows(bounds.queries)),
    }


def any_masked(intervals: Intervals, q_len: int, kv_len: int, BLOCK: int) -> bool:
    """Whether some query may see a part of a block of keys: a kernel has no loop over such blocks where none does."""
    return not intervals.at(q_len, kv_len).is_full or kv_len % BLOCK != 0


def _rows(bounds_2RS) -> tuple:
    """lo, hi and the distance of two batch rows, 0 where all have the same."""
    lo, hi = bounds_2RS
    return lo, hi, lo.stride(0) if lo.shape[0] > 1 else 0


@triton.jit
def key_bounds(i, b, q_len, kv_len, left, right, bounds):
    """Query i of batch row b sees keys lo <= j < hi, elementwise; lo == hi means none."""
    if bounds is None:
        position = i + kv_len - q_len
        lo = tl.minimum(tl.maximum(position - left, 0), kv_len)
        hi = tl.minimum(tl.maximum(position + right + 1, 0), kv_len)
    else:
        lo, hi = _load(bounds[0], i, b, q_len)
    return lo, hi


@triton.jit
def query_bounds(j, b, q_len, kv_len, left, right, bounds):
    """Key j of batch row b is seen by queries lo <= i < hi: the transpose of `key_bounds`."""
    if bounds is None:
        position = j + q_len - kv_len
        lo = tl.minimum(tl.maximum(position - right, 0), q_len)
        hi = tl.minimum(tl.maximum(position + left + 1, 0), q_len)
    else:
        lo, hi = _load(bounds[1], j, b, kv_len)
    return lo, hi


@triton.jit
def _load(rows, i, b, length):
    lo_ptr, hi_ptr, stride = rows
    offset = tl.cast(b, tl.int64) * stride + i
    lo = tl.load(lo_ptr + offset, mask=i < length, other=0)
    hi = tl.load(hi_ptr + offset, mask=i < length, other=0)
    return lo, hi


@triton.jit
def inside(x, lo, hi):
    """Whether a query or key lies within bounds, elementwise."""
    return (lo <= x) & (x < hi)


@triton.jit
def block_ranges(lo_first, hi_first, lo_last, hi_last, BLOCK: tl.constexpr):
    """A tile sees nothing outside blocks [begin, end); each of its rows sees all of [free_begin, free_end).

    Takes the bounds of the tile's first and last row. begin <= free_begin <= free_end <= end always holds.
    """
    begin = lo_first // BLOCK
    free_begin = (lo_last + BLOCK - 1) // BLOCK
    free_end = tl.maximum(hi_first // BLOCK, free_begin)
    end = (hi_last + BLOCK - 1) // BLOCK
    return begin, free_begin, free_end, end


@triton.jit
def steps(blocks, MASKED: tl.constexpr):
    """Steps [start, stop) of the loop over the blocks that need a mask, or over the free."""
    begin, free_begin, free_end, end = blocks
    if MASKED:
        start, stop = begin, end - (free_end - free_begin)
    else:
        start, stop = free_begin, free_end
    return start, stop


@triton.jit
def block_of_step(step, blocks, MASKED: tl.constexpr):
    """Block number of a step: the loop over masked blocks steps over the free ones."""
    begin, free_begin, free_end, end = blocks
    if MASKED:
        step += (step >= free_begin) * (free_end - free_begin)
    return step
