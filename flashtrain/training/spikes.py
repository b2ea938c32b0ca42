"""Reports of unusual steps: a loss far above those before it, with its samples, and an update that was skipped."""

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flashtrain.training.callbacks import LateScalars, log_metrics
from flashtrain.training.faults import said_rows
from flashtrain.training.progress import Display

WINDOW, FEWEST = 50, 20
DEVIATIONS = 6.0
LEAST_RISE = 0.1

USUAL_LOSSES = "usual_losses"


class Spikes:
    """A spike is a loss above the mean of the last 50, once there are 20, by 0.1 and by six standard deviations."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=WINDOW)

    @property
    def losses(self) -> list[float]:
        """Those that the next is compared with."""
        return list(self._losses)

    def expected(self, loss: float) -> float | None:
        """Take the next loss; where it is a spike, return the mean of those before."""
        before = self.losses
        self._losses.append(loss)
        if len(before) < FEWEST:
            return None
        mean = statistics.fmean(before)
        rise = max(DEVIATIONS * statistics.pstdev(before, mean), LEAST_RISE)
        return mean if loss > mean + rise else None


class UnusualSteps(Callback):
    """Notes them on the display, spikes in the logs too, when the next step is queued: no step waits."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._spikes = Spikes()
        self._skipped_before: float
        self._pending: _Step | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._skipped_before = pl_module.skipped_before

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Any],
        batch: dict[str, Tensor],
        batch_idx: int,
    ) -> None:
        self._tell(trainer)
        read = {name: outputs[name] for name in ("loss", "grad_norm", "skipped_steps") if name in outputs}
        self._pending = _Step(trainer.global_step, LateScalars(read), batch)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._tell(trainer)
        checkpoint[USUAL_LOSSES] = self._spikes.losses

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._spikes = Spikes(checkpoint.get(USUAL_LOSSES, ()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell(trainer)

    def _tell(self, trainer: Trainer) -> None:
        if self._pending is None:
            return
        (step, scalars, batch), self._pending = self._pending, None
        values = scalars.read()
        skipped = values.get("skipped_steps", 0)
        if skipped > self._skipped_before:
            self._skipped_before = skipped
            norm = values["grad_norm"]
            self._display.note(step, f"skipped: gradient norm {norm:.4g}; {skipped:.0f} skipped so far")
        if (expected := self._spikes.expected(values["loss"])) is not None:
            loss = values["loss"]
            log_metrics(trainer, {"spike/loss": loss, "spike/expected": expected}, step)
            rows = said_rows(batch, range(len(batch["inputs"])))
            whose = ", those of the first rank" * (trainer.world_size > 1)
            self._display.note(step, f"loss spike: {loss:.4f}, where {expected:.4f} was usual{rows}{whose}")


class _Step(NamedTuple):
    step: int
    scalars: LateScalars
    batch: dict[str, Tensor]
