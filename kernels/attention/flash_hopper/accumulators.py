"""Sums in global memory of what warpgroups accumulate, in the order in which their registers hold it.

A piece is 64 rows and 64 columns. Of each eight columns a thread has two neighbours in a row of its warp and two in the
row eight below, and adds these four in one instruction; a warp's 512 bytes are then consecutive. Where those who add
keep an order, an integer beside the sums says who is next.
Source: PTX ISA, the fragments of wgmma's D; ld.acquire and st.release.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of a piece, and columns.
SIDE: gl.constexpr = gl.constexpr(64)


@gluon.jit
def add_piece(sums_ptr, piece, x):
    """Adds a warpgroup's accumulator of 64 columns to a piece; the order with others is theirs to keep."""
    # warp, eight rows, row, eight columns, thread, neighbour
    by_register = x.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([8, 128, 4])
    LAYOUT: gl.constexpr = by_register.type.layout
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    OF_THREADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    OF_NUMBERS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 8, OF_COLUMNS)[:, None, None]
    thread = gl.arange(0, 128, OF_THREADS)[None, :, None]
    number = gl.arange(0, 4, OF_NUMBERS)[None, None, :]
    piece_ptr = sums_ptr + gl.cast(piece, gl.int64) * SIDE * SIDE
    gl.atomic_add(piece_ptr + (thread * 4 + number) + columns * 512, by_register, sem="relaxed")


@gluon.jit
def next_at(next_ptr):
    """Who is next; what those before have added is there then."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "=r,l", [gl.cast(next_ptr, gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_to(next_ptr, number):
    """Makes `number` the next, once what was added is there by those whom this warp has waited for.

    By one lane: another's store of the same might come behind what is stored there next.
    """
    _ = gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 lane;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first st.release.gpu.global.b32 [$1], $2;
            mov.b32 $0, 0;
        }""",
        "=r,l,r", [gl.cast(next_ptr, gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_pieces(sums_ptr, piece, COLUMNS: tl.constexpr):
    """The rows of a piece and, where they have 128 columns, of the next one beside it."""
    x = _load_piece(sums_ptr, piece)
    if COLUMNS > SIDE:
        x = tl.join(x, _load_piece(sums_ptr, piece + 1)).permute(0, 2, 1).reshape(SIDE, COLUMNS)
    return x


@triton.jit
def _load_piece(sums_ptr, piece):
    by_register = tl.load(sums_ptr + tl.cast(piece, tl.int64) * SIDE * SIDE + tl.arange(0, SIDE * SIDE))
    return by_register.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(SIDE, SIDE)
