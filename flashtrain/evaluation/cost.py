"""What an evaluation cost: the tokens that went through the model, the time that took, and the GPU's memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flashtrain import device, ranks


@dataclass(frozen=True)
class Cost:
    """Of all ranks together, without what an earlier process scored."""

    tokens: int
    """Fed to the model."""
    seconds: float
    """In the model and its head, kernels compiled on the way; of the slowest rank."""
    peak_memory_gib: float | None
    """The most that tensors took on a GPU, the weights included, of the fullest; None on a CPU."""

    def __str__(self) -> str:
        if not self.tokens:
            return "Nothing was left to score."
        memory = "" if self.peak_memory_gib is None else f", peak memory {self.peak_memory_gib:.2f} GiB"
        speed = f"{self.tokens / self.seconds:,.0f} tokens/s"
        return f"{self.tokens:,} tokens went through the model in {self.seconds:.1f} s, {speed}{memory}."


class Metered:
    """A scorer of (B, L) inputs and targets that counts what it is fed; what it returns lies on the CPU."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor], clock: Callable[[], float] = time.perf_counter):
        self._score, self._clock = score, clock
        self._tokens, self._seconds = 0, 0.0
        device.reset_peak_memory()

    def __call__(self, inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        start = self._clock()
        values = self._score(inputs_BL, targets_BL).cpu()  # waits for a GPU
        self._seconds += self._clock() - start
        self._tokens += inputs_BL.numel()
        return values

    def cost(self) -> Cost:
        """Return what it came to; each of several ranks asks, and is told the same."""
        tokens, seconds, memory = zip(
            *ranks.gathered((self._tokens, self._seconds, device.peak_memory_gib())), strict=True
        )
        return Cost(sum(tokens), max(seconds), None if None in memory else max(memory))
