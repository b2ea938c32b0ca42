"""Hides what a mask hides in a warpgroup's accumulator, by a bit for each number that a thread has of a row.

Two compares and what goes with them are five instructions a number. Of a word of bits ptxas sets eight predicates in an
instruction, if each is tested where it is used, and the selection alone is left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def by_thread(x):
    """(rows, turns, threads, neighbours): how the tensor cores share a row out, to four threads in turn two columns."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def inside_or(x, lo, hi, hidden: gl.constexpr):
    """An accumulator x in columns lo <= column < hi, those of each row, and `hidden` elsewhere.

    At most 128 columns, of which a thread has as many numbers as a word has bits; lo <= hi, else too much is shown.
    """
    by_thread_x = by_thread(x)
    SHAPE: gl.constexpr = by_thread_x.shape
    LAYOUT: gl.constexpr = by_thread_x.type.layout
    OF_THREADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    OF_NUMBERS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    first, last = _numbers_below(lo, SHAPE, OF_THREADS), _numbers_below(hi, SHAPE, OF_THREADS)
    bits = gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [first, last - first], dtype=gl.int32, is_pure=True, pack=1
    )
    turn = gl.arange(0, SHAPE[1], gl.SliceLayout(1, OF_NUMBERS))
    neighbour = gl.arange(0, SHAPE[3], gl.SliceLayout(0, OF_NUMBERS))
    number = turn[:, None] * SHAPE[3] + neighbour[None, :]
    selected = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.b32 p, t, 0; selp.f32 $0, $1, $4, p; }",
        "=f,f,r,r,f",
        [by_thread_x, bits[:, None, :, None], (1 << number)[None, :, None, :], hidden],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(selected.reshape(x.shape), x.type.layout)


@gluon.jit
def _numbers_below(bound, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows, threads): how many of a thread's numbers, in order of columns, lie in columns below each row's bound."""
    THREADS: gl.constexpr = SHAPE[2]
    NEIGHBOURS: gl.constexpr = SHAPE[3]
    TURN: gl.constexpr = THREADS * NEIGHBOURS
    thread = gl.arange(0, THREADS, gl.SliceLayout(0, LAYOUT))
    left = gl.convert_layout(bound, gl.SliceLayout(1, LAYOUT))[:, None] - thread[None, :] * NEIGHBOURS
    left = gl.minimum(gl.maximum(left, 0), SHAPE[1] * TURN)
    return left // TURN * NEIGHBOURS + gl.minimum(left % TURN, NEIGHBOURS)
