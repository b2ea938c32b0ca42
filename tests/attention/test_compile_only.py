"""Every architecture's kernels compile on a machine without a GPU, fit its shared memory, and hardly spill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_without_gpu.py")
ROOT = SCRIPT.parents[2]

CASES = [
    ("sm_80", "64", "float16", "4", "1000", "0"),
    ("sm_90", "64", "bfloat16"),
    ("sm_90", "128", "bfloat16"),
    ("sm_90", "72", "float16", "4", "1000", "0"),
    ("sm_90", "256", "bfloat16"),
    ("sm_100", "128", "bfloat16"),
    ("gfx942", "128", "bfloat16"),
    ("sm_90", "64", "float32"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_compiles_and_fits(case):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    run = subprocess.run([sys.executable, SCRIPT, *case], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert [kernel["kernel"] for kernel in kernels] == [
        "_fwd_kernel",
        "_bwd_delta_kernel",
        "_bwd_dkdv_kernel",
        "_bwd_dq_kernel",
    ]
    for kernel in kernels:
        assert kernel["shared"] <= kernel["allowed"], kernel
        # A few registers' worth outside the inner loop is harmless; an accumulator in memory is not.
        may_spill = case[0] != "sm_90" or (case[1] != "64" and kernel["kernel"] == "_bwd_dkdv_kernel")
        assert kernel.get("spilled", 0) <= (128 if may_spill else 0), kernel
        if case[0] == "sm_90" and case[2] != "float32" and kernel["kernel"] != "_bwd_delta_kernel":
            assert kernel["tma"] > 0 and kernel["wgmma"] > 0, kernel
