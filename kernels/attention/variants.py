"""The table of variants: their names, their limits, their adapters, and the order that "auto" tries.

An explicit name never falls back to another variant. The files imported here need torch only, so that custom
operators exist before torch.compile traces a call; kernels are imported when they are first launched.
"""

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import limits, ops, sdpa
from .flex import flex
from .intervals import Intervals
from .spec import AttentionSpec
from .standard import out_alone, standard

log = logging.getLogger(__name__)

Attend = Callable[[Tensor, Tensor, Tensor, Intervals, float, float], tuple[Tensor, Tensor | None]]


class Unsupported(ValueError):
    """A variant that does not exist, or was asked for what it cannot do; the message is one sentence."""


@dataclass(frozen=True)
class Variant:
    """What it is, in words, for the table of what each supports; `unsupported(spec)` is why not, or None;
    `attend(q, k, v, intervals, scale, softcap)` is (out, lse or None); `attend_alone`, where there is one, is (out,
    None) for less, and called where nobody asks for the lse; `attend_deterministic`, where there is one, is called for
    the same bits every run, which the others' `attend` has where they support it; `wrong(spec)`, where there is one,
    tries the variant on the GPU here: None, or what keeps "auto" from it, as the end of a sentence that begins with its
    name."""

    description: str
    unsupported: Callable[[AttentionSpec], str | None]
    attend: Attend
    attend_alone: Attend | None = None
    attend_deterministic: Attend | None = None
    wrong: Callable[[AttentionSpec], str | None] | None = None


def _flash_hopper_wrong(spec: AttentionSpec) -> str | None:
    head_dim = max(spec.head_dim, spec.v_head_dim)
    # Compared, not computed with: a traced head dimension may be symbolic, and what a constant is asked for may not.
    limit = next(limit for limit in limits.FLASH_HOPPER_HEAD_DIMS if head_dim <= limit)
    # In order for every deterministic call, also where flash_v2's backward is then taken.
    if not spec.needs_grad:
        return _trial_of_flash_hopper(limit, "forward")
    return _trial_of_flash_hopper(limit, "forward", "backward in order" if spec.deterministic else "backward")


# A constant for the graph: torch.compile traces none of the trial, whose verdict does not change.
@torch.compiler.assume_constant_result
def _trial_of_flash_hopper(head_dim: int, *passes: str) -> str | None:
    from .flash_hopper.toolchain import wrong

    return wrong(head_dim, *passes)


VARIANTS = {
    "standard": Variant(
        "the textbook: S and P written out; the oracle of all tests", limits.standard, standard, out_alone
    ),
    "flash_v1": Variant("FlashAttention as first published, for study", limits.flash_v1, ops.flash_v1),
    "flash_v2": Variant("our Triton kernels: forward, backward, no atomics", limits.flash_v2, ops.flash_v2),
    "flash_hopper": Variant(
        "our Gluon kernels: TMA, warp-specialised WGMMA, forward and backward",
        limits.flash_hopper,
        ops.flash_hopper,
        attend_deterministic=ops.flash_hopper_deterministic,
        wrong=_flash_hopper_wrong,
    ),
    "sdpa_math": Variant("PyTorch's plain kernel", limits.sdpa_math, sdpa.sdpa_math),
    "sdpa_efficient": Variant("PyTorch's memory-efficient kernel", limits.sdpa_efficient, sdpa.sdpa_efficient),
    "sdpa_flash": Variant("PyTorch's FlashAttention-2", limits.sdpa_flash, sdpa.sdpa_flash),
    "sdpa_cudnn": Variant("PyTorch's cuDNN kernel", limits.sdpa_cudnn, sdpa.sdpa_cudnn),
    "flex": Variant("PyTorch's FlexAttention, compiled for each new shape", limits.flex, flex),
}

VARIANT_NAMES = tuple(VARIANTS)
NAMES = ("auto", *VARIANT_NAMES)


def attend_of(name: str, *, deterministic: bool, needs_lse: bool) -> Attend:
    """What variant `name` is called by."""
    variant = VARIANTS[name]
    if deterministic and variant.attend_deterministic is not None:
        return variant.attend_deterministic
    if not needs_lse and variant.attend_alone is not None:
        return variant.attend_alone
    return variant.attend


def refusal(name: str, spec: AttentionSpec) -> str | None:
    """Why variant `name` cannot serve `spec`, as the end of a sentence that begins with its name, or None.

    Raises Unsupported where there is no such variant.
    """
    if name not in VARIANTS:
        nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        raise Unsupported(
            f"attention: there is no variant {name!r}; the nearest is {nearest!r} of {', '.join(NAMES)}"
        )
    return VARIANTS[name].unsupported(spec)


def supporting(spec: AttentionSpec) -> tuple[str, ...]:
    """The variants that can serve `spec`."""
    return tuple(name for name in VARIANTS if refusal(name, spec) is None)


def require(name: str, spec: AttentionSpec) -> None:
    """Raise Unsupported, with the variants that would do, unless variant `name` can serve `spec`."""
    reason = refusal(name, spec)
    if reason is not None:
        would_do = ", ".join(supporting(spec)) or "no variant"
        raise Unsupported(f"attention: {name} {reason}; {would_do} would do")


def choose(spec: AttentionSpec) -> tuple[str, str]:
    """The variant expected to be the fastest of those that can serve `spec`, and the reason in words.

    Raises Unsupported where none can.
    """
    passed_over = ""
    for name in _fastest_first(spec):
        reason = refusal(name, spec) or _found_wrong(name, spec)
        if reason is None:
            return name, f"the fastest that can serve this call{passed_over}"
        passed_over = f"{passed_over}; {name} {reason}"
    raise Unsupported(f"attention: no variant can serve this call{passed_over}")


def _found_wrong(name: str, spec: AttentionSpec) -> str | None:
    wrong = VARIANTS[name].wrong
    return None if wrong is None else wrong(spec)


# flex is never tried: what it serves flash_v2 serves too, without compiling for seconds at each new shape.
def _fastest_first(spec: AttentionSpec) -> tuple[str, ...]:
    if spec.device_type != "cuda":
        return ("sdpa_flash", "sdpa_math", "standard")
    if spec.dtype.itemsize > 2:
        return ("sdpa_efficient", "flash_v2", "sdpa_math", "standard")
    if spec.sm is None or spec.sm < 90:
        return ("flash_v2", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "standard")
    # flash_hopper with softcap, of flash_v2's speed (H200, causal, 8k): at head dimension 64 0.72, at 128 1.21 in both
    # passes together, 0.76 in the forward alone; both together with dQ in order were not measured.
    both_fast = spec.needs_grad and not spec.deterministic
    if spec.softcap and (max(spec.head_dim, spec.v_head_dim) <= 64 or not both_fast):
        return ("flash_v2", "sdpa_efficient", "sdpa_math", "standard")
    return ("flash_hopper", "sdpa_cudnn", "flash_v2", "sdpa_flash", "sdpa_efficient", "sdpa_math", "standard")


def resolve(variant: str, spec: AttentionSpec) -> str:
    """The name of the variant to call: the chosen one for "auto", else `variant` itself.

    A choice is logged the first time that it is made. Raises Unsupported where it cannot serve `spec`.
    """
    if variant != "auto":
        require(variant, spec)
        return variant
    name, reason = choose(spec)
    # A traced reason may hold symbolic lengths, which cannot be printed.
    _log_choice(name, "for a compiled call" if torch.compiler.is_compiling() else reason)
    return name


_logged: set[str] = set()


@torch.compiler.assume_constant_result
def _log_choice(name: str, reason: str) -> None:
    if name not in _logged:
        _logged.add(name)
        log.info("attention: auto chose %s, %s", name, reason)
