"""A NaN or Inf never reaches the weights, and no step waits for the host to look.

The flag lives on the device and is sticky: the fused optimizer reads it as `found_inf` and leaves weights and
moments as they are, from the faulty step on. The host reads a step's flag once the next step is queued, so
that the device always has work, and stops the run with the number of the step that failed.
"""

import torch
from torch import Tensor

from flashtrain.errors import UserError


class FaultFlag:
    """The device-side flag of one run and its late reader."""

    def __init__(self, device: torch.device) -> None:
        self.found_inf = torch.zeros((), device=device)
        """fp32 scalar, 1 from the first faulty step on: what a fused optimizer takes as `found_inf`."""
        on_gpu = device.type == "cuda"
        self._on_host = torch.zeros((), pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._step: int | None = None

    def mark(self, *values: Tensor) -> None:
        """Raise the flag, on the device, unless every scalar in `values` is finite."""
        finite = torch.isfinite(torch.stack(values)).all()
        self.found_inf.masked_fill_(~finite, 1.0)

    def watch(self, step: int) -> None:
        """Check the step before, then start to copy the flag of `step`, whose work is queued by now."""
        self.check()
        self._on_host.copy_(self.found_inf, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._step = step

    def check(self) -> None:
        """Wait until the last watched step is done.

        Raises:
            UserError: its loss or gradient was NaN or Inf; the weights are those before that step.
        """
        if self._step is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        step, self._step = self._step, None
        if self._on_host.item():
            raise UserError(
                f"step {step}: the loss or the gradient is NaN or Inf, so the update was not applied and "
                "training stops; lower optimizer.learning_rate or look at the data of this step"
            )
