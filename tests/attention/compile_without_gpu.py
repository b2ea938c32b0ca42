"""Compiles flash_v2's kernels for one GPU target on a machine without any, through the real launchers.

Run as a script with TARGET and the fields of a Problem as key=value; prints one JSON object per kernel.
A process of its own, because Triton decides at import whether to interpret.
"""

import dataclasses
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

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.flash_v2.backward import backward
from flashtrain.kernels.attention.flash_v2.forward import forward
from flashtrain.kernels.attention.tiles import tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LENGTH = 4096
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


@dataclasses.dataclass
class Problem:
    head_dim: int = 128
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    mask: str = "causal"
    group_size: int = 1
    softcap: float = 0.0


def intervals(mask: str) -> Intervals:
    documents = torch.zeros(1, LENGTH, dtype=torch.int32)
    return {
        "full": Intervals.full(),
        "causal": Intervals.causal(),
        "window": Intervals.window(1000, 0),
        "documents": Intervals.causal().in_documents(documents),
    }[mask]


def compiled_kernels(target: str, problem: Problem) -> dict:
    """Runs the launchers on CPU tensors with every launch replaced by its compilation."""
    kernels = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(CompileOnlyDriver(TARGETS[target]))
    dtype, heads = getattr(torch, problem.dtype), 2 * problem.group_size
    v_head_dim = problem.v_head_dim or problem.head_dim
    q = torch.empty(1, LENGTH, heads, problem.head_dim, dtype=dtype)
    k = torch.empty(1, LENGTH, 2, problem.head_dim, dtype=dtype)
    v = torch.empty(1, LENGTH, 2, v_head_dim, dtype=dtype)
    out = torch.empty(1, LENGTH, heads, v_head_dim, dtype=dtype)
    lse = torch.empty(1, heads, LENGTH)
    launch = tiles(target, max(problem.head_dim, v_head_dim), dtype)
    mask = intervals(problem.mask)
    forward(q, k, v, mask, 0.125, problem.softcap, launch)
    backward(out, lse, q, k, v, out, lse, mask, 0.125, problem.softcap, launch, True, True)
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
    target, *settings = sys.argv[1:]
    fields = {name: default for name, default in vars(Problem()).items()}
    for setting in settings:
        name, value = setting.split("=")
        fields[name] = value if isinstance(fields[name], str) else float(value) if name == "softcap" else int(value)
    kernels = compiled_kernels(target, Problem(**fields))
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
