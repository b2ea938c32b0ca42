"""The learning rate of each step, as a pure function of the step: resuming needs no scheduler state."""

import math
from dataclasses import dataclass

SHAPES = ("linear", "1-sqrt")


@dataclass
class ScheduleOptions:
    """Linear warm-up, then what the schedule's own class says; the fields are the keys of conf/schedule/*.yaml.

    Every number is a fraction, so that a schedule fits a run of any length.
    """

    name: str
    """Which of `SCHEDULES` it is."""
    warmup_fraction: float
    """Share of the run in which the learning rate rises to its peak."""

    def validate(self) -> list[str]:
        """Return every problem as one sentence."""
        return [
            f"schedule.{name}={value} is not a fraction; give a number from 0 to 1"
            for name, value in vars(self).items()
            if isinstance(value, float) and not 0 <= value <= 1
        ]

    def after_warmup(self, done: int, num_steps: int, warmup_steps: int) -> float:
        """Return the fraction of the peak of the update that makes it `done` updates, more than `warmup_steps`."""
        raise NotImplementedError


@dataclass
class ConstantOptions(ScheduleOptions):
    """Stays at the peak."""

    def after_warmup(self, done: int, num_steps: int, warmup_steps: int) -> float:
        return 1.0


@dataclass
class CosineOptions(ScheduleOptions):
    """Half a cosine down from the peak (arXiv 1608.03983, without restarts)."""

    final_fraction: float
    """Learning rate of the last step, as a fraction of the peak."""

    def after_warmup(self, done: int, num_steps: int, warmup_steps: int) -> float:
        progress = (done - warmup_steps) / (num_steps - warmup_steps)
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class WsdOptions(ScheduleOptions):
    """Warm-up, stable, decay (arXiv 2404.06395): stays at the peak, then falls over the last part of the run."""

    decay_fraction: float
    """Share of the run in which the learning rate falls."""
    decay_shape: str
    """linear, or 1-sqrt, which ends at a lower loss in arXiv 2405.18392."""
    final_fraction: float
    """Learning rate of the last step, as a fraction of the peak."""

    def validate(self) -> list[str]:
        problems = super().validate()
        if not problems and self.warmup_fraction + self.decay_fraction > 1:
            problems.append(
                f"schedule.warmup_fraction={self.warmup_fraction} and schedule.decay_fraction={self.decay_fraction} "
                "are more than the whole run; lower one of them"
            )
        if self.decay_shape not in SHAPES:
            problems.append(f"schedule.decay_shape={self.decay_shape} is not one of {', '.join(SHAPES)}")
        return problems

    def after_warmup(self, done: int, num_steps: int, warmup_steps: int) -> float:
        # Both shares rounded up may be one step more than there are.
        decay_steps = min(round(self.decay_fraction * num_steps), num_steps - warmup_steps)
        steps_left = num_steps - done
        if steps_left >= decay_steps:
            return 1.0
        progress = 1 - steps_left / decay_steps
        fallen = math.sqrt(progress) if self.decay_shape == "1-sqrt" else progress
        return self.final_fraction + (1 - self.final_fraction) * (1 - fallen)


SCHEDULES = {"constant": ConstantOptions, "cosine": CosineOptions, "wsd": WsdOptions}


def learning_rate_factor(step: int, num_steps: int, options: ScheduleOptions) -> float:
    """Return the learning rate of update `step` (from 0) as a fraction of the peak.

    Of W warm-up steps the first has 1 / W and the last 1: none is wasted at zero.
    """
    warmup_steps = round(options.warmup_fraction * num_steps)
    done = step + 1
    if done <= warmup_steps:
        return done / warmup_steps
    return options.after_warmup(done, num_steps, warmup_steps)
