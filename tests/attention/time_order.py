"""Times flash_hopper's backward in order, the deterministic one, beside the one in no order and flash_v2's.

    PYTHONPATH=. python tests/attention/time_order.py [LENGTH ...]        (a minute on an H200; takes a GPU of sm_90)

At 2,048, 8,192 and 32,768 unless lengths are given; 32,768 tokens of bf16, hidden size 2,048; TFLOP/s by the medians of
interleaved rounds.
"""

import functools
import itertools
import statistics
import sys

import torch

from flashtrain.kernels.attention import Intervals, make_qkv, ops
from flashtrain.performance.timing import CudaClock, interleaved

TOKENS, HIDDEN_SIZE = 32_768, 2_048
HEAD_DIMS, LENGTHS = (64, 128), [2_048, 8_192, 32_768]
MASKS = {"causal": Intervals.causal(), "full": Intervals.full()}
WAYS = {"in no order": ops.flash_hopper, "in order": ops.flash_hopper_deterministic, "flash_v2": ops.flash_v2}


def backward(attend, intervals, q, k, v, dout):
    """What computes the gradients of one forward, again and again."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = attend(*leaves, intervals, q.shape[-1] ** -0.5)
    return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("flash_hopper is timed on a GPU of sm_90, and PyTorch sees none here; run this where there is one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    of_fastest, lengths = [], list(map(int, sys.argv[1:])) or LENGTHS
    for head_dim, mask, length in itertools.product(HEAD_DIMS, MASKS, lengths):
        batch, heads = TOKENS // length, HIDDEN_SIZE // head_dim
        inputs = make_qkv(batch, length, length, heads, heads, head_dim, dtype=torch.bfloat16, device="cuda")
        dout = torch.randn_like(inputs[0])
        calls = {way: backward(attend, MASKS[mask], *inputs, dout) for way, attend in WAYS.items()}
        stages = {way: (lambda call=call: call) for way, call in calls.items()}
        timings = interleaved(stages, CudaClock(), warmup=2, rounds=9, seed=0)
        pairs = length * (length + 1) // 2 if mask == "causal" else length**2
        speeds = {way: 10 * batch * heads * pairs * head_dim / t.median / 1e12 for way, t in timings.items()}
        of_fastest.append(speeds["in order"] / speeds["in no order"])
        print(f"D {head_dim:3} {mask:6} {length:6,}", *(f"{way} {speed:.0f}" for way, speed in speeds.items()),
              f"({of_fastest[-1]:.2f})", flush=True)  # fmt: skip
    print(f"geometric mean {statistics.geometric_mean(of_fastest):.3f}, least {min(of_fastest):.3f}")


if __name__ == "__main__":
    main()
