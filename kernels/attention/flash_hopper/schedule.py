"""Which program computes which tiles of queries, and which blocks of keys a tile visits, in order.

The grid is persistent: as many programs as the GPU has SMs. Where the host knows what each tile costs, every program
has a list of tiles from a table made there: dealt out the costliest first, each to the program with the least to do,
within sections of heads whose K and V stay in L2 together; where tiles are alike, head by head. Where only the device
knows, since the mask comes as bounds, a program takes the next tile from a counter when it begins with one.
Source: Graham 1969 (longest processing time first); FlashAttention-3 (arXiv:2407.08608) for the sections.
"""

import functools
import heapq
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from ..geometry import block_of_step, block_ranges, key_bounds, query_bounds
from ..intervals import Intervals

# What K and V of a section may take of L2: FlashAttention-3's figure. Others were not measured.
SECTION_BYTES = 32 * 2**20


def deal(costs: list[int], num_heads: int, heads_in_section: int, num_programs: int) -> list[list[int]]:
    """For each program its tiles, numbered head * len(costs) + tile, where costs[tile] is the same in all heads.

    Every program gets a tile if there are as many.
    """
    costliest_first = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    programs: list[list[int]] = [[] for _ in range(num_programs)]
    loads = [(0, program) for program in range(num_programs)]
    for first in range(0, num_heads, heads_in_section):
        for tile in costliest_first:
            for head in range(first, min(first + heads_in_section, num_heads)):
                load, program = loads[0]
                programs[program].append(head * len(costs) + tile)
                heapq.heapreplace(loads, (load + costs[tile], program))
    return programs


def tile_costs(intervals: Intervals, q_len: int, kv_len: int, BLOCK_M: int, BLOCK_N: int) -> list[int]:
    """The blocks of keys that each tile of queries visits, and one for what a tile takes by itself."""
    lo, hi = intervals.bounds_of(q_len, kv_len).keys[:, 0]
    first = torch.arange(0, q_len, BLOCK_M, device=lo.device)
    last = (first + BLOCK_M).clamp(max=q_len) - 1
    blocks = -(-hi[last] // BLOCK_N) - lo[first] // BLOCK_N
    return (1 + blocks.clamp(min=1)).tolist()


def section(head_bytes: int, group_size: int) -> int:
    """The query heads of a section, when K and V of a KV head take so many bytes: a power of two of KV heads."""
    kv_heads = max(SECTION_BYTES // head_bytes, 1)
    return group_size << (kv_heads.bit_length() - 1)


def table(
    intervals: Intervals,
    q_len: int,
    kv_len: int,
    heads: int,
    heads_in_section: int,
    BLOCK_M: int,
    BLOCK_N: int,
    num_programs: int,
    device: torch.device,
) -> Tensor:
    """int32: where each program's list of tiles begins, where the last one ends, then the lists.

    Queries see the keys that `intervals` says, left and right of them; heads are those of all batch rows.

    Raises RuntimeError while a CUDA graph is captured, which no new table can be copied into.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"attention: flash_hopper meets this shape and mask, {q_len} queries and {kv_len} keys in {heads} heads, "
            "for the first time while a CUDA graph is captured; make the same call once before"
        )
    costs = tile_costs(intervals, q_len, kv_len, BLOCK_M, BLOCK_N)
    are_alike = len(set(costs)) == 1
    programs = deal(costs, heads, 1 if are_alike else heads_in_section, num_programs)
    begins = [0]
    for tiles in programs:
        begins.append(begins[-1] + len(tiles))
    return _lasting([*begins, *(number for tiles in programs for number in tiles)], device)


def counter(device: torch.device) -> Tensor:
    """An int32 0, at which a launch on the current stream leaves it: one a stream, or one a launch in a captured graph,
    which may be replayed on any stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of_stream(device, driver.active.get_current_stream(device.index))


@functools.cache
def _counter_of_stream(device: torch.device, stream: int) -> Tensor:
    return _lasting([0], device)


def _lasting(numbers: list[int], device: torch.device) -> Tensor:
    """int32, made in a thread of its own: what this one allocates may be for a CUDA graph to use again, as where
    `torch.compile(mode="reduce-overhead")` warms up."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(torch.tensor, numbers, dtype=torch.int32, device=device).result()


@gluon.jit
def query_tile(
    order_ptr, n, num_heads, mask, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, FIRST: gl.constexpr = False
):  # fmt: skip
    """The program's n-th tile: whether there is one, its batch row, head and first query, and the blocks it visits.

    Every program has a first tile, n = 0, and says so by FIRST. order_ptr is the table or, where the mask comes as
    bounds, a counter, 0 before the launch and behind it; num_heads are those of all batch rows and of one; mask is what
    key_bounds takes.
    """
    all_heads, num_q_heads = num_heads
    q_len = mask[0]
    num_tiles = gl.cdiv(q_len, BLOCK_M)
    if mask[4] is None:
        place = gl.load(order_ptr + gl.program_id(0)) + n
        exists = place < gl.load(order_ptr + gl.program_id(0) + 1)
        number = gl.load(order_ptr + gl.num_programs(0) + 1 + place, mask=exists, other=0)
    else:
        # The last first, as costlier where the mask hides the future.
        all_tiles = all_heads * num_tiles
        taken = gl.program_id(0)
        if not FIRST:
            counted = gl.atomic_add(order_ptr, 1, sem="relaxed")
            taken = gl.num_programs(0) + counted
            # Every program counts once in vain, so that there are as many counts as tiles.
            if counted == all_tiles - 1:
                gl.store(order_ptr, 0)
        exists = taken < all_tiles
        number = tl.maximum(all_tiles - 1 - taken, 0)
    batch_head, first = number // num_tiles, number % num_tiles * BLOCK_M
    b, h = batch_head // num_q_heads, batch_head % num_q_heads
    last = tl.minimum(first + BLOCK_M, q_len) - 1
    blocks = block_ranges(*key_bounds(first, b, *mask), *key_bounds(last, b, *mask), BLOCK_N)
    return exists, b, h, first, blocks


@gluon.jit
def key_tile(num_kv_heads, heads_at_once, mask, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """The program's tile of keys: batch row, KV head, first key, and the blocks of queries that it visits, if any.

    A program for each tile, head by head, so that what the tiles of a head share stays in L2; in each head from the
    first tile, the longest if causal, to the last. With `heads_at_once`, so many heads by turns, and in each from the
    last tile to the first: a tile may then wait for those behind it, whose programs started before.
    """
    kv_len = mask[1]
    num_tiles = gl.cdiv(kv_len, BLOCK_N)
    if heads_at_once is None:
        batch_head, tile = gl.program_id(0) // num_tiles, gl.program_id(0) % num_tiles
    else:
        first_head = gl.program_id(0) // num_tiles // heads_at_once * heads_at_once
        heads = tl.minimum(heads_at_once, gl.num_programs(0) // num_tiles - first_head)
        n = gl.program_id(0) - first_head * num_tiles
        batch_head, tile = first_head + n % heads, num_tiles - 1 - n // heads
    first = tile * BLOCK_N
    b, h_kv = batch_head // num_kv_heads, batch_head % num_kv_heads
    return b, h_kv, first, query_blocks(first, b, mask, heads_at_once is not None, BLOCK_N, BLOCK_M)


@gluon.jit
def query_blocks(first, b, mask, IN_ORDER: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """What `block_ranges` says of the tile of keys from `first` on.

    Rows past the last query hide themselves. In order, the block that has them is not masked for that: it would be
    visited first, where it is the last of a tile under the full mask. In no order it is, since ptxas makes a slower
    loop of the free blocks without (NOTES).
    """
    q_len = mask[0]
    lo_first, hi_first = seen_by(first, b, *mask)
    lo_last, hi_last = seen_by(first + BLOCK_N - 1, b, *mask)
    if IN_ORDER:
        hi_first += (hi_first == q_len) * (BLOCK_M - 1)
    return block_ranges(lo_first, hi_first, lo_last, hi_last, BLOCK_M)


@triton.jit
def last_key_tile(last_query, q_len, kv_len, left, right, BLOCK_N: tl.constexpr):
    """The last tile of keys that visits the block of queries which ends with this one; -1 if none does.

    The mask has no bounds. If there is none to the left either, the tiles before it all visit that block too.
    """
    lo, hi = key_bounds(last_query, 0, q_len, kv_len, left, right, None)
    return tl.cdiv(hi, BLOCK_N) - 1


@gluon.jit
def seen_by(j, b, q_len, kv_len, left, right, bounds):
    """`query_bounds`, also of keys past the last: no query sees those, so a tile that has any is masked throughout."""
    lo, hi = query_bounds(j, b, q_len, kv_len, left, right, bounds)
    nobody = (j >= kv_len) * q_len
    return tl.maximum(lo, nobody), tl.maximum(hi, nobody)


@gluon.jit
def visits(blocks):
    """How many blocks of a tile need a mask, and how many it visits: one, all hidden, where it sees nothing."""
    begin, free_begin, free_end, end = blocks
    masked = end - begin - (free_end - free_begin)
    return masked, tl.maximum(end - begin, 1)


@gluon.jit
def block_at(visit, blocks):
    """Block number of a visit: those that need a mask come first."""
    begin, free_begin, free_end, end = blocks
    masked = end - begin - (free_end - free_begin)
    return block_of_step(begin + visit, blocks, True) if visit < masked else free_begin + visit - masked
