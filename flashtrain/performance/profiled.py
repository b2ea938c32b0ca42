"""The program that counters.py has Nsight Compute run: calls of attention, each in a range of the profiler of its own.

A range is a marker kernel, the kernels of the call, a marker kernel, and a kernel that makes L2 write what the call
left there. All else, the check of the results and the first calls that compile kernels among it, lies outside.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flashtrain.kernels.attention import Intervals
from flashtrain.performance.attention import Problem, measure
from flashtrain.performance.masks import Masks
from flashtrain.performance.no_speed import NoSpeed

MARKER = "spin_kernel"
"""In the name of the kernel of `torch.cuda._sleep`, which no variant of attention launches."""


class ProfilerClock:
    """A `flashtrain.performance.timing.Clock` that shows a call to the profiler; its seconds are NaN."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._more_than_l2 = torch.zeros(l2_bytes, dtype=torch.float32, device="cuda")
        self.ranges = 0
        """Begun so far."""

    def read(self, call: Callable[[], object]) -> Callable[[], float]:
        self._clean_l2()
        torch.cuda.synchronize()
        self.ranges += 1
        with torch.cuda.profiler.profile():
            try:
                torch.cuda._sleep(1)
                call()
            finally:
                torch.cuda._sleep(1)
                self._clean_l2()
                torch.cuda.synchronize()
        return lambda: math.nan

    def _clean_l2(self) -> None:
        """Fill L2 by reading, so that it has to write what it holds of other memory."""
        self._more_than_l2.sum()


def outcomes(
    problem: Problem,
    intervals: Intervals,
    variants: list[str],
    passes: list[str],
    clock: ProfilerClock,
    *,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> list[dict[str, object]]:
    """Read each call once: its variant and pass, the ranges begun by its end, and why it has no range that counts."""
    found = []
    for pass_name in passes:
        for variant in variants:
            (one,) = measure(
                problem,
                intervals,
                [variant],
                [pass_name],
                clock,
                device=device,
                dtype=dtype,
                warmup=1,
                rounds=1,
                seed=seed,
            )
            reason = str(one.result) if isinstance(one.result, NoSpeed) else None
            found.append({"variant": variant, "pass": pass_name, "ranges": clock.ranges, "reason": reason})
    return found


def main(request: dict) -> None:
    """Run the calls that are asked for, on the current CUDA device, and write their outcomes."""
    problem, masks = Problem(**request["problem"]), Masks(**request["masks"])
    found = outcomes(
        problem,
        masks.intervals(problem.mask, problem.batch, problem.length, "cuda"),
        request["variants"],
        request["passes"],
        ProfilerClock(),
        device="cuda",
        dtype=getattr(torch, request["dtype"]),
        seed=request["seed"],
    )
    Path(request["outcomes"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
