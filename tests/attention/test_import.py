"""Triton may be missing: all but the kernels written in it imports and runs, and they are refused in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOOR = """
import sys
sys.modules["triton"] = None
import torch
from flashtrain.kernels.attention import AttentionSpec, Intervals, attention, choose, refusal, support_table
torch.ops.flashtrain.flash_v2.default, torch.ops.flashtrain.flash_v2_backward.default
assert len(support_table()) > 5
"""

VARIANTS_RUN = """
inputs = [torch.randn(1, 4, 2, 16, requires_grad=True) for _ in range(3)]
results = []
for variant in ("standard", "sdpa_math", "sdpa_flash", "auto"):
    out = attention(*inputs, Intervals.causal(), variant=variant)
    results.append((out, *torch.autograd.grad(out.sum(), inputs)))
for result in results[1:]:
    torch.testing.assert_close(result, results[0])
"""

KERNELS_ARE_REFUSED = """
reason = "needs Triton, which is not installed (pip install triton)"
try:
    attention(*torch.randn(3, 1, 4, 2, 16), Intervals.causal(), variant="flash_v2")
except ValueError as error:
    assert str(error) == f"attention: flash_v2 {reason}; standard, sdpa_math, sdpa_flash would do", error
else:
    raise AssertionError("flash_v2 was not refused")
shape = dict(head_dim=64, num_q_heads=2, num_kv_heads=2, q_len=4, kv_len=4)
on_gpu = AttentionSpec.on("cuda", dtype=torch.bfloat16, intervals=Intervals.window(2, 0), needs_lse=True, **shape)
assert refusal("flash_v2", on_gpu) == refusal("flash_hopper", on_gpu) == refusal("flex", on_gpu) == reason
assert choose(on_gpu)[0] == "standard"
"""

THE_TRAINER_WORKS = """
import flashtrain.bench, flashtrain.check, flashtrain.fit
from functools import partial
from presets import preset
from flashtrain.model.gpt import GPT
options = preset("nano", num_layers=2, hidden_size=64, num_heads=4, vocab_size=100, windows=[8, None])
model = GPT(options, partial(attention, variant="auto"))
model(torch.randint(100, (2, 20))).sum().backward()
"""

PROGRAMS = {
    "variants run": VARIANTS_RUN,
    "kernels are refused": KERNELS_ARE_REFUSED,
    "the trainer works": THE_TRAINER_WORKS,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_without_triton(program):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", DOOR + program]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
