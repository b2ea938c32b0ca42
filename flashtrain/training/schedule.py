"""The learning rate of each step, as a pure function of the step: resuming needs no scheduler state."""

import math
from dataclasses import dataclass


@dataclass
class ScheduleOptions:
    """Linear warm-up, then half a cosine down to a fraction of the peak (arXiv 1608.03983, without restarts).

    The fields are the keys of conf/schedule/*.yaml.
    """

    warmup_fraction: float
    """Share of the run in which the learning rate rises to its peak."""
    final_fraction: float
    """Learning rate of the last step, as a fraction of the peak."""

    def validate(self) -> list[str]:
        """Return every problem as one sentence."""
        return [
            f"schedule.{name}={value} is not a fraction; give a number from 0 to 1"
            for name in ("warmup_fraction", "final_fraction")
            if not 0 <= (value := getattr(self, name)) <= 1
        ]


def learning_rate_factor(step: int, num_steps: int, options: ScheduleOptions) -> float:
    """Return the learning rate of update `step` (from 0) as a fraction of the peak.

    No step is wasted at zero: of W warm-up steps the first has 1 / W and the last 1; the run's last step has
    `final_fraction`.
    """
    warmup_steps = round(options.warmup_fraction * num_steps)
    done = step + 1
    if done <= warmup_steps:
        return done / warmup_steps
    progress = (done - warmup_steps) / (num_steps - warmup_steps)
    return options.final_fraction + (1 - options.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
