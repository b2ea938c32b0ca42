"""What a call to attention asks for, as plain values.

Made from tensors or, before any tensor exists, from a configuration. Who can serve it is said in limits.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .intervals import Intervals


def _triton_version() -> int | None:
    """Read, not imported: an import of Triton is slow, and settles whether it interprets."""
    package = importlib.util.find_spec("triton")
    if package is None:
        return None
    major, minor = re.search(r"__version__ = .(\d+)\.(\d+)", Path(package.origin).read_text()).groups()
    return 100 * int(major) + int(minor)


_TRITON = _triton_version()


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about a call that decides which variants can serve it. Build one with `on` or `of`.

    `sm` is the CUDA compute capability as in sm_90, `cudnn_version` cuDNN's number (91900 is 9.19.0) and `triton`
    the version of Triton (306 is 3.6), None where there is none; `interpreted` says that Triton interprets its
    kernels (TRITON_INTERPRET=1), `fixed_cublas` that cuBLAS's products have the same bits every run
    (CUBLAS_WORKSPACE_CONFIG), `torch_deterministic` that PyTorch may run deterministic algorithms alone. With that,
    or where the call asks for it, output and gradients are `deterministic`: of the same bits every run.
    """

    device_type: str
    sm: int | None
    cudnn_version: int | None
    triton: int | None
    interpreted: bool
    fixed_cublas: bool
    torch_deterministic: bool
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    num_q_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    intervals: Intervals
    softcap: float
    needs_lse: bool
    needs_grad: bool
    deterministic: bool

    @classmethod
    def on(
        cls,
        device: torch.device | str,
        *,
        dtype: torch.dtype,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        q_len: int,
        kv_len: int,
        intervals: Intervals,
        v_head_dim: int | None = None,
        softcap: float = 0.0,
        needs_lse: bool = False,
        needs_grad: bool = True,
        deterministic: bool = False,
    ) -> AttentionSpec:
        """The spec of a call on `device`, whose architecture and libraries are read here, and PyTorch's settings."""
        device = torch.device(device)
        sm, cudnn_version, interpreted, fixed_cublas = _device_facts(device)
        torch_deterministic = _torch_deterministic()
        return cls(
            device_type=device.type,
            sm=sm,
            cudnn_version=cudnn_version,
            triton=_TRITON,
            interpreted=interpreted,
            fixed_cublas=fixed_cublas,
            torch_deterministic=torch_deterministic,
            dtype=dtype,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            intervals=intervals.at(q_len, kv_len),
            softcap=softcap,
            needs_lse=needs_lse,
            needs_grad=needs_grad,
            deterministic=deterministic or torch_deterministic,
        )

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        intervals: Intervals,
        *,
        softcap: float = 0.0,
        needs_lse: bool = False,
        deterministic: bool = False,
    ) -> AttentionSpec:
        """The spec of a call with q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv)."""
        return cls.on(
            q.device,
            dtype=q.dtype,
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            num_q_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            q_len=q.shape[1],
            kv_len=k.shape[1],
            intervals=intervals,
            softcap=softcap,
            needs_lse=needs_lse,
            needs_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
            deterministic=deterministic,
        )


# A constant for the graph: torch.compile cannot trace these questions, and their answers do not change.
@torch.compiler.assume_constant_result
def _device_facts(device: torch.device) -> tuple[int | None, int | None, bool, bool]:
    """(sm, cudnn_version, interpreted, fixed_cublas); no tuples within: torch 2.11 cannot compare those in a graph."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    fixed_cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
    if device.type != "cuda" or not torch.cuda.is_available():
        return None, None, interpreted, fixed_cublas
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.backends.cudnn.version(), interpreted, fixed_cublas


# Not to be traced either; where the answer changes, torch.compile makes a graph anew.
@torch.compiler.assume_constant_result
def _torch_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
