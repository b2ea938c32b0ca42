"""How many tokens per second optimizer steps take in, of several systems by turns, and how much memory.

A system is an attention variant under our trainer, or a trainer of another package. What one raises is the reason that
it has no speed, and ends nothing; an interruption does.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Unsupported
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.timing import OwnClock, Stopwatch, Timing, interleaved

log = logging.getLogger(__name__)


class System(Protocol):
    tokens: int
    """Of a step."""
    flops_per_token: float | None
    """Of those that the masks show; None where they are not known."""
    predicted_bytes: int | None
    """The peak that was predicted; None where none was."""

    def take_round(self) -> float:
        """Take the steps of a round; return the mean seconds of those that are timed, from an idle device to one."""


@dataclass(frozen=True)
class StepSpeed:
    tokens: int
    """Of a step."""
    timing: Timing
    """Of a step: the mean of each round."""
    peak_bytes: int | None
    """The most that its tensors took of the GPU's memory at once; None on a CPU."""
    flops_per_token: float | None
    predicted_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.timing.median

    @property
    def flops(self) -> float | None:
        """Per second."""
        return None if self.flops_per_token is None else self.flops_per_token * self.tokens_per_second


@dataclass(frozen=True)
class Steps:
    """A system that is a function."""

    step: Callable[[], object]
    """Takes one optimizer step."""
    tokens: int
    device_type: str
    untimed: int
    """Steps at the start of a round that are not timed."""
    timed: int
    flops_per_token: None = None
    predicted_bytes: None = None

    def take_round(self) -> float:
        for _ in range(self.untimed):
            self.step()
        stopwatch = Stopwatch(self.device_type)
        stopwatch.start()
        for _ in range(self.timed):
            self.step()
        return stopwatch.stop() / self.timed


def measure(
    builders: Mapping[str, Callable[[], System]], *, device_type: str, rounds: int, seed: int
) -> dict[str, StepSpeed | NoSpeed]:
    """Build all systems, then let each take its steps once a round, in an order shuffled anew for each.

    All are built before any takes a step, since to build one may throw away what `torch.compile` has made of others;
    each is compiled by its first steps and stays so. When all rounds are over nothing of them is left.

    Raises UserError where one is raised in building.
    """
    contenders: dict[str, _Contender] = {}
    results: dict[str, StepSpeed | NoSpeed] = {}

    def drop(name: str, error: Exception) -> None:
        results[name] = NoSpeed.of(error)
        log.info("%s: %s", name, results[name])
        contenders.pop(name, None)

    for name, build in builders.items():
        try:
            contenders[name] = _Contender(name, build, device_type)
        except UserError:
            raise
        except Unsupported as refusal:
            results[name] = NoSpeed("refused", str(refusal).removeprefix(f"attention: {name} "))
        except Exception as error:
            drop(name, error)
    stages = {name: partial(contenders.__getitem__, name) for name in contenders}
    with _graphs_of_all(len(contenders)):
        timings = interleaved(stages, OwnClock(), warmup=0, rounds=rounds, seed=seed, on_error=drop)
    results |= {name: contenders[name].speed(timing) for name, timing in timings.items()}
    contenders.clear()
    torch.compiler.reset()
    _held_bytes(device_type)
    return {name: results[name] for name in builders}


class _Contender:
    """A system, and what it holds of the device's memory beside others."""

    def __init__(self, name: str, build: Callable[[], System], device_type: str) -> None:
        self._name = name
        self._device_type = device_type
        before = _held_bytes(device_type)
        self._system = build()
        self._own_bytes = _held_bytes(device_type) - before
        self._peak_bytes = 0

    def __call__(self) -> float:
        """Take a round and return the seconds of a step."""
        of_others = _held_bytes(self._device_type) - self._own_bytes
        if self._device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = self._system.take_round()
        log.info("%s: %s tokens/s", self._name, f"{self._system.tokens / seconds:,.0f}")
        if self._device_type == "cuda":
            self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated() - of_others)
        self._own_bytes = _held_bytes(self._device_type) - of_others
        return seconds

    def speed(self, timing: Timing) -> StepSpeed:
        peak = self._peak_bytes if self._device_type == "cuda" else None
        return StepSpeed(
            self._system.tokens, timing, peak, self._system.flops_per_token, self._system.predicted_bytes
        )


def _held_bytes(device_type: str) -> int:
    """What tensors hold of the GPU's memory once what nobody has is gone, the cache of free memory too; 0 on a CPU."""
    if device_type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@contextlib.contextmanager
def _graphs_of_all(systems: int) -> Iterator[None]:
    """Let as many systems be compiled of one code: beyond its limit torch.compile falls back to eager."""
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=limit * max(systems, 1)):
        yield
