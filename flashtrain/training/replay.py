"""A faulty step once more, row by row: which rows are not finite, and where that begins."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.model.head import IGNORED

KEYS = {"step", "batch", "weights"}
"""What the file of a fault has: the step, its whole batch, of all ranks, and the model's weights before it."""


@dataclass(frozen=True)
class RowOutcome:
    place: int
    """Of the row in its batch."""
    loss: float
    """Mean of its targets, nats."""
    module: str | None
    """The first module in the forward whose result is not finite."""
    gradients: list[str]
    """The parameters whose gradient is not finite."""

    @property
    def finite(self) -> bool:
        return self.module is None and not self.gradients and torch.isfinite(torch.tensor(self.loss)).item()


def read_fault(path: Path) -> dict[str, Any]:
    """Return `KEYS` of the file of a fault, tensors on the CPU.

    Raises:
        UserError: it is no such file.
    """
    try:
        fault = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever the file is, torch raises something else
        fault = None
    if not isinstance(fault, dict) or fault.keys() != KEYS:
        raise UserError(f"{path} is not a fault that a training run has saved; name another run")
    return fault


def replay(
    model: nn.Module,
    sum_nll: Callable[[Tensor, Tensor, Tensor], Tensor],
    batch: Mapping[str, Tensor],
    autocast: Callable[[], AbstractContextManager],
) -> Iterator[RowOutcome]:
    """Forward and backward of each row of `batch` alone, with the model's weights as they are.

    Arguments as of TrainingModule. A loss that is scaled in training is not scaled here.
    """
    device = next(model.parameters()).device
    for place in range(len(batch["inputs"])):
        row = {name: tensor[place : place + 1].to(device) for name, tensor in batch.items()}
        bad: list[str] = []
        hooks = [
            module.register_forward_hook(functools.partial(_note, bad, name or "the model"))
            for name, module in model.named_modules()
        ]
        try:
            with torch.compiler.set_stance("force_eager"), autocast():  # hooks and rows alone fit no compiled graph
                hidden = model(row["inputs"], row.get("documents")).flatten(0, 1)
                loss = sum_nll(hidden, model.head_weight, row["labels"].flatten()) / (row["labels"] != IGNORED).sum()
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        gradients = [
            name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()
        ]
        model.zero_grad()
        yield RowOutcome(place, loss.item(), bad[0] if bad else None, gradients)


def _note(bad: list[str], name: str, module: nn.Module, inputs: object, result: Tensor) -> None:
    if not torch.isfinite(result).all():
        bad.append(name)
