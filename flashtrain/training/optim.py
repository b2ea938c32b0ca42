"""The optimizer: its options, and which parameters decay."""

from dataclasses import dataclass, replace
from math import inf

from torch import nn
from torch.optim import AdamW


@dataclass
class OptimizerOptions:
    """AdamW (arXiv 1711.05101); the fields are the keys of conf/optimizer/*.yaml."""

    learning_rate: float | None
    """Peak learning rate; the schedule scales it. null: 0.5 / hidden_size, close to what GPT-3 used at each size."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decay of matrices, embeddings included; norms and biases never decay."""
    clip_norm: float | None
    """Largest norm of a step's gradient, over all parameters together; null: no clipping."""

    def resolve(self, hidden_size: int) -> "OptimizerOptions":
        """Return the options with the learning rate written out."""
        if self.learning_rate is not None:
            return self
        # A size below 1 is for the model's options to refuse.
        return replace(self, learning_rate=0.5 / max(hidden_size, 1))

    def validate(self) -> list[str]:
        """Return every problem as one sentence."""
        problems = []
        if not 0 < self.learning_rate < inf:
            problems.append(f"optimizer.learning_rate={self.learning_rate} must be above 0 and finite")
        if not 0 < self.eps < inf:
            problems.append(f"optimizer.eps={self.eps} must be above 0 and finite")
        if not 0 <= self.weight_decay < inf:
            problems.append(f"optimizer.weight_decay={self.weight_decay} must be 0 or more and finite")
        if self.clip_norm is not None and not 0 < self.clip_norm < inf:
            problems.append(
                f"optimizer.clip_norm={self.clip_norm} must be above 0 and finite; to clip nothing, say null"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                problems.append(f"optimizer.{name}={value} must be at least 0 and below 1")
        return problems


def build_optimizer(module: nn.Module, options: OptimizerOptions) -> AdamW:
    """Return a fused AdamW over the parameters of `module`: matrices decay, the rest does not.

    Fused on the CPU too, because only the fused step reads `found_inf` on the device (faults.py).
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
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
