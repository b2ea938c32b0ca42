"""SwiGLU, silu(gate) * up, of gate and up side by side in a row, and its gradient: kernels that read and write once.

torch.compile makes one kernel of the gradient's two halves, in which each half reads all that both need.
Source: Shazeer, arXiv:2002.05202.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of a program: eight to a thread, 16 bytes where they have 16 bits. Blocks of 512 and 2,048, and four and
# sixteen columns to a thread, were within 3 % on an H200, but for 512 with two warps (NOTES.md of attention).
BLOCK = 1024
NUM_WARPS = 4

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """The row and columns of this program, and which of the columns there are. Grid (rows cdiv(width, BLOCK),)."""
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), column, column < width


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column, exists = _place(width, BLOCK)
    gate_up_ptr += row * 2 * width
    gate = tl.load(gate_up_ptr + column, exists).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, exists).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate * tl.sigmoid(gate) * up, exists)


@triton.jit
def _swiglu_backward_kernel(dout_ptr, gate_up_ptr, dgate_up_ptr, width, BLOCK: tl.constexpr):
    row, column, exists = _place(width, BLOCK)
    gate_up_ptr += row * 2 * width
    dgate_up_ptr += row * 2 * width
    dout = tl.load(dout_ptr + row * width + column, exists).to(tl.float32)
    gate = tl.load(gate_up_ptr + column, exists).to(tl.float32)
    up = tl.load(gate_up_ptr + width + column, exists).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(dgate_up_ptr + column, dout * up * (sigmoid + silu * (1 - sigmoid)), exists)
    tl.store(dgate_up_ptr + width + column, dout * silu, exists)


@torch.library.custom_op("flashtrain::swiglu", mutates_args=())
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., W) of gate_up (..., 2 W), computed in fp32 and rounded once; differentiable once.

    Args:
        gate_up: fp32, fp16 or bf16 on a GPU; the first W columns are the gate's.

    Raises ValueError for other dtypes and for an odd number of columns.
    """
    if gate_up.dtype not in DTYPES:
        raise ValueError(f"swiglu: {gate_up.dtype} has no kernel; allowed are {', '.join(map(str, DTYPES))}")
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(_half(gate_up.shape))
    _launch(_swiglu_kernel, out.shape, gate_up, out)
    return out


@swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(_half(gate_up.shape))


@torch.library.custom_op("flashtrain::swiglu_backward", mutates_args=())
def _backward(dout: Tensor, gate_up: Tensor) -> Tensor:
    dout, gate_up = dout.contiguous(), gate_up.contiguous()
    dgate_up = torch.empty_like(gate_up)
    _launch(_swiglu_backward_kernel, dout.shape, dout, gate_up, dgate_up)
    return dgate_up


@_backward.register_fake
def _(dout, gate_up):
    return gate_up.new_empty(gate_up.shape)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dout: Tensor) -> Tensor:
    return _backward(dout, *ctx.saved_tensors)


swiglu.register_autograd(_differentiate, setup_context=_save_for_backward)


def _half(shape: torch.Size) -> torch.Size:
    if shape[-1] % 2:
        raise ValueError(f"swiglu: gate and up have as many columns each, so not {shape[-1]} together")
    return shape[:-1] + (shape[-1] // 2,)


def _launch(kernel: triton.JITFunction, shape: torch.Size, *tensors: Tensor) -> None:
    """`shape` is that of the gate, and of up."""
    *rows, width = shape
    programs = math.prod(rows) * triton.cdiv(width, BLOCK)
    if programs:
        with torch.cuda.device_of(tensors[0]):
            kernel[(programs,)](*tensors, width, BLOCK=BLOCK, num_warps=NUM_WARPS)
