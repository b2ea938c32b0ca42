"""Compiles our kernels for one GPU target on a machine without any, through the real launchers.

Run as a script with TARGET and the fields of Problems as JSON, one object by name; prints one JSON object per
problem and kernel. A process of its own, because Triton decides at import whether to interpret; one for all problems of
a target, because kernels that problems share compile once.
"""

import contextlib
import dataclasses
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from sass import unset_registers
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flashtrain.kernels import cross_entropy, swiglu
from flashtrain.kernels.attention import Intervals, flash_v1
from flashtrain.kernels.attention.flash_hopper import backward as flash_hopper_backward
from flashtrain.kernels.attention.flash_hopper import forward as flash_hopper
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


@dataclasses.dataclass
class Problem:
    variant: str = "flash_v2"
    head_dim: int = 128
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    mask: str = "causal"
    group_size: int = 1
    softcap: float = 0.0
    in_order: bool = False
    length: int = 4096

    def intervals(self) -> Intervals:
        documents = torch.zeros(1, self.length, dtype=torch.int32)
        return {
            "full": Intervals.full(),
            "causal": Intervals.causal(),
            "window": Intervals.window(1000, 0),
            "documents": Intervals.causal().in_documents(documents),
        }[self.mask]


def launch(target: str, problem: Problem) -> None:
    """Calls the launchers on CPU tensors."""
    dtype, heads, length = getattr(torch, problem.dtype), 2 * problem.group_size, problem.length
    if problem.variant == "cross_entropy":
        cross_entropy.NUM_WARPS = cross_entropy.LANES // TARGETS[target].warp_size
        targets = torch.zeros(2, dtype=torch.int64)
        cross_entropy.nll_and_gradient_(torch.empty(2, length, dtype=dtype), targets, length - 47, ignored=-100)
        return
    if problem.variant == "swiglu":
        gate_up = torch.empty(2, 2 * length, dtype=dtype)
        torch.ops.flashtrain.swiglu_backward(swiglu.swiglu(gate_up), gate_up)
        return
    v_head_dim = problem.v_head_dim or problem.head_dim
    q = torch.empty(1, length, heads, problem.head_dim, dtype=dtype)
    k = torch.empty(1, length, 2, problem.head_dim, dtype=dtype)
    v = torch.empty(1, length, 2, v_head_dim, dtype=dtype)
    out = torch.empty(1, length, heads, v_head_dim, dtype=dtype)
    lse = torch.empty(1, heads, length)
    mask = problem.intervals()
    if problem.variant == "flash_v1":
        sram = SHARED_MEMORY[target] // 4
        flash_v1.forward(q, k, v, mask, 0.125, sram)
        flash_v1.backward(q, k, v, out, lse, q, k, v, out, lse, mask, 0.125, sram)
        return
    if problem.variant == "flash_hopper":
        flash_hopper.forward(q, k, v, mask, 0.125, problem.softcap)
        return
    if problem.variant == "flash_hopper_backward":
        options = {"scale": 0.125, "softcap": problem.softcap, "in_order": problem.in_order}
        flash_hopper_backward.backward(q, k, v, out, lse, q, k, v, out, lse, mask, **options)
        return
    rows = tiles(target, max(problem.head_dim, v_head_dim), dtype)
    forward(q, k, v, mask, 0.125, problem.softcap, rows)
    backward(q, k, v, out, lse, q, k, v, out, lse, mask, 0.125, problem.softcap, rows)


@functools.cache
def machine_code(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


def report_on(kernel, said: str, target: str) -> dict[str, int | list]:
    """What a compiled kernel needs and holds: bytes, numbers of instructions in its assembly, the registers that its
    warps ask for and, of what ptxas `said`, bytes spilled and codes on WGMMA, C751x, most of which make one wait; where
    warps have roles, reads of registers left unset."""
    report = {"shared": kernel.metadata.shared, "allowed": SHARED_MEMORY[target]}
    if "amdgcn" in kernel.asm:
        assembly = kernel.asm["amdgcn"]
        report["spilled"] = int(re.search(r"\.private_segment_fixed_size: +(\d+)", assembly).group(1))
        report["atomics"] = assembly.count("_atomic_")
    else:
        assembly = kernel.asm["ptx"]
        report["spilled"] = int(re.search(r"(\d+) bytes spill stores", said).group(1))
        report["waits"] = sorted(set(re.findall(r"C751\d", said)))
        asked = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", assembly)
        report["registers"] = sorted(set(map(int, asked)))
        report["unset"] = unset_registers(machine_code(kernel.asm["cubin"])) if asked else []
        report["atomics"] = len(re.findall(r"\b(?:atom|red|cp\.reduce)\.", assembly))
        report["wgmma"] = assembly.count("wgmma.mma_async")
        report["tma"] = assembly.count("cp.async.bulk.tensor")
    return report


def main() -> None:
    target, problems = sys.argv[1], json.loads(sys.argv[2])
    kernels, said = {}, {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        said.setdefault(kernel.hash, output.getvalue())  # nothing of one that was compiled before
        kernels[self.fn.__name__] = kernel

    JITFunction.run = compile_only
    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(CompileOnlyDriver(TARGETS[target]))
    with tempfile.TemporaryDirectory() as empty, knobs.cache.scope():
        knobs.cache.dir = empty  # ptxas says nothing of what was compiled by another process
        for name, fields in problems.items():
            kernels.clear()
            launch(target, Problem(**fields))
            for kernel_name, kernel in kernels.items():
                report = report_on(kernel, said[kernel.hash], target)
                print(json.dumps({"problem": name, "kernel": kernel_name, **report}), flush=True)


if __name__ == "__main__":
    main()
