"""Which keys a query sees, which blocks a tile visits, and which of those need masking; both directions.

The only place that turns an interval mask into loop bounds; tile sizes and tile order are decided
elsewhere. Everything that a kernel calls is flat integer arithmetic that runs in Triton, in Gluon and,
through `.fn`, on Python ints, where the tests compare it with `Intervals.dense`. Bounds never decrease
along the rows, so those of a tile's first and last row hold for all of it. Triton's `//` truncates where
Python's floors: numerators are clamped at zero.
"""

import triton
import triton.language as tl


def mask_arguments(left: int | None, right: int | None, q_len: int, kv_len: int) -> dict[str, int | bool]:
    """Kernel arguments for a (left, right) window of extra keys, None = unbounded.

    A side that reaches past all of these lengths is unbounded too, so that `left` and `right` never overflow.
    """
    has_left = left is not None and left < kv_len - 1
    has_right = right is not None and right < q_len - 1
    return {
        "left": left if has_left else 0,
        "right": right if has_right else 0,
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
    }


@triton.jit
def key_bounds(i, q_len, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Query i sees keys lo <= j < hi, aligned bottom-right; lo >= hi means none."""
    lo = 0
    hi = kv_len
    if HAS_LEFT:
        lo = min(max(i + kv_len - q_len - left, 0), kv_len)
    if HAS_RIGHT:
        hi = min(max(i + kv_len - q_len + right + 1, 0), kv_len)
    return lo, hi


@triton.jit
def query_bounds(j, q_len, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Key j is seen by queries lo <= i < hi: the transpose of `key_bounds`."""
    lo = 0
    hi = q_len
    if HAS_RIGHT:
        lo = min(max(j + q_len - kv_len - right, 0), q_len)
    if HAS_LEFT:
        hi = min(max(j + q_len - kv_len + left + 1, 0), q_len)
    return lo, hi


@triton.jit
def block_ranges(lo_first, hi_first, lo_last, hi_last, BLOCK: tl.constexpr):
    """A tile sees nothing outside blocks [begin, end); each of its rows sees all of [free_begin, free_end).

    Takes the bounds of the tile's first and last row. begin <= free_begin <= free_end <= end always holds.
    """
    begin = lo_first // BLOCK
    end = max((hi_last + BLOCK - 1) // BLOCK, begin)
    free_begin = min(max((lo_last + BLOCK - 1) // BLOCK, begin), end)
    free_end = max(min(hi_first // BLOCK, end), free_begin)
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


@triton.jit
def visible(i, j, q_len, kv_len, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether query i sees key j, elementwise; false beyond the ends of either."""
    seen = (i < q_len) & (j < kv_len)
    if HAS_LEFT:
        seen = seen & (i + kv_len - q_len - left <= j)
    if HAS_RIGHT:
        seen = seen & (j <= i + kv_len - q_len + right)
    return seen
