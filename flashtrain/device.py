"""Where and how a run computes: device, precision, compilation; what the user asked, given what there is."""

import signal
from dataclasses import dataclass

import torch

from flashtrain.errors import UserError

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
"""What attention is checked and measured in, by the names of settings."""

TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Precision:
    weights: torch.dtype
    """What weights, gradients and the optimizer's moments are kept in."""
    products: torch.dtype
    """What the model computes in; by autocast, where weights are kept in another."""
    tf32: bool = False
    """Whether float32 matrix products of PyTorch round their inputs to TF32's 10 bits of mantissa."""


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "tf32": Precision(torch.float32, torch.float32, tf32=True),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
}
"""By the words of trainer.precision, beside auto."""


@dataclass(frozen=True)
class Device:
    type: str
    """cpu or cuda."""
    precision: Precision
    compile: bool

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.precision.products

    def autocast(self) -> torch.autocast:
        """The context that a forward runs in."""
        enabled = self.precision.products != self.precision.weights
        return torch.autocast(self.type, self.precision.products, enabled=enabled)

    def set_tf32(self) -> None:
        """Tell PyTorch how float32 products are computed from here on: by the precision, never by its defaults."""
        torch.set_float32_matmul_precision("high" if self.precision.tf32 else "highest")

    def __str__(self) -> str:
        weights, products = (str(dtype).removeprefix("torch.") for dtype in (self.precision.weights, self.dtype))
        kept = "" if weights == products else f" with {weights} weights"
        tf32 = f", TF32 {'on' if self.precision.tf32 else 'off'}" * (self.type == "cuda")
        return f"{products}{kept} on {self.type}{tf32}{', compiled' * self.compile}"


def resolve(device: str, precision: str, compile: bool | None) -> Device:
    """What `auto` and null stand for here. Raises UserError for an unknown word, or for what is missing here."""
    kind = resolve_type("trainer.device", device)
    if precision not in ("auto", *PRECISIONS):
        raise UserError(f"trainer.precision is {precision}; allowed are auto, {', '.join(PRECISIONS)}")
    on_gpu = kind == "cuda"
    chosen = PRECISIONS[("bf16" if on_gpu else "fp32") if precision == "auto" else precision]
    if chosen.tf32 and not (on_gpu and torch.cuda.get_device_capability() >= TF32_CAPABILITY):
        raise UserError(f"trainer.precision is {precision}, which takes a CUDA GPU of sm_80 or later; say fp32")
    return Device(kind, chosen, on_gpu if compile is None else compile)


def resolve_type(key: str, device: str) -> str:
    """The device type, cpu or cuda, that the setting `key` asks for. Raises UserError as `resolve` does."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"{key} is {device}; allowed are auto, cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key} is cuda and PyTorch sees no CUDA GPU here; say {key}=cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def start_compile_workers() -> None:
    """Start the processes in which `torch.compile` compiles, deaf to SIGTERM.

    A scheduler sends that to all processes, and PyTorch (2.11 to 2.13) waits forever for the work of one that it ended.
    They go when this process does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # processes inherit what is blocked
    try:
        import torch._inductor.compile_fx  # noqa: F401  starts them, unless told not to
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def reset_peak_memory() -> None:
    """Let `peak_memory_gib` be of what follows."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib() -> float | None:
    """Return the most that tensors have taken of the GPU's memory at once, in GiB; None where none is in use."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_initialized() else None
