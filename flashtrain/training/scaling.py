"""Loss scaling for gradients that pass through float16, which has nothing between 0 and 6e-8: without a host sync.

Source: arXiv 1710.03740, with the dynamic scale of PyTorch's GradScaler. Its own `step` is not used: it reads from
the device for an optimizer that is not fused, and hides the scale from clipping for one that is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
"""At this scale a gradient that is not finite is no overflow that scaling has made."""


class LossScaler:
    """Scales a step's loss, unscales its gradients, and finds its overflows; all that is asked stays on the device."""

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)
        self._one = torch.ones((), device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to take the backward of."""
        return self._scaler.scale(loss)

    def current(self) -> Tensor:
        """Return the scale, an fp32 scalar."""
        return self._scaler.scale(self._one)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients, in fp32, by the scale of their loss; once a step, after all its micro-batches."""
        self._scaler.unscale_(optimizer)

    def overflowed(self, grad_norm: Tensor) -> Tensor:
        """Return, a boolean scalar, whether unscaled gradients are not finite and a lower scale may mend that."""
        return ~torch.isfinite(grad_norm) & (self.current() > LEAST_SCALE)

    def update(self) -> None:
        """Halve the scale after an overflow, double it after 2,000 steps without one."""
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)
