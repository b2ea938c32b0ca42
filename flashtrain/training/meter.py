"""What training costs: tokens/s of whole optimizer steps over the time spent on steps and nothing else."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Speed(NamedTuple):
    tokens_per_second: float
    data_wait: float
    """The share of the time, in [0, 1], that the loop waited for batches; the device may have been at work then."""


class SpeedMeter:
    """The speed from lap to lap, without the time between `pause` and `resume` (validation, checkpoints).

    The first lap only starts the clock: called after the first steps, it leaves their compilation out. A lap waits
    for nothing. It is right as long as at every lap the device is behind the host by the same step, the last (see
    `FaultFlag.watch`), and at every pause by none.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._lap: tuple[int, float] | None = None
        self._pause_start = self._wait_start = 0.0
        self._paused_seconds = self._waited_seconds = 0.0
        self._steps, self._seconds = 0, 0.0

    def lap(self, step: int) -> Speed | None:
        """Return the speed since the last lap, `step` being the steps taken by now; None for the first lap."""
        now = self._clock()
        previous, self._lap = self._lap, (step, now)
        paused, self._paused_seconds = self._paused_seconds, 0.0
        waited, self._waited_seconds = self._waited_seconds, 0.0
        if previous is None:
            return None
        steps, seconds = step - previous[0], now - previous[1] - paused
        self._steps += steps
        self._seconds += seconds
        return Speed(steps * self._tokens_per_step / seconds, waited / seconds)

    def restart(self) -> None:
        """Leave out all since the last lap; the next is a first one."""
        self._lap = None

    def pause(self) -> None:
        self._pause_start = self._clock()

    def resume(self) -> None:
        self._paused_seconds += self._clock() - self._pause_start

    def start_waiting(self) -> None:
        """The loop asks for the next batch."""
        self._wait_start = self._clock()

    def stop_waiting(self) -> None:
        """The loop has it."""
        self._waited_seconds += self._clock() - self._wait_start

    def average(self) -> float | None:
        """Return tokens/s over all laps; None before the second."""
        return self._steps * self._tokens_per_step / self._seconds if self._steps else None

    def state_dict(self) -> dict[str, float]:
        """What `average` is of; a meter that loads it goes on from there."""
        return {"steps": self._steps, "seconds": self._seconds}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        self._steps, self._seconds = state_dict["steps"], state_dict["seconds"]

    def seconds_for(self, steps: int) -> float | None:
        """Return how long `steps` more steps take at the average speed; None before the second lap."""
        return steps * self._seconds / self._steps if self._steps else None
