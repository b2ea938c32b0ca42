"""How long the steps of a fit take from an idle device to one, where a meter's laps would be too few."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from flashtrain.performance.timing import Stopwatch


class TimedSteps(Callback):
    """Takes the time of `timed` steps after the first `untimed` of a fit.

    At its end the optimizer is gone, whose moments Lightning would carry to the CPU.
    """

    seconds: float
    """Of all timed steps, once they are taken."""

    def __init__(self, untimed: int, timed: int, device_type: str) -> None:
        self._untimed = untimed
        self._timed = timed
        self._stopwatch = Stopwatch(device_type)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._untimed:
            self._stopwatch.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._untimed + self._timed:
            self.seconds = self._stopwatch.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.optimizers = []
