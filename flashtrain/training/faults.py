"""A NaN or Inf never reaches the weights, and no step waits for the host to look.

The flag lives on the device and is sticky: the fused optimizer reads it as `found_inf` and leaves weights and
moments as they are, from the faulty step on. The host reads a step's flag once the next step is queued, so
that the device always has work, and stops the run with the number and the samples of the step that failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtrain import ranks
from flashtrain.errors import UserError

MOST_ROWS_SAID = 8


@dataclass(frozen=True)
class StepInputs:
    """What a step was computed from, on this rank, kept until its flag is read."""

    step: int
    batch: Mapping[str, Tensor]
    losses: Tensor
    """(micro-batches,) what each added to the loss."""
    micro_batch_rows: int

    def of_all_ranks(self) -> "StepInputs":
        """Return the same of the whole step, on the CPU, the parts of ranks one after another."""
        batch = {name: tensor.cpu() for name, tensor in self.batch.items()}
        parts = ranks.gathered((batch, self.losses.cpu()))
        whole = {name: torch.cat([part[name] for part, _ in parts]) for name in batch}
        return replace(self, batch=whole, losses=torch.cat([losses for _, losses in parts]))

    def suspects(self) -> list[int]:
        """Return the places of the rows whose micro-batch has a loss that is not finite; of all, where it is finite."""
        finite = torch.isfinite(self.losses).tolist()
        places = range(len(self.batch["inputs"]))
        return [place for place in places if not finite[place // self.micro_batch_rows]] or list(places)


class FaultFlag:
    """The device-side flag of one run and its late reader.

    `keep` saves what a faulty step was computed from, on the first rank, and says where.
    """

    def __init__(self, device: torch.device, keep: Callable[[StepInputs], str]) -> None:
        self.found_inf = torch.zeros((), device=device)
        """fp32 scalar, 1 from the first faulty step on: what a fused optimizer takes as `found_inf`."""
        on_gpu = device.type == "cuda"
        self._keep = keep
        self._on_host = torch.zeros((), pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._watched: StepInputs | None = None

    def mark(self, *values: Tensor) -> None:
        """Raise the flag, on the device, unless every scalar in `values` is finite."""
        finite = torch.isfinite(torch.stack(values)).all()
        self.found_inf.masked_fill_(~finite, 1.0)

    def watch(self, inputs: StepInputs) -> None:
        """Check the step before, then start to copy the flag of this one, whose work is queued by now."""
        self.check()
        self._on_host.copy_(self.found_inf, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._watched = inputs

    def wait(self) -> None:
        """Wait until the last watched step is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def check(self) -> None:
        """Wait until the last watched step is done, on all ranks alike.

        Raises:
            UserError: its loss or gradient was NaN or Inf; the weights are those before that step.
        """
        if self._watched is None:
            return
        self.wait()
        inputs, self._watched = self._watched, None
        if self._on_host.item():
            inputs = inputs.of_all_ranks()  # they all come here after the same step
            where = said_rows(inputs.batch, inputs.suspects())
            kept = ranks.gathered(self._keep(inputs) if ranks.rank() == 0 else "")[0]
            raise UserError(
                f"step {inputs.step}: the loss or the gradient is NaN or Inf{where}, so the update was not applied and "
                f"training stops; {kept}look at the data of this step, or start a run from the weights of the last "
                "checkpoint, train.init_from=DIR, with a lower optimizer.learning_rate"
            )


def said_rows(batch: Mapping[str, Tensor], places: Sequence[int]) -> str:
    """Return in words which rows of the training tokens are at these places of a batch, if it says that."""
    if "rows" not in batch:
        return ""
    of_batch = batch["rows"].tolist()
    rows = [of_batch[place] for place in places]
    more = len(rows) - MOST_ROWS_SAID
    said = ", ".join(map(str, rows[:MOST_ROWS_SAID])) + (f" and {more} more" if more > 0 else "")
    return f" in rows {said} of the training tokens"
