"""What the loop waits for, told to the meter, and a trace of chosen steps."""

import logging
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler

from flashtrain.training.meter import SpeedMeter

log = logging.getLogger(__name__)


class DataWait(Profiler):
    """Lightning tells its profiler of everything that it does; this one tells the meter of waiting for a batch."""

    ACTION = "[_TrainingEpochLoop].train_dataloader_next"

    def __init__(self, meter: SpeedMeter) -> None:
        super().__init__()
        self._meter = meter

    def start(self, action_name: str) -> None:
        if action_name == self.ACTION:
            self._meter.start_waiting()

    def stop(self, action_name: str) -> None:
        if action_name == self.ACTION:
            self._meter.stop_waiting()


class TraceSteps(Callback):
    """Writes what host and device did in steps `first` to `last`, counted from 1, as a Chrome trace into `folder`.

    chrome://tracing and ui.perfetto.dev show it. A run that ends within these steps leaves a trace of those that it
    took, unless it fails. Profiled steps are slower, so the meter leaves them out.
    """

    def __init__(self, first: int, last: int, folder: Path, meter: SpeedMeter) -> None:
        self._first = first
        self._last = last
        self._folder = folder
        self._meter = meter
        self._profiler: torch.profiler.profile | None = None
        self._span: torch.profiler.record_function
        self._traced: list[int]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step >= self._last:
            log.info("steps %d to %d are not profiled: %d are done", self._first, self._last, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        step = trainer.global_step + 1
        if pl_module.stops or not self._first <= step <= self._last:
            return
        self._meter.restart()
        if self._profiler is None:
            pl_module.wait_for_step()
            self._traced = []
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()
        self._span = torch.profiler.record_function(f"step {step}")
        self._span.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if self._profiler is None:
            return
        self._span.__exit__(None, None, None)
        self._traced.append(trainer.global_step)
        if trainer.global_step == self._last:
            self._write(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._write(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._profiler is not None:
            self._stop()

    def _write(self, pl_module: LightningModule) -> None:
        pl_module.wait_for_step()
        profiler = self._stop()
        if not self._traced:  # a signal came between the start of a step and the step
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"trace_steps_{self._traced[0]}-{self._traced[-1]}.json.gz"
        profiler.export_chrome_trace(str(path))
        self._meter.restart()
        log.info("profiled: %s", path)

    def _stop(self) -> torch.profiler.profile:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler
