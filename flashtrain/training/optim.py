"""The optimizer: its options, which parameters decay, and which are the hidden matrices that Muon takes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from flashtrain.training.muon import MuonAdamW

ADJUSTMENTS = ("match_rms_adamw", "original")


@dataclass
class OptimizerOptions:
    """AdamW (arXiv 1711.05101); the fields are the keys of conf/optimizer/*.yaml."""

    name: str
    """Which of `OPTIMIZERS` it is."""
    learning_rate: float | None
    """Peak learning rate; the schedule scales it. null: 0.5 / hidden_size, close to what GPT-3 used at each size."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decay of matrices, embeddings included; norms and biases never decay."""
    clip_norm: float | None
    """Largest norm of a step's gradient, over all parameters together; null: no clipping."""
    skip_norm: float | None
    """A step whose gradient has a larger norm, before clipping, is not applied and counted; null: all are applied."""

    def resolve(self, hidden_size: int) -> "OptimizerOptions":
        """Return the options with the learning rate written out."""
        if self.learning_rate is not None:
            return self
        # A size below 1 is for the model's options to refuse.
        return replace(self, learning_rate=0.5 / max(hidden_size, 1))

    def learning_rates(self) -> dict[str, float]:
        """Return the peak learning rate of each kind of parameters, by the name that logs have it under."""
        return {"learning_rate": self.learning_rate}

    def validate(self) -> list[str]:
        """Return every problem as one sentence."""
        problems = self._not_positive("learning_rate", "eps")
        if not 0 <= self.weight_decay < inf:
            problems.append(f"optimizer.weight_decay={self.weight_decay} must be 0 or more and finite")
        if self.clip_norm is not None and not 0 < self.clip_norm < inf:
            problems.append(
                f"optimizer.clip_norm={self.clip_norm} must be above 0 and finite; to clip nothing, say null"
            )
        if self.skip_norm is not None and not (self.clip_norm or 0) < self.skip_norm < inf:
            problems.append(
                f"optimizer.skip_norm={self.skip_norm} must be above optimizer.clip_norm={self.clip_norm}, or nothing "
                "would be clipped, and finite; to skip nothing, say null"
            )
        return problems + self._not_below_one("beta1", "beta2")

    def _not_positive(self, *names: str) -> list[str]:
        return [
            f"optimizer.{name}={value} must be above 0 and finite"
            for name in names
            if not 0 < (value := getattr(self, name)) < inf
        ]

    def _not_below_one(self, *names: str) -> list[str]:
        return [
            f"optimizer.{name}={value} must be at least 0 and below 1"
            for name in names
            if not 0 <= (value := getattr(self, name)) < 1
        ]


@dataclass
class MuonOptions(OptimizerOptions):
    """Muon (kellerjordan.github.io/posts/muon) for the hidden matrices, AdamW with the other options for the rest."""

    matrix_learning_rate: float | None
    """Peak learning rate of the hidden matrices. null, with match_rms_adamw: learning_rate."""
    momentum: float
    adjust_lr_fn: str
    """How a matrix's shape scales its updates: match_rms_adamw (arXiv 2502.16982) makes them as large as AdamW's,
    so that AdamW's learning rate and decay fit; original is Keller Jordan's, whose learning rates are near 0.02."""

    def resolve(self, hidden_size: int) -> "MuonOptions":
        """Return the options with both learning rates written out, where they have a default."""
        options = super().resolve(hidden_size)
        if self.matrix_learning_rate is not None or self.adjust_lr_fn == "original":
            return options
        return replace(options, matrix_learning_rate=options.learning_rate)

    def learning_rates(self) -> dict[str, float]:
        return super().learning_rates() | {"matrix_learning_rate": self.matrix_learning_rate}

    def validate(self) -> list[str]:
        problems = super().validate() + self._not_below_one("momentum")
        if self.adjust_lr_fn not in ADJUSTMENTS:
            problems.append(f"optimizer.adjust_lr_fn={self.adjust_lr_fn} is not one of {', '.join(ADJUSTMENTS)}")
        if self.matrix_learning_rate is None:
            problems.append("optimizer.adjust_lr_fn=original needs optimizer.matrix_learning_rate, often 0.02")
            return problems
        return problems + self._not_positive("matrix_learning_rate")


OPTIMIZERS = {"adamw": OptimizerOptions, "muon": MuonOptions}


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon takes: weights of linear layers, the head's apart; no embedding, norm or bias."""
    return [
        layer.weight
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and layer.weight is not model.head_weight and layer.weight.requires_grad
    ]


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> Optimizer:
    """Return the optimizer of a model with a `head_weight`: matrices decay, the rest does not.

    Each group has its peak learning rate as `initial_lr`, as torch's schedulers call it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(options, MuonOptions):
        hidden = hidden_matrices(model)
        rest = set(parameters) - set(hidden)
        optimizer = MuonAdamW(_muon(hidden, options), _adamw([p for p in parameters if p in rest], options))
    else:
        optimizer = _adamw(parameters, options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _adamw(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> AdamW:
    """Fused on the CPU too, because only the fused step reads `found_inf` on the device (faults.py)."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )


def _muon(matrices: Iterable[nn.Parameter], options: MuonOptions) -> Muon:
    return Muon(
        matrices,
        lr=options.matrix_learning_rate,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        adjust_lr_fn=options.adjust_lr_fn,
    )
