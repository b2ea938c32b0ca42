"""Whether the kernels come out right of this toolchain: a trial of milliseconds, once compiled, that guards "auto".

A ptxas before CUDA 13.3 may overwrite registers that an asynchronous WGMMA still reads P from
(triton-lang/triton#11781), and nothing but the numbers shows it. So they are compared where they are known to the
last rounding (exact_problems.py).
"""

import functools

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .exact_problems import CASES, SCALE, Case, exact_backward, exact_forward

# Equal rows of the batch: so many that every multiprocessor has several tiles.
ROWS = 16

# device, head dimension, pass -> what came out there
_verdicts: dict[tuple[int, int, str], str | None] = {}


def wrong(head_dim: int, *passes: str) -> str | None:
    """Why "auto" must not take flash_hopper in this process, as the end of a sentence that begins with its name.

    Tries the passes named, of _MISTAKES, on the current device when first asked there about one of
    FLASH_HOPPER_HEAD_DIMS: some twenty seconds where the forward's kernels are not compiled yet, and six for the
    backward's. None where all is right, and on a device that it does not run on.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    device = torch.cuda.current_device()
    for name in passes:
        tried = device, head_dim, name
        if tried not in _verdicts:
            if torch.cuda.is_current_stream_capturing():
                return "cannot be tried with this toolchain while a CUDA graph is captured; call it once before"
            _verdicts[tried] = _verdict(torch.device("cuda", device), head_dim, name)
        if _verdicts[tried] is not None:
            return _verdicts[tried]
    return None


def _verdict(device: torch.device, head_dim: int, name: str) -> str | None:
    # On real tensors, whatever mode asks: a call that is exported sees none.
    with _disable_current_modes():
        cases = [case for case in CASES if case.head_dim == head_dim]
        wrong_numbers = sum(_MISTAKES[name](case, torch.bfloat16, device) for case in cases)
        if wrong_numbers == 0:
            return None
    import triton

    ptxas = triton.knobs.nvidia.ptxas
    return (
        f"computes wrong numbers in its {name} with this toolchain (triton {triton.__version__}, ptxas "
        f"{ptxas.version}): name a ptxas of CUDA 13.3 or later in TRITON_PTXAS_PATH"
    )


def forward_mistakes(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How many numbers the forward gets wrong: of out by more than a rounding to `dtype`, of lse by more than 1e-5."""
    from .forward import forward

    q, k, v, right_out, right_lse = exact_forward(case, device)
    with torch.no_grad():
        out, lse = forward(*(_rows(x, dtype) for x in (q, k, v)), case.intervals, SCALE, 0.0)
    return _misrounded(out, right_out) + (~((lse - right_lse).abs() <= 1e-5)).sum()


def backward_mistakes(case: Case, dtype: torch.dtype, device: torch.device, in_order: bool = False) -> Tensor:
    """How many numbers of dq, dk and dv the backward gets wrong, by more than a rounding to `dtype`."""
    from .backward import backward

    exact = exact_backward(case, device)
    q, k, v, out, dout = (_rows(x, dtype) for x in (exact.q, exact.k, exact.v, exact.out, exact.dout))
    dlse, lse = (_rows(x, torch.float32) for x in (exact.dlse, exact.lse))
    found = [x.new_empty(x.shape) for x in (q, k, v)]
    with torch.no_grad():
        backward(*found, dout, dlse, q, k, v, out, lse, case.intervals, SCALE, 0.0, in_order=in_order)
    return sum(_misrounded(x, right) for x, right in zip(found, (exact.dq, exact.dk, exact.dv), strict=True))


_MISTAKES = {
    "forward": forward_mistakes,
    "backward": backward_mistakes,
    "backward in order": functools.partial(backward_mistakes, in_order=True),
}


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).repeat(ROWS, *(1 for _ in x.shape[1:]))


def _misrounded(x: Tensor, right: Tensor) -> Tensor:
    """How many of x are not the right numbers in its dtype."""
    # Half of the distance between neighbours, and what a step in fp32 after the exact sums may add.
    numbers = torch.finfo(x.dtype)
    rounding = (numbers.eps / 2 + 2**-20) * right.abs().clamp(min=numbers.smallest_normal)
    return (~((x - right).abs() <= rounding)).sum()
