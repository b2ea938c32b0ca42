"""What this machine's GPU reaches: bytes per second of a copy, FLOP per second of a large matrix product."""

import torch

from flashtrain.performance.roofline import Rates
from flashtrain.performance.timing import Clock, Stage, Timing, interleaved

COPY_BYTES = 2**30
MATRIX_SIZE = 8192


def achievable(clock: Clock, dtype: torch.dtype, *, device: str, warmup: int, rounds: int, seed: int) -> Rates:
    """Measured on normal numbers, since clocks depend on the data; a copy reads and writes, and both count."""
    generator = torch.Generator(device).manual_seed(seed)
    source = torch.randn(COPY_BYTES // dtype.itemsize, generator=generator, device=device, dtype=dtype)
    target = torch.empty_like(source)
    stages = {"copy": lambda: lambda: target.copy_(source), "product": _product(generator, dtype)}
    found = interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed)
    return Rates(
        bandwidth=2 * COPY_BYTES / found["copy"].median,
        flops=_flops(found["product"]),
        measured=True,
    )


def product_rate(clock: Clock, dtype: torch.dtype, *, device: str, warmup: int, rounds: int, seed: int) -> float:
    """FLOP per second of that product alone, measured as `achievable` does."""
    stages = {"product": _product(torch.Generator(device).manual_seed(seed), dtype)}
    found = interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed)
    return _flops(found["product"])


def _product(generator: torch.Generator, dtype: torch.dtype) -> Stage:
    a, b = (
        torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator, device=generator.device, dtype=dtype)
        for _ in range(2)
    )
    return lambda: lambda: a @ b


def _flops(timing: Timing) -> float:
    return 2 * MATRIX_SIZE**3 / timing.median
