"""Callbacks of a run: what is measured and shown, and how a signal ends it."""

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flashtrain import ranks
from flashtrain.device import peak_memory_gib
from flashtrain.performance.flops import mfu
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.progress import Display, training_status, validation_status

UNTIMED_STEPS = 2
"""Steps at the start of a process that the speed leaves out: they compile and warm up."""


class Reporter(Callback):
    """Every `log_every` steps, and after the last, tells the loggers and the display of a step.

    No step waits for that: what a step returns in tensors sets out for the host when the step is queued, and is read
    when the next one is, or before a validation, a checkpoint and the end. Between reports nothing is read from the
    device. `flops_per_token` maps the name of an MFU to its count. Every rank has one: of memory and of waiting, which
    each measures for itself, the largest is told.
    """

    def __init__(
        self,
        meter: SpeedMeter,
        display: Display,
        *,
        num_steps: int,
        log_every: int,
        flops_per_token: Mapping[str, float],
        peak_flops: float | None,
    ) -> None:
        self._meter = meter
        self._display = display
        self._num_steps = num_steps
        self._log_every = log_every
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._timed_from: int
        self._pending: _Report | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timed_from = trainer.global_step + UNTIMED_STEPS
        self._display.start(trainer.global_step, self._num_steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: object
    ) -> None:
        step = trainer.global_step
        self._display.advance(step)
        self._tell(trainer)
        if step % self._log_every == 0 or step == self._num_steps:
            self._report(trainer, step, outputs)
        elif step == self._timed_from:
            self._meter.lap(step)

    def _report(self, trainer: Trainer, step: int, outputs: dict[str, Any]) -> None:
        speed = self._meter.lap(step) if step >= self._timed_from else None
        metrics, of_this_rank = dict(outputs), {}
        if speed is not None:
            metrics["tokens_per_second"] = speed.tokens_per_second
            of_this_rank["data_wait"] = speed.data_wait
            if self._peak_flops is not None:
                for name, flops in self._flops_per_token.items():
                    metrics[name] = mfu(speed.tokens_per_second, flops, self._peak_flops)
        if (memory := peak_memory_gib()) is not None:
            of_this_rank["peak_memory_gib"] = memory
        metrics |= ranks.largest(of_this_rank, trainer.strategy.root_device)
        measured = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        known = {name: value for name, value in metrics.items() if name not in measured}
        seconds_left = self._meter.seconds_for(self._num_steps - step)
        self._pending = _Report(step, LateScalars(measured), known, seconds_left)

    def _tell(self, trainer: Trainer) -> None:
        """Finish the pending report, if there is one: its step is done or about to be."""
        if self._pending is None:
            return
        report, self._pending = self._pending, None
        metrics = report.measured.read() | report.known
        log_metrics(trainer, {f"train/{name}": value for name, value in metrics.items()}, report.step)
        self._display.report(report.step, training_status(metrics, list(self._flops_per_token), report.seconds_left))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._tell(trainer)  # or its row would be lost where this checkpoint is resumed

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.finish_step()
            self._tell(trainer)
            self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._meter.resume()
            step, metrics = trainer.global_step, pl_module.validation_metrics
            log_metrics(trainer, metrics, step)
            self._display.note(step, validation_status(metrics["val/loss"], metrics.get("val/bits_per_byte")))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)
        self._display.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._display.stop()


class LateScalars:
    """Scalars that are copied from the device; to read them waits for their copy and for nothing queued after it."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        self._names = list(scalars)
        values = torch.stack(list(scalars.values()))
        self._on_host = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> dict[str, float]:
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._on_host.tolist(), strict=True))


class _Report(NamedTuple):
    step: int
    measured: LateScalars
    known: dict[str, float]
    seconds_left: float | None


def log_metrics(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)


class StopOnSignal(Callback):
    """SIGINT and SIGTERM end training after the step under way; a second one acts as it always does.

    One that comes while Lightning still sets up ends it before its first step.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            pl_module.stop_requested = True
            self._restore()

        # Lightning's handlers would raise at a SIGTERM, and give ours back when the run is over; of several ranks, each
        # would wait for its device in every step to ask for one.
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()  # a finished run that is resumed has no end of training

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
