"""Callbacks of a run: what is measured and shown, and how a signal ends it."""

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flashtrain.performance.flops import mfu
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.progress import Display, training_status, validation_status

UNTIMED_STEPS = 2
"""Steps at the start of a process that the speed leaves out: they compile and warm up."""


class Reporter(Callback):
    """Every `log_every` steps, and after the last, reads a step's numbers for the loggers and the display.

    Between reports nothing is read from the device. `flops_per_token` maps the name of an MFU to its count.
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timed_from = trainer.global_step + UNTIMED_STEPS
        self._display.start(trainer.global_step, self._num_steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], *_: object
    ) -> None:
        step = trainer.global_step
        self._display.advance(step)
        if step % self._log_every == 0 or step == self._num_steps:
            self._report(trainer, step, outputs)
        elif step == self._timed_from:
            pl_module.finish_step()
            self._meter.lap(step)

    def _report(self, trainer: Trainer, step: int, outputs: dict[str, Any]) -> None:
        loss, grad_norm = torch.stack([outputs["loss"], outputs["grad_norm"]]).tolist()  # the host waits
        speed = self._meter.lap(step) if step >= self._timed_from else None
        metrics = {"train/loss": loss, "train/grad_norm": grad_norm}
        known = {name: value for name, value in outputs.items() if not isinstance(value, Tensor)}
        metrics |= {f"train/{name}": value for name, value in known.items()}
        if speed is not None:
            metrics["train/tokens_per_second"] = speed
            if self._peak_flops is not None:
                for name, flops in self._flops_per_token.items():
                    metrics[f"train/{name}"] = mfu(speed, flops, self._peak_flops)
        _log(trainer, metrics, step)
        seconds_left = self._meter.seconds_for(self._num_steps - step)
        self._display.report(step, training_status(loss, speed, seconds_left))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.finish_step()
            self._meter.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._meter.resume()
            step, metrics = trainer.global_step, pl_module.validation_metrics
            _log(trainer, metrics, step)
            self._display.note(step, validation_status(metrics["val/loss"], metrics["val/bits_per_byte"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._display.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._display.stop()


def _log(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
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

        # Lightning's handlers would raise at a SIGTERM, and give ours back when the run is over.
        trainer._signal_connector.register_signal_handlers = lambda: None
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
