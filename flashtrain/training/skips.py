"""Steps that are not applied though nothing is wrong with the run: gradients too large, or an overflow of float16.

They are found and counted on the device. A skipped step is a step: data and schedule go on.
"""

from math import inf

import torch
from torch import Tensor

from flashtrain.training.scaling import LossScaler


class Skips:
    """Which steps to skip: those of a gradient norm above `largest_norm`, if any, and the overflows of `scaler`."""

    def __init__(self, device: torch.device, largest_norm: float | None, scaler: LossScaler | None) -> None:
        self.expected = largest_norm is not None or scaler is not None
        """Whether any step can be skipped."""
        self.count = torch.zeros((), device=device)
        """fp32 scalar, the steps skipped so far."""
        self._largest_norm = inf if largest_norm is None else largest_norm
        self._scaler = scaler

    def mark(self, grad_norm: Tensor) -> Tensor:
        """Return, a boolean scalar, whether to skip the step whose unscaled gradients have that norm; count it."""
        skipped = (grad_norm > self._largest_norm) & torch.isfinite(grad_norm)
        if self._scaler is not None:
            skipped |= self._scaler.overflowed(grad_norm)
        self.count += skipped
        return skipped
