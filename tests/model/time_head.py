"""Times the head's training loss on a GPU beside whole logits and Liger-Kernel's fused loss, forward and backward.

    PYTHONPATH=. python tests/model/time_head.py        (half a minute on an H200; liger-kernel is optional)

32,768 rows of bf16 under autocast, fp32 weights; medians of interleaved rounds, and the peak memory beyond the inputs.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from flashtrain.model.head import summed_cross_entropy
from flashtrain.performance.timing import CudaClock, interleaved

ROWS, VOCAB_SIZE, PADDED = 32_768, 50_257, 50_304
WIDTHS = (768, 2048)
CHUNKS = (2048, 4096, 8192, 16_384)


@functools.partial(torch.compile, dynamic=False)
def whole_logits(hidden_NC, weight_VC, targets_N):
    return F.cross_entropy(F.linear(hidden_NC, weight_VC)[:, :VOCAB_SIZE].float(), targets_N, reduction="sum")


def losses():
    """Each way to the summed loss, by name."""
    ours = {
        f"ours, chunks of {chunk:,}": functools.partial(summed_cross_entropy, vocab_size=VOCAB_SIZE, chunk_size=chunk)
        for chunk in CHUNKS
    }
    ways = ours | {"whole logits, torch.compile": whole_logits}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError:
        return ways
    return ways | {"Liger-Kernel": functools.partial(liger_fused_linear_cross_entropy, reduction="sum")}


def step(loss, hidden_NC, weight_VC, targets_N):
    with torch.autocast("cuda", torch.bfloat16):
        value = loss(hidden_NC, weight_VC, targets_N)
    torch.autograd.grad(value, (hidden_NC, weight_VC))


def peak_gib(call) -> float:
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("the head is timed on a CUDA GPU, and PyTorch sees none here; run this where there is one")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROWS:,} rows, {PADDED:,} columns")
    for width in WIDTHS:
        hidden_NC = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight_VC = (torch.randn(PADDED, width, device="cuda") * 0.02).requires_grad_()
        targets_N = torch.randint(VOCAB_SIZE, (ROWS,), device="cuda")
        inputs = hidden_NC, weight_VC, targets_N
        calls = {name: functools.partial(step, loss, *inputs) for name, loss in losses().items()}
        peaks = {name: peak_gib(call) for name, call in calls.items()}
        stages = {name: (lambda call=call: call) for name, call in calls.items()}
        for name, timing in interleaved(stages, CudaClock(), warmup=2, rounds=8, seed=0).items():
            print(f"width {width:5} {name:28} {timing.median * 1e3:7.2f} ms {peaks[name]:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
