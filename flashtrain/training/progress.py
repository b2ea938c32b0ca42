"""What a person sees while a run goes on: a bar on a terminal, plain lines anywhere else."""

import datetime
from collections.abc import Iterable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class Display(Protocol):
    """Shows a run of `num_steps` steps; `step` is the number of steps done."""

    def start(self, step: int, num_steps: int) -> None: ...

    def advance(self, step: int) -> None:
        """Called after every step; cheap."""

    def report(self, step: int, status: str) -> None:
        """Show what training is at; a later report may take its place."""

    def note(self, step: int, status: str) -> None:
        """Show what stays, such as a validation."""

    def stop(self) -> None: ...


def choose_display(console: Console) -> Display:
    """Return a bar for a terminal that can move its cursor, else lines."""
    return Bar(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


def training_status(metrics: Mapping[str, float], mfu_names: Iterable[str], seconds_left: float | None) -> str:
    """One line of `loss`, `learning_rate` and, where known, `tokens_per_second`, the time left and the MFUs."""
    parts = [f"loss {metrics['loss']:.4f}", f"lr {metrics['learning_rate']:.2e}"]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if seconds_left is not None:
        parts.append(f"{datetime.timedelta(seconds=round(seconds_left))} left")
    parts += [f"{name} {metrics[name]:.1%}" for name in mfu_names if name in metrics]
    return "  ".join(parts)


def validation_status(loss: float, bits_per_byte: float | None) -> str:
    """One line; None where targets are no text."""
    return f"validation loss {loss:.4f}" + ("" if bits_per_byte is None else f"  {bits_per_byte:.4f} bits per byte")


def _line(step: int, num_steps: int, status: str) -> str:
    return f"step {step}/{num_steps}  {status}"


class Bar:
    """A Rich progress bar with the last report beside it; where there is little room the end of the report is cut."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            BarColumn(bar_width=20),
            TextColumn("step {task.completed}/{task.total}  {task.fields[status]}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task: TaskID
        self._num_steps: int

    def start(self, step: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._task = self._progress.add_task("", total=num_steps, completed=step, status="")
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def report(self, step: int, status: str) -> None:
        self._progress.update(self._task, status=status)

    def note(self, step: int, status: str) -> None:
        self._progress.console.out(_line(step, self._num_steps, status), highlight=False)

    def stop(self) -> None:
        self._progress.stop()


class Lines:
    """One line a report, without control characters: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps: int

    def start(self, step: int, num_steps: int) -> None:
        self._num_steps = num_steps

    def advance(self, step: int) -> None:
        pass

    def report(self, step: int, status: str) -> None:
        self._console.out(_line(step, self._num_steps, status), highlight=False)

    note = report

    def stop(self) -> None:
        pass
