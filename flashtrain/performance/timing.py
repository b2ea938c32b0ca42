"""How long calls take: readings in interleaved rounds, so that a drift of the device meets all calls alike.

What is timed is the caller's; a clock says how one call is read on a device.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

Stage = Callable[[], Callable[[], object]]
"""Prepares one call, outside of its reading, and returns the call to read."""


class Clock(Protocol):
    def read(self, call: Callable[[], object]) -> Callable[[], float]:
        """Run `call` and return a function that gives its seconds; it may wait for the device, so ask it last."""


class HostClock:
    """Wall time, for calls that are over when they return."""

    def read(self, call: Callable[[], object]) -> Callable[[], float]:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return lambda: seconds


class Stopwatch:
    """Wall time from an idle device to one, for what the host and the device do together."""

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"
        self._start: float

    def start(self) -> None:
        self._wait()
        self._start = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since the start."""
        self._wait()
        return time.perf_counter() - self._start

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class OwnClock:
    """The seconds that a call returns, for one that times itself."""

    def read(self, call: Callable[[], float]) -> Callable[[], float]:
        seconds = call()
        return lambda: seconds


QUEUEING_CYCLES = 2_000_000
"""A millisecond or so: longer than the host takes to queue a call of a few kernels."""


class CudaClock:
    """Time on the current CUDA device between two events, from a cold L2 cache.

    No reading waits for the device, which is kept busy until a call is queued, so that launches cost no time.
    """

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._more_than_l2 = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda")

    def read(self, call: Callable[[], object]) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._more_than_l2.zero_()
        torch.cuda._sleep(QUEUEING_CYCLES)
        start.record()
        call()
        end.record()

        def seconds() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return seconds


@dataclass(frozen=True)
class Timing:
    """The readings of one call, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the readings lie below the first, a quarter above the second."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Half of the readings lie within this share of the median."""
        return max(abs(quartile - self.median) for quartile in self.quartiles) / self.median


def _reraise(name: str, error: Exception) -> None:
    raise error


def interleaved(
    stages: Mapping[str, Stage],
    clock: Clock,
    *,
    warmup: int,
    rounds: int,
    seed: int,
    on_error: Callable[[str, Exception], None] = _reraise,
) -> dict[str, Timing]:
    """Read every call once a round, in an order shuffled anew for each; `warmup` rounds before are not read.

    `on_error` is told the name of a call that raises, and what. Where it returns, that call has no timing and is not
    prepared again; the others go on.
    """
    order, shuffler = list(stages), random.Random(seed)
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in stages}
    timings: dict[str, Timing] = {}

    def attempt(name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            order.remove(name)
            on_error(name, error)

    def warm(name: str) -> None:
        stages[name]()()

    def read(name: str) -> None:
        # Nothing keeps the call, so that what it holds is free before the next is prepared.
        readings[name].append(clock.read(stages[name]()))

    def ask(name: str) -> None:
        timings[name] = Timing(tuple(seconds() for seconds in readings[name]))

    for _ in range(warmup):
        for name in tuple(order):
            attempt(name, partial(warm, name))
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in tuple(order):
            attempt(name, partial(read, name))
    for name in [name for name in stages if name in order]:
        attempt(name, partial(ask, name))
    return timings
