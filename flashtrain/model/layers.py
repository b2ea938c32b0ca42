"""The layers that know nothing of sequence: norms and MLPs, and the dtype that activations travel in."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashtrain.model.options import ModelOptions


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


class GeluMLP(nn.Module):
    """y = down(gelu(up(x))), with GPT-2's tanh form of GELU."""

    def __init__(self, options: ModelOptions):
        super().__init__()
        self.up = nn.Linear(options.hidden_size, options.mlp_hidden_size, bias=options.bias)
        self.down = nn.Linear(options.mlp_hidden_size, options.hidden_size, bias=options.bias)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSC), approximate="tanh"))


class SwigluMLP(nn.Module):
    """y = down(silu(gate(x)) * up(x)), gate and up in one matrix product. Source: arXiv 2002.05202."""

    def __init__(self, options: ModelOptions):
        super().__init__()
        self.gate_up = nn.Linear(options.hidden_size, 2 * options.mlp_hidden_size, bias=options.bias)
        self.down = nn.Linear(options.mlp_hidden_size, options.hidden_size, bias=options.bias)

    def forward(self, x_BSC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BSC).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def mlp(options: ModelOptions) -> nn.Module:
    """Return the MLP that `options` ask for."""
    return GeluMLP(options) if options.mlp == "gelu" else SwigluMLP(options)
