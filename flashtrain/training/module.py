"""One Lightning batch is one optimizer step: micro-batches, loss over all its targets, validation sums.

`global_step`, validation, checkpoints and the schedule therefore count the same thing. No step waits for the
host: what it measures stays in tensors on the device, and a NaN or Inf is stopped there (faults.py). Model
and loss functions are given; how steps are reported and saved is the callbacks' business.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from flashtrain import ranks
from flashtrain.errors import UserError
from flashtrain.model.head import IGNORED
from flashtrain.training.checkpoint import check_same_model, written_whole
from flashtrain.training.faults import FaultFlag, StepInputs
from flashtrain.training.optim import OptimizerOptions, build_optimizer
from flashtrain.training.resume import fit_loop_state
from flashtrain.training.scaling import LossScaler
from flashtrain.training.schedule import ScheduleOptions, learning_rate_factor
from flashtrain.training.skips import Skips

NllFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

GUARDS = "guards"
"""What a checkpoint has the count of skipped steps under and, where the loss is scaled, the scale."""


class TrainingModule(LightningModule):
    """Trains `model`: tokens (B, S) int64 and documents -> hidden states (B, S, C), with a `head_weight` (V, C).

    A batch is {"inputs": (R, S) int64, "labels": (R, S) int64}, the R rows of a whole step that are this rank's; a
    label of -100 is not scored. It may have "documents", (R, S) int32, for the model; without, that gets None; and
    "rows", (R) int64, by which a report names them. Rows go through the model `micro_batch_rows` at a time, to the same
    result as all at once on one rank.

    Args:
        sum_nll: (hidden (N, C), weight (V, C), targets (N)) -> sum of -log p of the scored targets, fp32.
        token_nll: the same -> -log p of each target (N) fp32, 0 where it is not scored; for validation.
        bytes_per_token: (vocabulary) int, UTF-8 bytes of a token; those of 0 do not count in bits per byte.
        autocast: makes the context that forwards run in.
        scale_loss: whether gradients pass through float16, so that the loss has to be scaled (scaling.py).
        fault_folder: where the inputs of a step are kept whose loss or gradient is NaN or Inf; None for nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        sum_nll: NllFunction,
        token_nll: NllFunction,
        *,
        bytes_per_token: Tensor,
        optimizer: OptimizerOptions,
        schedule: ScheduleOptions,
        num_steps: int,
        micro_batch_rows: int,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        scale_loss: bool = False,
        fault_folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.register_buffer("bytes_per_token", bytes_per_token, persistent=False)
        self.stop_requested = False
        """Set to end training after the step under way, or with several ranks after the next; the steps that are left
        can be resumed."""
        self.validation_metrics: dict[str, float] = {}
        """`val/loss` (nats per target) and, of text, `val/bits_per_byte` of the last validation."""
        self.skipped_before = 0
        """Steps that were skipped before this process went on with the run."""
        self._sum_nll = sum_nll
        self._token_nll = token_nll
        self._optimizer_options = optimizer
        self._schedule = schedule
        self._num_steps = num_steps
        self._micro_batch_rows = micro_batch_rows
        self._autocast = autocast
        self._scale_loss = scale_loss
        self._fault_folder = fault_folder
        self._resumed_scaler: dict[str, Any] | None = None
        self._scaler: LossScaler | None
        self._skips: Skips
        self._fault: FaultFlag
        self._shared_stop: ranks.SharedStop
        self._loss: Tensor
        self._grad_norm: Tensor
        self._validation_sums: Tensor

    @property
    def stops(self) -> bool:
        """Whether training ends before the next step."""
        return self._shared_stop.agreed(self.stop_requested)

    def configure_optimizers(self) -> Optimizer:
        return build_optimizer(self.model, self._optimizer_options)

    def on_train_start(self) -> None:
        self._fault = FaultFlag(self.device, self._keep)
        self._shared_stop = ranks.SharedStop(self.device)
        self._scaler = LossScaler(self.device) if self._scale_loss else None
        self._skips = Skips(self.device, self._optimizer_options.skip_norm, self._scaler)
        self._skips.count += self.skipped_before
        if self._scaler is not None and self._resumed_scaler is not None:
            self._scaler.load_state_dict(self._resumed_scaler)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> int | None:
        if self.stops:
            return -1  # Lightning's word for: end the epoch here
        self._shared_stop.tell(self.stop_requested)
        return None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Take one optimizer step; return loss and gradient norm, on the device, and learning rates."""
        optimizer = self.optimizers()
        num_targets = ranks.averaged((batch["labels"] != IGNORED).sum())  # as gradients are, so that a sum is left
        losses = []
        micro_batches = list(zip(*(tensor.split(self._micro_batch_rows) for tensor in batch.values()), strict=True))
        for number, rows in enumerate(micro_batches, 1):
            micro_batch = dict(zip(batch, rows, strict=True))
            with self._autocast():
                loss = self._sum_nll(*self._head_arguments(micro_batch)) / num_targets
            with self._gradients_averaged(number == len(micro_batches)):
                self.manual_backward(loss if self._scaler is None else self._scaler.scale(loss))
            losses.append(loss.detach())
        losses = torch.stack(losses)
        self._loss = ranks.averaged(losses.sum())

        factor = learning_rate_factor(self.global_step, self._num_steps, self._schedule)
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.trainer.world_size == 1)  # otherwise they are views of DDP's buckets
        self._fault.watch(StepInputs(self.global_step, batch, losses, self._micro_batch_rows))
        measured = {"loss": self._loss, "grad_norm": self._grad_norm}
        if self._skips.expected:
            measured["skipped_steps"] = self._skips.count.clone()
        if self._scaler is not None:
            measured["loss_scale"] = self._scaler.current()
            self._scaler.update()
        peaks = self._optimizer_options.learning_rates()
        return measured | {name: factor * peak for name, peak in peaks.items()}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = get_total_norm([p.grad for p in parameters if p.grad is not None]).float()
        if self._optimizer_options.clip_norm is not None:
            clip_grads_with_norm_(parameters, self._optimizer_options.clip_norm, self._grad_norm)
        skipped = self._skips.mark(self._grad_norm)
        self._fault.mark(self._loss, self._grad_norm.masked_fill(skipped, 0.0))
        optimizer.found_inf = torch.maximum(self._fault.found_inf, skipped)

    def on_train_batch_end(self, outputs: dict[str, Any], batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.global_step == self._num_steps:
            self.trainer.should_stop = True  # makes Lightning validate the last step, whatever the interval

    def _keep(self, inputs: StepInputs) -> str:
        """Save what a faulty step was computed from, the weights before it included; return in words where."""
        if self._fault_folder is None:
            return ""
        path = self._fault_folder / f"step-{inputs.step}.pt"
        fault = {"step": inputs.step, "batch": dict(inputs.batch), "weights": self.model.state_dict()}
        try:
            with written_whole(path) as partial:
                torch.save(fault, partial)
        except UserError as refusal:
            return f"its inputs are not saved ({refusal}); "
        return f"its inputs are saved in {path}, for `python -m flashtrain.replay`; "

    def wait_for_step(self) -> None:
        """Wait until the device has done the last step, whatever came of it."""
        self._fault.wait()

    def finish_step(self) -> None:
        """Wait until the device has done the last step; all ranks call it alike.

        Raises:
            UserError: its loss or gradient was NaN or Inf.
        """
        self._fault.check()

    def on_train_end(self) -> None:
        self.finish_step()

    def on_validation_model_zero_grad(self) -> None:
        """Nothing: a step leaves no gradients."""

    def on_validation_epoch_start(self) -> None:
        self._validation_sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        with self._autocast():
            hidden, weight, targets = self._head_arguments(batch)
            nll = self._token_nll(hidden, weight, targets).double()
        scored = targets != IGNORED
        num_bytes = torch.where(scored, self.bytes_per_token[targets.clamp(min=0)], 0)
        sums = [nll.sum(), scored.sum(), torch.where(num_bytes > 0, nll, 0).sum(), num_bytes.sum()]
        self._validation_sums += torch.stack(sums)

    def on_validation_epoch_end(self) -> None:
        nll, num_targets, nll_of_bytes, num_bytes = ranks.summed(self._validation_sums).tolist()
        self.validation_metrics = {"val/loss": nll / num_targets}
        if num_bytes:
            self.validation_metrics["val/bits_per_byte"] = nll_of_bytes / (math.log(2) * num_bytes)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.finish_step()
        checkpoint[GUARDS] = {"skipped_steps": int(self._skips.count)}
        if self._scaler is not None:
            checkpoint[GUARDS]["loss_scaler"] = self._scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another model's checkpoint; for training, continue at the step it was taken at.

        Raises:
            UserError: the weights are another model's, or the checkpoint is beyond the last step of this run.
        """
        path = self.trainer.ckpt_path
        check_same_model(self.state_dict(), checkpoint["state_dict"], path)
        if self.trainer.state.fn != "fit":
            return
        step = checkpoint["global_step"]
        if step > self._num_steps:
            raise UserError(
                f"{path} is at step {step}, beyond the {self._num_steps} steps of this run; start a new run"
            )
        checkpoint["loops"]["fit_loop"] = fit_loop_state(self.trainer, step, self._num_steps)
        self.trainer.datamodule.start_step = step
        self.skipped_before = checkpoint[GUARDS]["skipped_steps"]
        self._resumed_scaler = checkpoint[GUARDS].get("loss_scaler")

    def _gradients_averaged(self, now: bool) -> AbstractContextManager[None]:
        """A backward after which gradients are those of all ranks, or, not `now`, those of this one as yet."""
        strategy = self.trainer.strategy
        several = isinstance(strategy, ParallelStrategy)
        return strategy.block_backward_sync() if several and not now else nullcontext()

    def _head_arguments(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.model(batch["inputs"], batch.get("documents"))
        return hidden.flatten(0, 1), self.model.head_weight, batch["labels"].flatten()
