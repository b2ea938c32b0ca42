"""Where metrics are written: CSV files that a resumed run continues, TensorBoard, and Weights & Biases."""

import csv
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from flashtrain.errors import UserError

WANDB_PROJECT = "flashtrain"


def require_wandb() -> None:
    """Raise UserError unless the package wandb is installed."""
    try:
        importlib.metadata.version("wandb")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "logger.wandb=true needs the package wandb, which is not here; pip install wandb, or say another logger"
        ) from None


def build_loggers(
    folder: Path, *, csv: bool, tensorboard: bool, wandb: bool, run_name: str, settings: Mapping[str, Any]
) -> list[Logger]:
    """Return the loggers asked for; in `folder` they write train.csv and val.csv, tensorboard/, and wandb/.

    `run_name` and `settings` are what W&B shows of the run. Raises UserError where W&B refuses to start.
    """
    loggers: list[Logger] = []
    if csv:
        loggers.append(CsvLogger(folder))
    if tensorboard:
        loggers.append(TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False))
    if wandb:
        loggers.append(WandbLogger(folder, run_name, settings))
    return loggers


class CsvLogger(Logger):
    """A file for each group of metrics, the part before the slash: `train/loss` is column loss of train.csv.

    Lightning's own deletes the rows of a run that is resumed; this keeps those before the first new one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, list[str]] = {}

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: object, *_: object, **__: object) -> None:
        """Nothing: the run's settings are saved beside its logs."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a row; metrics of one call belong to one group."""
        (group,) = {name.partition("/")[0] for name in metrics}
        row = {"step": step} | {name.partition("/")[2]: value for name, value in metrics.items()}
        path = self._folder / f"{group}.csv"
        if group not in self._columns:
            self._open(group, path, step)
        new_columns = [name for name in row if name not in self._columns[group]]
        if new_columns:
            self._columns[group] += new_columns
            self._write(path, group, _read(path))
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns[group]).writerow(row)

    def _open(self, group: str, path: Path, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row in _read(path) if _step(row, path) < step]
        self._columns[group] = list(rows[0]) if rows else []
        self._write(path, group, rows)

    def _write(self, path: Path, group: str, rows: list[dict[str, str]]) -> None:
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns[group])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, path)


class WandbLogger(Logger):
    """One W&B run, which a resumed run continues, with the optimizer step as the axis of every metric.

    W&B's own environment variables say the rest: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY. Lightning's own
    logger takes up the run of a sweep's job before.
    """

    def __init__(self, folder: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        require_wandb()
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", WANDB_PROJECT),
                dir=folder,
                name=run_name,
                id=_wandb_id(folder),
                resume="allow",
                config=dict(settings),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"W&B refuses to start ({error}); say `wandb login`, or WANDB_MODE=offline, or another logger"
            ) from None
        self._run.define_metric("*", step_metric="step")

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> str:
        return self._run.id

    def log_hyperparams(self, params: object, *_: object, **__: object) -> None:
        """Nothing: W&B got the run's settings at the start."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finalize(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "success" else 1)


def _wandb_id(folder: Path) -> str | None:
    """The id of the W&B run that `folder` holds files of; None for a new one."""
    kept = sorted((folder / "wandb").glob("*run-*-*"))  # [offline-]run-TIME-ID
    return kept[-1].name.rpartition("-")[2] if kept else None


def _step(row: Mapping[str, str], path: Path) -> int:
    try:
        return int(row["step"])
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{path} has a row without the number of its step: {row}; mend or remove that file") from None


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        whole_lines = [line for line in file if line.endswith("\n")]  # a crash may have cut the last
    return list(csv.DictReader(whole_lines))
