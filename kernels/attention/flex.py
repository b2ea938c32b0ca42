"""PyTorch's FlexAttention: block-sparse kernels that torch.compile writes around a mask and a score function.

Which blocks to visit follows from the intervals of a block's first and last row, for the queries and, transposed,
for the keys, so no mask is ever evaluated to find out. The mask function reads the same intervals, as tensors:
kernels depend on shapes alone, and new documents or another window compile nothing anew. What the kernels demand
of their inputs is said in limits.py.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from .intervals import Intervals

# Tokens on each side of a block, which every tile that FlexAttention picks divides.
BLOCK = 128
# Compiled by the calls outside a graph; one more is an error, never PyTorch's dense fallback.
MAX_SHAPES = 256


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The kernels, part of the graph that is being compiled or, without one, compiled here for each new shape."""
    if torch.compiler.is_compiling():
        return attend_with(flex_attention, q, k, v, intervals, scale, softcap)
    with torch._dynamo.config.patch(recompile_limit=MAX_SHAPES):
        return attend_with(_compiled(), q, k, v, intervals, scale, softcap)


@functools.cache
def _compiled() -> Callable:
    # Static shapes: the scale is a constant of the kernel, and a length of whole blocks needs no checks.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def attend_with(
    flex_attention: Callable, q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) by `flex_attention`; a query that sees no key gets 0 and -inf of it."""
    # The kernel's tiles are chosen by the head dimension of q and k, and might not fit a wider v.
    wider = v.shape[3] - q.shape[3]
    if wider > 0:
        q, k = pad(q, (0, wider)), pad(k, (0, wider))
    out, aux = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=None if softcap == 0 else cap(softcap),
        block_mask=None if intervals.is_full else block_mask(intervals, q.shape[0], q.shape[1], k.shape[1], q.device),
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        # Fewer queries than a block would go to a kernel of their own, for decoding, which knows less.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    return out.transpose(1, 2), aux.lse


def cap(softcap: float) -> Callable:
    """The score function that caps scores to softcap tanh(score / softcap)."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def block_mask(intervals: Intervals, B: int, Sq: int, Sk: int, device: torch.device | str = "cpu") -> BlockMask:
    """The intervals as lists of the blocks to visit and the function that masks within them."""
    bounds = intervals.bounds_of(Sq, Sk, device)
    lo, hi = bounds.keys.expand(-1, B, -1)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (lo[batch, query] <= key) & (key < hi[batch, query])

    return BlockMask(
        (Sq, Sk),
        *_block_lists(bounds.keys, Sk),
        *_block_lists(bounds.queries, Sq),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _block_lists(bounds_2RS: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a block of rows visits of the other side, `length` tokens long: blocks that need the mask, full blocks.

    bounds (2, R, S): the range of the other side that each row sees. Returns the number of blocks (R, 1, rows) and
    their indices (R, 1, rows, columns), int32, first of those that need the mask, then of those that are visible
    throughout. A last block that is cut short always needs it, on either side: FlexAttention fills it up. This is
    geometry's `block_ranges`, of all blocks of rows at once and without Triton.
    """
    lo, hi = bounds_2RS
    S = lo.shape[-1]
    first = torch.arange(0, S, BLOCK, device=lo.device)
    last = (first + (BLOCK - 1)).clamp(max=S - 1)
    begin, end = lo[:, first] // BLOCK, _ceil_blocks(hi[:, last])
    full_begin, full_end = _ceil_blocks(lo[:, last]), hi[:, first] // BLOCK
    num_full = (full_end - full_begin).clamp(min=0) * (first + BLOCK <= S)

    column = torch.arange(_ceil_blocks(length), dtype=torch.int32, device=lo.device)
    block = begin[..., None] + column
    # Those that need the mask lie on both sides of the full ones. What lies beyond a list's number is not read.
    block = block + num_full[..., None] * (block >= full_begin[..., None])
    full_block = full_begin[..., None] + column
    lists = (end - begin - num_full, block.clamp(max=len(column) - 1), num_full, full_block.clamp(max=len(column) - 1))
    return tuple(x.to(torch.int32)[:, None].contiguous() for x in lists)


def _ceil_blocks(tokens: Tensor | int) -> Tensor | int:
    return (tokens + (BLOCK - 1)) // BLOCK
