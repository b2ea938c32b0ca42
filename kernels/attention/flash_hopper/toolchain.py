"""Whether the forward comes out right of this toolchain: a trial of milliseconds, once compiled, that guards "auto".

A ptxas before CUDA 13.3 may overwrite registers that an asynchronous WGMMA still reads P from
(triton-lang/triton#11781), and nothing but the numbers shows it. So they are compared where they are known to the
last rounding: for small integers at scale ln 2 every probability is a power of two and every sum is exact, in whatever
order. The right answers are integer arithmetic, which no setting of PyTorch makes inexact or refuses.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..intervals import Intervals
from ..limits import FLASH_HOPPER_HEAD_DIMS

SCALE = math.log(2)

# Kinds of query rows, and the largest score of an integer query and a key of two ones.
KINDS, LARGEST_SCORE = 4, 4
ROWS, Q_HEADS, KV_HEADS = 16, 4, 2


class Case(NamedTuple):
    """A call of ROWS equal rows of the batch: so many that every multiprocessor has several tiles."""

    head_dim: int
    intervals: Intervals
    q_len: int
    kv_len: int


CASES = tuple(
    Case(head_dim, intervals, *lengths)
    for head_dim, intervals, lengths in itertools.product(
        FLASH_HOPPER_HEAD_DIMS, (Intervals.causal(), Intervals.full()), ((512, 512), (2304, 2304), (336, 1000))
    )
)

# device, head dimension -> what came out there
_verdicts: dict[tuple[int, int], str | None] = {}


def wrong(head_dim: int) -> str | None:
    """Why "auto" must not take flash_hopper in this process, as the end of a sentence that begins with its name.

    Tries it on the current device when first asked there about one of FLASH_HOPPER_HEAD_DIMS: some twenty seconds where
    its kernels are not compiled yet. None where all is right, and on a device that it does not run on.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    device = torch.cuda.current_device()
    tried = device, head_dim
    if tried not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return "cannot be tried with this toolchain while a CUDA graph is captured; call it once before"
        _verdicts[tried] = _verdict(torch.device("cuda", device), head_dim)
    return _verdicts[tried]


def _verdict(device: torch.device, head_dim: int) -> str | None:
    # On real tensors, whatever mode asks: a call that is exported sees none.
    with _disable_current_modes():
        wrong_numbers = sum(mistakes(case, torch.bfloat16, device) for case in CASES if case.head_dim == head_dim)
        if wrong_numbers == 0:
            return None
    import triton

    ptxas = triton.knobs.nvidia.ptxas
    return (
        f"computes wrong numbers with this toolchain (triton {triton.__version__}, ptxas {ptxas.version}): name a "
        "ptxas of CUDA 13.3 or later in TRITON_PTXAS_PATH"
    )


def mistakes(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How many numbers the kernel gets wrong: of out by more than a rounding to `dtype`, of lse by more than 1e-5."""
    from .forward import forward

    q, k, v, right_out, right_lse = exact_problem(case, device)
    q, k, v = (x.to(dtype).repeat(ROWS, 1, 1, 1) for x in (q, k, v))
    with torch.no_grad():
        out, lse = forward(q, k, v, case.intervals, SCALE, 0.0)
    # Half of the distance between neighbours in `dtype`, and what the division of two exact sums in fp32 may add.
    numbers = torch.finfo(dtype)
    rounding = (numbers.eps / 2 + 2**-20) * right_out.abs().clamp(min=numbers.smallest_normal)
    wrong_out = ~((out - right_out).abs() <= rounding)
    wrong_lse = ~((lse - right_lse).abs() <= 1e-5)
    return wrong_out.sum() + wrong_lse.sum()


def exact_problem(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Integer q, k and v of one row of the batch, and the right out (1, Sq, Hq, D) and lse (1, Hq, Sq) in float64.

    Query rows are of few kinds, so running sums over the keys answer all of them: each sees keys from the first on.
    """
    head_dim, intervals, q_len, kv_len = case
    generator = torch.Generator(device).manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    kind = integers(0, KINDS - 1, q_len)
    queries_HTD = integers(-2, 2, Q_HEADS, KINDS, head_dim)
    k_GND = torch.zeros(KV_HEADS, kv_len, head_dim, dtype=torch.int64, device=device)
    columns = torch.arange(head_dim, device=device)
    for half in (0, head_dim // 2):  # two columns of each key are 1 or -1
        place = integers(half, half + head_dim // 2 - 1, KV_HEADS, kv_len, 1)
        k_GND += (columns == place) * (2 * integers(0, 1, KV_HEADS, kv_len, 1) - 1)
    v_GND = integers(-4, 4, KV_HEADS, kv_len, head_dim)

    k_HND, v_HND = (x.repeat_interleave(Q_HEADS // KV_HEADS, 0) for x in (k_GND, v_GND))
    scores_HTN = (queries_HTD[:, :, None] * k_HND[:, None]).sum(-1)
    p_HTN = 1 << (scores_HTN + LARGEST_SCORE)
    last = intervals.bounds_of(q_len, kv_len, device).keys[1, 0].long() - 1
    sums_HM = p_HTN.cumsum(-1)[:, kind, last].double()
    out_HMD = (p_HTN[..., None] * v_HND[:, None]).cumsum(-2)[:, kind, last] / sums_HM[..., None]
    lse_HM = sums_HM.log() - LARGEST_SCORE * SCALE
    q_HMD = queries_HTD[:, kind]
    return *(x_HSD.transpose(0, 1)[None] for x_HSD in (q_HMD, k_GND, v_GND, out_HMD)), lse_HM[None]
