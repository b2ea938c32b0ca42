"""A warpgroup's matrix products: their accumulators, and results that feed the next product from registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .launch import ROWS


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    """An accumulator of a warpgroup's products, 16 rows to a warp."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def rows_of(x):
    """An accumulator that starts with x in every row.

    Each number in a register of its own, by assembly: else LLVM copies what rows share right before the product that
    starts there, and ptxas makes that copy wait for whatever was issued before.
    """
    acc, unused = gl.broadcast(x[None, :], zeros(x.shape[0]))
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x in 16 bits, two numbers at a time, in assembly.

    What goes around a loop stays in pairs so: else LLVM carries the halves of a register by themselves, and puts them
    together in every step.
    """
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return pairs


@gluon.jit
def as_operand(x, acc, dtype: gl.constexpr):
    """A result as the first operand of the product into `acc`, in the registers where the tensor cores wrote it."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def half_of(buffer, HALF: gl.constexpr):
    """Columns of the first or second half of a tile of 128 of 16 bits: under the swizzle these are two tiles of 64."""
    COLUMNS: gl.constexpr = buffer.shape[-1] // 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype)
    return buffer._reinterpret(buffer.dtype, [2, ROWS, COLUMNS], LAYOUT).index(HALF)
