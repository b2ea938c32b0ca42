"""Compiles flash_v2's kernels for one GPU target on a machine without any, through the real launchers.

Run as a script with TARGET HEAD_DIM DTYPE [GROUP_SIZE LEFT RIGHT]; prints one JSON object per kernel.
A process of its own, because Triton decides at import whether to interpret.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flashtrain.kernels.attention.flash_v2.backward import backward
from flashtrain.kernels.attention.flash_v2.forward import forward
from flashtrain.kernels.attention.tiles import tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}


class CompileOnlyDriver:
    """Stands in for a GPU's driver as far as compiling asks."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled_kernels(target: str, head_dim: int, dtype: torch.dtype, group_size=1, left=None, right=0) -> dict:
    """Runs the launchers on CPU tensors with every launch replaced by its compilation."""
    kernels = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(CompileOnlyDriver(TARGETS[target]))
    q = torch.empty(1, 4096, 2 * group_size, head_dim, dtype=dtype)
    k = torch.empty(1, 4096, 2, head_dim, dtype=dtype)
    lse = torch.empty(1, 2 * group_size, 4096)
    launch = tiles(target, head_dim, dtype)
    forward(q, k, k, left, right, 0.125, launch)
    backward(q, lse, q, k, k, q, lse, left, right, 0.125, launch, True, True)
    JITFunction.run = run
    return kernels


def spilled_bytes(ptx: str, target: str) -> int:
    program = "ptxas-blackwell" if target == "sm_100" else "ptxas"
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
        command = [ptxas, "-v", f"--gpu-name={gpu}", source, "-o", Path(folder, "kernel.cubin")]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", report).group(1))


def main() -> None:
    target, head_dim, dtype, *rest = sys.argv[1:]
    group_size, left, right = (None if x == "None" else int(x) for x in rest) if rest else (1, None, 0)
    kernels = compiled_kernels(target, int(head_dim), getattr(torch, dtype), group_size, left, right)
    for name, kernel in kernels.items():
        report = {"kernel": name, "shared": kernel.metadata.shared, "allowed": SHARED_MEMORY[target]}
        if "ptx" in kernel.asm:
            ptx = kernel.asm["ptx"]
            report |= {
                "spilled": spilled_bytes(ptx, target),
                "wgmma": ptx.count("wgmma.mma_async"),
                "tma": ptx.count("cp.async.bulk.tensor"),
            }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
