"""The kernels of SwiGLU against PyTorch in float64, interpreted where there is no GPU; the MLP that calls them."""

import math

import pytest
import torch
import torch.nn.functional as F
from presets import preset

from flashtrain.model import layers

pytest.importorskip("triton")
kernels = pytest.importorskip("flashtrain.kernels.swiglu")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
numpy_warns = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")


def random(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


def plain(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def with_gradient(function, gate_up, dout):
    gate_up = gate_up.detach().requires_grad_()
    out = function(gate_up)
    return out.detach(), torch.autograd.grad(out, gate_up, dout)[0]


def assert_right(gate_up, dout):
    """Both, to a rounding in their dtype, and fp32's own errors in what is added up to d silu(gate) / d gate."""
    out, gradient = with_gradient(kernels.swiglu, gate_up, dout)
    exact_out, exact_gradient = with_gradient(plain, gate_up.double(), dout.double())
    info = torch.finfo(gate_up.dtype)
    rtol, atol = max(info.eps, 1e-5), info.smallest_normal * info.eps
    assert out.dtype == gradient.dtype == gate_up.dtype
    torch.testing.assert_close(out.double(), exact_out, rtol=rtol, atol=atol)
    up = gate_up.chunk(2, dim=-1)[1]
    terms = torch.cat([dout * up, torch.zeros_like(up)], dim=-1).double().abs()
    assert ((gradient - exact_gradient).abs() <= rtol * exact_gradient.abs() + 1e-6 * terms + atol).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    "shape", [(2,), (5, 14), (2, 3, 2 * kernels.BLOCK), (4, 2 * (kernels.BLOCK + 1)), (3, 6 * kernels.BLOCK)], ids=str
)
def test_any_shape(shape, dtype):
    assert_right(random(*shape, dtype=dtype), random(*shape[:-1], shape[-1] // 2, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_nothing_gives_nothing(shape):
    out, gradient = with_gradient(kernels.swiglu, random(*shape), random(shape[0], shape[1] // 2))
    assert out.shape == (shape[0], shape[1] // 2) and gradient.shape == shape


@numpy_warns
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 20.0])
def test_small_and_large_numbers(scale):
    assert_right(random(8, 256, scale=scale), random(8, 128))


@numpy_warns
@pytest.mark.parametrize("up", [2.0, -math.inf, math.nan])
@pytest.mark.parametrize("gate", [-math.inf, -1e38, -1e4, -0.0, 1e4, 1e38, math.inf, math.nan])
def test_extremes_nan_and_infinity_go_as_in_pytorch(gate, up):
    gate_up, dout = torch.tensor([[gate, up]], device=DEVICE), torch.ones(1, 1, device=DEVICE)
    ours, theirs = (with_gradient(function, gate_up, dout) for function in (kernels.swiglu, plain))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_memory_that_is_not_in_rows():
    assert_right(random(64, 6).T, random(32, 6).T)
    assert_right(random(4, 64), random(1, 1).expand(4, 32))


def test_gate_and_up_of_different_widths_are_refused():
    with pytest.raises(ValueError, match="gate and up have as many columns each, so not 7 together"):
        kernels.swiglu(random(2, 7))


def test_a_dtype_that_would_lose_digits_is_refused():
    with pytest.raises(ValueError, match="torch.float64 has no kernel; allowed are torch.float32, torch.float16, "):
        kernels.swiglu(random(2, 8, dtype=torch.float64))


def test_it_is_an_operator_that_compiles():
    gate_up, dout = random(4, 64), random(4, 32)
    torch.library.opcheck(kernels.swiglu, (gate_up.requires_grad_(),))
    torch.compiler.reset()
    compiled = torch.compile(kernels.swiglu, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        *(with_gradient(function, gate_up, dout) for function in (compiled, kernels.swiglu)), rtol=0, atol=0
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_mlp_with_the_kernel_is_that_without(monkeypatch, compiled):
    torch.manual_seed(0)
    mlp = layers.mlp(preset("nano", hidden_size=32, mlp_hidden_size=48), lambda function, x: function(x)).to(DEVICE)
    x, dout = random(2, 9, 32), random(2, 9, 32)
    results = []
    for has_kernel in (False, True):
        monkeypatch.setattr(layers, "has_kernel", lambda x, has_kernel=has_kernel: has_kernel)
        torch.compiler.reset()
        function = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
        results.append(with_gradient(function, x, dout))
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [2048, 5461, 14_336])
def test_on_a_gpu_at_full_size(width, dtype):
    assert_right(random(4096, 2 * width, dtype=dtype, scale=3.0), random(4096, width, dtype=dtype))


@pytest.mark.gpu
def test_beyond_two_to_the_31_numbers():
    rows, width = 2**31 // 4096 + 8, 2048
    gate_up = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    gate_up[-3:] = random(3, 2 * width, dtype=torch.bfloat16)
    dout = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
    out, gradient = with_gradient(kernels.swiglu, gate_up, dout)
    few_out, few_gradient = with_gradient(kernels.swiglu, gate_up[-3:], dout[-3:])
    assert torch.equal(out[-3:], few_out) and torch.equal(gradient[-3:], few_gradient)
    assert few_out.any() and not out[:-3].any() and not gradient[:-3].any()
