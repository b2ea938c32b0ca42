"""Where metrics are written: CSV files that a resumed run continues, and TensorBoard."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger


def build_loggers(folder: Path, *, csv: bool, tensorboard: bool) -> list[Logger]:
    """Return the loggers asked for; in `folder` they write train.csv and val.csv, and tensorboard/."""
    loggers: list[Logger] = []
    if csv:
        loggers.append(CsvLogger(folder))
    if tensorboard:
        loggers.append(TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False))
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
        rows = [row for row in _read(path) if int(row["step"]) < step]
        self._columns[group] = list(rows[0]) if rows else []
        self._write(path, group, rows)

    def _write(self, path: Path, group: str, rows: list[dict[str, str]]) -> None:
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns[group])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, path)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        whole_lines = [line for line in file if line.endswith("\n")]  # a crash may have cut the last
    return list(csv.DictReader(whole_lines))
