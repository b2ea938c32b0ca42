"""Where and how a run computes: device, precision, compilation; what the user asked, given what there is."""

from dataclasses import dataclass

import torch

from flashtrain.errors import UserError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
"""What attention is checked and measured in, by the names of settings."""


@dataclass(frozen=True)
class Device:
    type: str
    """cpu or cuda."""
    dtype: torch.dtype
    """What the model computes in: float32, or bfloat16 by autocast over float32 weights."""
    compile: bool

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.type, self.dtype, enabled=self.dtype != torch.float32)


def resolve(device: str, precision: str, compile: bool | None) -> Device:
    """What `auto` and null stand for here. Raises UserError for an unknown word or a missing GPU."""
    kind = resolve_type("trainer.device", device)
    if precision not in ("auto", *PRECISIONS):
        raise UserError(f"trainer.precision is {precision}; allowed are auto, fp32 and bf16")
    on_gpu = kind == "cuda"
    dtype = PRECISIONS[("bf16" if on_gpu else "fp32") if precision == "auto" else precision]
    return Device(kind, dtype, on_gpu if compile is None else compile)


def resolve_type(key: str, device: str) -> str:
    """The device type, cpu or cuda, that the setting `key` asks for. Raises UserError as `resolve` does."""
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"{key} is {device}; allowed are auto, cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key} is cuda and PyTorch sees no CUDA GPU here; say {key}=cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
