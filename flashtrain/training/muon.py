"""Muon and AdamW as one optimizer: one step, one state, one list of groups.

Lightning counts a step for every optimizer it is given, so two of them would make each step count twice. And
torch's Muon does not know `found_inf`: what keeps a NaN or Inf out of its weights without the host is here.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """The groups of `muon`, then those of the fused `adamw`, whose state and groups it takes over.

    With `found_inf` set, an fp32 scalar on the device, a step leaves weights and moments of all groups as they are
    where it is not 0, as a fused optimizer does.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        self._num_muon_groups = len(muon.param_groups)
        self.found_inf: Tensor | None = None
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; the closure, if any, is called once and before anything is read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a checkpoint makes new state and groups.
        self._muon.state = self._adamw.state = self.state
        for group in self.param_groups[: self._num_muon_groups]:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._muon.param_groups = [{**group, "params": [matrix]}]
                    self._step_muon(matrix)
        self._adamw.param_groups = self.param_groups[self._num_muon_groups :]
        self._adamw.found_inf = self.found_inf
        self._adamw.step()
        return loss

    def _step_muon(self, matrix: Tensor) -> None:
        """Step the one matrix that Muon has now; one at a time, so that the copies are of one matrix."""
        if self.found_inf is None:
            self._muon.step()
            return
        faulty = self.found_inf > 0
        before = [(tensor, tensor.clone()) for tensor in (matrix, *self.state[matrix].values())]
        matrix.grad.masked_fill_(faulty, 0.0)  # momentum that the first step makes is then 0, as if it were new
        self._muon.step()
        for tensor, kept in before:
            tensor.copy_(torch.where(faulty, kept, tensor))
