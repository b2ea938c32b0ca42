"""The speed of training: tokens of whole optimizer steps over the time spent on steps and nothing else."""

import time
from collections.abc import Callable


class SpeedMeter:
    """Tokens/s from lap to lap, without the time between `pause` and `resume` (validation, checkpoints).

    The first lap only starts the clock: called after the first steps, it leaves their compilation out. Whoever
    calls `lap` or `pause` has waited for the device, or the time belongs to other steps.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._lap: tuple[int, float] | None = None
        self._pause_start = 0.0
        self._paused_seconds = 0.0
        self._steps, self._seconds = 0, 0.0

    def lap(self, step: int) -> float | None:
        """Return tokens/s since the last lap, `step` being the steps done by now; None for the first lap."""
        now = self._clock()
        previous, self._lap = self._lap, (step, now)
        paused, self._paused_seconds = self._paused_seconds, 0.0
        if previous is None:
            return None
        steps, seconds = step - previous[0], now - previous[1] - paused
        self._steps += steps
        self._seconds += seconds
        return steps * self._tokens_per_step / seconds

    def pause(self) -> None:
        self._pause_start = self._clock()

    def resume(self) -> None:
        self._paused_seconds += self._clock() - self._pause_start

    def average(self) -> float | None:
        """Return tokens/s over all laps; None before the second."""
        return self._steps * self._tokens_per_step / self._seconds if self._steps else None

    def seconds_for(self, steps: int) -> float | None:
        """Return how long `steps` more steps take at the average speed; None before the second lap."""
        return steps * self._seconds / self._steps if self._steps else None
