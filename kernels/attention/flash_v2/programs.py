"""Which tile a program works on: programs go head by head, so that what a head's tiles share stays in L2."""

import triton
import triton.language as tl


@triton.jit
def query_tile(q_len, num_q_heads, group_size, BLOCK_M: tl.constexpr):
    """Batch row, query head, its KV head, the two heads' place (batch and head), and the first query.

    In each head from the last tile, the longest if causal, to the first.
    """
    num_tiles = tl.cdiv(q_len, BLOCK_M)
    batch_head = tl.program_id(0) // num_tiles
    first = (num_tiles - 1 - tl.program_id(0) % num_tiles) * BLOCK_M
    h = batch_head % num_q_heads
    return batch_head // num_q_heads, h, h // group_size, batch_head.to(tl.int64), first


@triton.jit
def key_tile(kv_len, num_kv_heads, BLOCK_N: tl.constexpr):
    """Batch row, KV head, its place (batch and head), and the first key; the first tile, the longest, first."""
    num_tiles = tl.cdiv(kv_len, BLOCK_N)
    batch_head = tl.program_id(0) // num_tiles
    first = tl.program_id(0) % num_tiles * BLOCK_N
    return batch_head // num_kv_heads, batch_head % num_kv_heads, batch_head.to(tl.int64), first
