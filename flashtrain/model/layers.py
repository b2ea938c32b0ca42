"""The layers that know nothing of sequence: norms and MLPs; the dtype of activations, and who computes with them."""

import importlib.util
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.model.options import ModelOptions

# (function, *arguments) -> its result
Call = Callable[..., Tensor]

_TRITON = importlib.util.find_spec("triton") is not None


def has_kernel(x: Tensor) -> bool:
    """Return whether a kernel of ours takes `x`, where PyTorch would write out each step of what it computes."""
    return _TRITON and x.is_cuda and x.dtype != torch.float64


def activation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that matrix products of `x` run in: autocast's where it is on, else that of `x`."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


class LayerNorm(nn.LayerNorm):
    """LayerNorm computed in the dtype of its weight and returned in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in the dtype of its weight and returned in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def norm(options: ModelOptions, size: int) -> nn.Module:
    """Return the normalisation over a last dimension of `size` that `options` ask for."""
    if options.norm == "layernorm":
        return LayerNorm(size, eps=options.norm_eps, bias=options.bias)
    return RMSNorm(size, eps=options.norm_eps)


def gelu(x: Tensor) -> Tensor:
    """Return GPT-2's form of GELU, x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3).

    A compiler is given x sigmoid(2 u), which is the same: its tanh costs more than the memory that it goes through.
    Source: arXiv 1606.08415, section 2.
    """
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., W) of both side by side (..., 2 W). Source: arXiv 2002.05202."""
    if has_kernel(gate_up):
        # Imported when it is first launched: to import Triton is slow, and settles whether it interprets.
        from flashtrain.kernels.swiglu import swiglu as by_kernel

        return by_kernel(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class GeluMLP(nn.Module):
    """y = down(gelu(up(x))); `call` calls what follows up."""

    def __init__(self, options: ModelOptions, call: Call):
        super().__init__()
        self._call = call
        self.up = nn.Linear(options.hidden_size, options.mlp_hidden_size, bias=options.bias)
        self.down = nn.Linear(options.mlp_hidden_size, options.hidden_size, bias=options.bias)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self._call(self._activate_and_project, self.up(x_BSC))

    def _activate_and_project(self, up: Tensor) -> Tensor:
        return self.down(gelu(up))


class SwigluMLP(nn.Module):
    """y = down(swiglu(gate(x), up(x))), gate and up in one matrix product; `call` calls what follows it."""

    def __init__(self, options: ModelOptions, call: Call):
        super().__init__()
        self._call = call
        self.gate_up = nn.Linear(options.hidden_size, 2 * options.mlp_hidden_size, bias=options.bias)
        self.down = nn.Linear(options.mlp_hidden_size, options.hidden_size, bias=options.bias)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self._call(self._activate_and_project, self.gate_up(x_BSC))

    def _activate_and_project(self, gate_up: Tensor) -> Tensor:
        return self.down(swiglu(gate_up))


def mlp(options: ModelOptions, call: Call) -> nn.Module:
    """Return the MLP that `options` ask for, in which `call` calls what follows the first product."""
    return GeluMLP(options, call) if options.mlp == "gelu" else SwigluMLP(options, call)
