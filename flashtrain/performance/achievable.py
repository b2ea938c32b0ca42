"""What this machine's GPU reaches: bytes per second of a copy, FLOP per second of a large matrix product."""

import torch

from flashtrain.performance.roofline import Rates
from flashtrain.performance.timing import Clock, interleaved

COPY_BYTES = 2**30
MATRIX_SIZE = 8192


def achievable(clock: Clock, dtype: torch.dtype, *, device: str, warmup: int, rounds: int, seed: int) -> Rates:
    """Measured on normal numbers, since clocks depend on the data; a copy reads and writes, and both count."""
    generator = torch.Generator(device).manual_seed(seed)
    source = torch.randn(COPY_BYTES // dtype.itemsize, generator=generator, device=device, dtype=dtype)
    target = torch.empty_like(source)
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator, device=device, dtype=dtype) for _ in range(2))
    stages = {"copy": lambda: lambda: target.copy_(source), "product": lambda: lambda: a @ b}
    found = interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed)
    return Rates(
        bandwidth=2 * COPY_BYTES / found["copy"].median,
        flops=2 * MATRIX_SIZE**3 / found["product"].median,
        measured=True,
    )
