"""What the kernel tests share."""

import importlib.util

import numpy as np
import pytest
import torch
from flash_kernels import Flash, on_hopper


@pytest.fixture(
    params=[
        Flash("flash_v2", torch.float32, 256),
        pytest.param(Flash("flash_hopper", torch.bfloat16, 128), marks=on_hopper),
    ],
    ids=lambda flash: flash.name,
)
def flash(request):
    return request.param


@pytest.fixture(autouse=True)
def products_rounded_once(monkeypatch):
    """The interpreter's matrix products, summed in float64: numpy's BLAS sums fp32 in an order that the CPU decides,
    and what it rounds would be held against the kernels."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b, accumulator = (x.data.astype(np.float64) for x in (a, b, d))
        return TensorHandle((a @ b + accumulator).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
