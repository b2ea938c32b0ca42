"""Runs flash_v2 and, on Hopper, flash_hopper, or one of them, on small problems that compute-sanitizer can watch.

    export PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/attention/sanitize.py [VARIANT]    (or --tool racecheck)

Without the caching allocator every tensor ends where its allocation ends.
"""

import sys

import torch
from test_parity import MASKS

from flashtrain.kernels.attention import AttentionSpec, make_qkv, ops, refusal
from flashtrain.kernels.attention.flash_v2.backward import backward
from flashtrain.kernels.attention.flash_v2.forward import forward
from flashtrain.kernels.attention.tiles import tiles

# mask, Sq, Sk, query heads, KV heads, D, Dv, softcap, dtype
PROBLEMS = [
    ("causal", 129, 129, 2, 2, 64, 64, 0.0, torch.bfloat16),
    ("full", 65, 200, 4, 2, 128, 128, 0.0, torch.float16),
    ("window(20, 3)", 200, 65, 3, 1, 72, 40, 0.0, torch.bfloat16),
    ("documents", 200, 200, 2, 1, 128, 64, 15.0, torch.bfloat16),
    ("sequences", 129, 200, 2, 2, 64, 64, 0.0, torch.float16),
    ("prefix in documents", 65, 65, 2, 2, 256, 256, 0.0, torch.bfloat16),
    ("chunks", 1, 129, 2, 2, 64, 64, 0.0, torch.bfloat16),
    ("causal", 65, 65, 2, 1, 40, 40, 0.0, torch.float32),
]


def run_flash_v2(q, k, v, intervals, softcap) -> None:
    for architecture in ("sm_90", "sm_80"):  # through TMA and through pointers
        launch = tiles(architecture, max(q.shape[-1], v.shape[-1]), q.dtype)
        out, lse = forward(q, k, v, intervals, 0.125, softcap, launch)
        gradients = map(torch.empty_like, (q, k, v))
        backward(*gradients, out, lse, q, k, v, out, lse, intervals, 0.125, softcap, launch)


def run_flash_hopper(q, k, v, intervals, softcap) -> None:
    if refusal("flash_hopper", AttentionSpec.of(q, k, v, intervals, softcap=softcap)) is None:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for attend in (ops.flash_hopper, ops.flash_hopper_deterministic):
            out, lse = attend(*leaves, intervals, 0.125, softcap)
            torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))


VARIANTS = {"flash_v2": run_flash_v2, "flash_hopper": run_flash_hopper}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("compute-sanitizer watches a CUDA GPU, and PyTorch sees none here; run this where there is one")
    for mask, Sq, Sk, Hq, Hkv, D, Dv, softcap, dtype in PROBLEMS:
        intervals = MASKS[mask](2, Sq, Sk).to("cuda")
        q, k, v = make_qkv(2, Sq, Sk, Hq, Hkv, D, Dv, dtype=dtype, device="cuda")
        for name in sys.argv[1:] or VARIANTS:
            VARIANTS[name](q, k, v, intervals, softcap)
            torch.cuda.synchronize()
        print(f"ran {mask} {Sq} x {Sk}, D {D}, {dtype}", flush=True)


if __name__ == "__main__":
    main()
