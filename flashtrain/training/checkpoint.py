"""Checkpoints: what is read from one, how one is written whole, and when.

A file has its name only once all of it is on disk, so a crash leaves the one before it. Reading never runs
code (`weights_only`). `last.ckpt` is to resume from; `step-N.ckpt` are the last states before it, as many as asked
for; `best.ckpt` has the lowest validation loss; `milestone-N.ckpt` have weights alone, and stay.
"""

import contextlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.training.meter import SpeedMeter

log = logging.getLogger(__name__)

LAST, BEST = "last.ckpt", "best.ckpt"
MODEL_PREFIX = "model."
PARTIAL = ".partial"
"""How the name of a file ends that is being written; a process that was killed leaves it."""


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """Return what a checkpoint holds: `state_dict`, `global_step` and the rest, tensors mapped from the file.

    Raises:
        UserError: there is no such file, or it is truncated or not a checkpoint of a training run.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}; name one that a training run has written") from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        checkpoint = None
    if not isinstance(checkpoint, dict) or not {"state_dict", "global_step", "loops"} <= checkpoint.keys():
        raise UserError(f"{path} is truncated or not a checkpoint of a training run; use another file")
    return checkpoint


def step_to_resume(path: Path | str) -> int:
    """Return the step of a checkpoint that training continues from; 0 has weights to start with.

    Raises:
        UserError: as `read_checkpoint`, or it has weights alone.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint["global_step"] > 0 and "optimizer_states" not in checkpoint:
        raise UserError(
            f"{path} has weights alone, to evaluate or to sample from; resume the folder of its run, or one of its "
            "step-N.ckpt"
        )
    return checkpoint["global_step"]


def load_weights(model: nn.Module, path: Path | str) -> int:
    """Load the model's weights of a checkpoint in place; return the number of steps they were trained for.

    Raises:
        UserError: as `read_checkpoint`, or the weights are another model's.
    """
    checkpoint = read_checkpoint(path)
    weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
    check_same_model(model.state_dict(), weights, path)
    model.load_state_dict(weights)
    return checkpoint["global_step"]


def check_same_model(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path | str) -> None:
    """Compare names and shapes of weights.

    Raises:
        UserError: they differ; it names the first difference.
    """
    for name in [*expected, *found]:
        here, there = (
            tuple(weights[name].shape) if name in weights else "missing" for weights in (expected, found)
        )
        if here != there:
            raise UserError(
                f"{path} is of another model: {name.removeprefix(MODEL_PREFIX)} is {there} there and {here} "
                "here; give the model settings that it was trained with"
            )


def step_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder` that are named by their step, in its order."""
    return _numbered(folder, "step")


def milestones(folder: Path) -> dict[int, Path]:
    """The weights in `folder` that are kept by their step, in its order."""
    return _numbered(folder, "milestone")


def _numbered(folder: Path, name: str) -> dict[int, Path]:
    named = {path: re.fullmatch(rf"{name}-(\d+)\.ckpt", path.name) for path in folder.glob("*.ckpt")}
    return dict(sorted((int(match[1]), path) for path, match in named.items() if match))


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint in `folder` to resume from: the last, where that is missing another; None where there is none."""
    choices = [folder / LAST, *reversed(step_checkpoints(folder).values()), folder / BEST]
    return next((path for path in choices if path.exists()), None)


@contextlib.contextmanager
def written_whole(path: Path, start_again: str = "start again") -> Iterator[Path]:
    """Give a path beside `path` to write to, which takes the name of `path` at the end, or leave what was there.

    Raises:
        UserError: the disk refuses, for one because it is full; with no checkpoint beside `path` the remedy is to make
            room and `start_again`.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        yield partial
        _flush(partial)
        os.replace(partial, path)
        _flush(path.parent)
    except (OSError, RuntimeError) as error:
        # torch.save turns the file's refusal into a RuntimeError of its own.
        refusal = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refusal, OSError):
            raise
        kept = newest_checkpoint(path.parent)
        remedy = "the one before it is whole: make room and resume" if kept else f"make room and {start_again}"
        raise UserError(f"cannot write {path} ({refusal.strerror}); {remedy}") from error
    finally:
        with contextlib.suppress(NotADirectoryError):
            partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the final name and renames; reads through `read_checkpoint`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path | str, storage_options: object | None = None
    ) -> None:
        """Write `path` whole or leave what was there. Raises UserError as `written_whole`."""
        path = Path(path)
        start_again = f"start again there, with output={path.parent.parent} resume=auto"
        with written_whole(path, start_again) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: Path | str, map_location: object = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Return `read_checkpoint(path)`: on the CPU and running no code, whatever Lightning asks for."""
        return read_checkpoint(path)


def keep_by_step(folder: Path, step: int, count: int) -> None:
    """Name the last checkpoint of `folder` by its step too, and keep the `count` newest that are named so.

    Both names are of one file, where the file system can do that. Raises UserError as `written_whole`.
    """
    with written_whole(folder / f"step-{step}.ckpt") as partial:
        try:
            os.link(folder / LAST, partial)
        except OSError:
            shutil.copyfile(folder / LAST, partial)
    for path in list(step_checkpoints(folder).values())[:-count]:
        path.unlink()


def remove_beyond(folder: Path, step: int) -> None:
    """Remove what is named by a step beyond `step`: it is of a run that was resumed from before it."""
    for named in (step_checkpoints(folder), milestones(folder)):
        for number, path in named.items():
            if number > step:
                path.unlink()


class Checkpoints(Checkpoint):
    """Keeps the last state, every `every` steps and at the end, and that of the lowest validation loss.

    The `keep_last` newest of the last states have names by step too, and stay until a newer one is whole. The weights
    of every `milestone_every` steps stay for ever; None for no milestones. Of both those beyond the last state go.
    """

    def __init__(
        self, folder: Path, every: int, keep_last: int, milestone_every: int | None, meter: SpeedMeter
    ) -> None:
        self._folder = folder
        self._every = every
        self._keep_last = keep_last
        self._milestone_every = milestone_every
        self._meter = meter
        self._best_loss = float("inf")
        self._last_step: int | None = None
        self._last_milestone: int | None = None
        self._said: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self._best_loss, "meter": self._meter.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best_loss = state_dict["best_loss"]
        self._meter.load_state_dict(state_dict["meter"])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._last_step = checkpoint["global_step"]

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        # Here the step before is wholly done, its validation included; at the end of its batch it was not.
        self._save_milestone(trainer)
        if trainer.global_step > 0 and trainer.global_step % self._every == 0:
            self._save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = pl_module.validation_metrics["val/loss"]
        if trainer.state.fn == "fit" and loss < self._best_loss:
            self._best_loss = loss
            self._save(trainer, BEST)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_milestone(trainer)
        self._save_last(trainer)

    def _save_milestone(self, trainer: Trainer) -> None:
        """Before the last state: who resumes from that finds the milestone written."""
        step = trainer.global_step
        if self._milestone_every is None or step in (0, self._last_milestone) or step % self._milestone_every:
            return
        self._last_milestone = step
        name = f"milestone-{step}.ckpt"
        self._save(trainer, name, weights_only=True)
        if trainer.is_global_zero:
            self._say_once("milestones", name, f"one every {self._milestone_every} steps")

    def _save_last(self, trainer: Trainer) -> None:
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._save(trainer, LAST)
            if trainer.is_global_zero:
                self._say_once("checkpoints", LAST, f"at most {self._keep_last + 2}")
                remove_beyond(self._folder, self._last_step)
                if self._keep_last:
                    keep_by_step(self._folder, self._last_step, self._keep_last)

    def _say_once(self, what: str, name: str, how_many: str) -> None:
        """Once in a process, what they take of the disk."""
        if what not in self._said:
            self._said.add(what)
            log.info("%s: %.1f MiB each, %s", what, (self._folder / name).stat().st_size / 2**20, how_many)

    def _save(self, trainer: Trainer, name: str, *, weights_only: bool = False) -> None:
        trainer.lightning_module.finish_step()
        self._meter.pause()
        trainer.save_checkpoint(self._folder / name, weights_only=weights_only)
        self._meter.resume()
