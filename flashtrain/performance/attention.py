"""The speed of attention variants on one problem, forward and backward, on the area that the mask shows.

A variant that raises, or whose results are not right on exactly that problem, has no speed, only the reason.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashtrain.kernels.attention import AttentionSpec, Deviation, Intervals, Reference, attention, refusal
from flashtrain.performance.timing import Clock, Stage, Timing, interleaved

FLOPS_PER_VISIBLE_PAIR = {"forward": 4, "backward": 10}
"""For each head and element of the head dimension: two products of two operations, and five (FlashAttention's
convention; arXiv 2205.14135). What a kernel computes twice, or of hidden pairs, is not counted."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

PASSES = tuple(FLOPS_PER_VISIBLE_PAIR)

DRAWN_SAMPLES = 2
"""How many (row of the batch, KV head) a check compares beside the first and the last."""


@dataclass(frozen=True)
class Problem:
    """One call of attention: as many queries as keys, one head dimension."""

    mask: str
    length: int
    batch: int
    head_dim: int
    num_q_heads: int
    num_kv_heads: int

    def flops(self, pass_name: str, visible: int) -> int:
        """The operations of a pass that `visible` pairs of query and key ask for."""
        return FLOPS_PER_VISIBLE_PAIR[pass_name] * visible * self.num_q_heads * self.head_dim

    def spec(self, intervals: Intervals, device: str, dtype: torch.dtype) -> AttentionSpec:
        return AttentionSpec.on(
            device,
            dtype=dtype,
            head_dim=self.head_dim,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            q_len=self.length,
            kv_len=self.length,
            intervals=intervals,
        )


@dataclass(frozen=True)
class NoSpeed:
    """Why a variant has no speed on a problem."""

    word: str
    """In place of a figure."""
    reason: str | None = None
    """The end of a sentence that begins with the name of the variant, where the word does not say it all."""

    def __str__(self) -> str:
        return self.word if self.reason is None else self.reason


@dataclass(frozen=True)
class Check:
    """What a variant made of a problem, forward and backward, beside what is right."""

    compared: tuple[tuple[int, int], ...]
    """The (row of the batch, KV head) whose elements the deviations are of, each with its group of query heads."""
    deviations: dict[str, Deviation]
    """Of out, dq, dk and dv."""
    not_finite: tuple[str, ...]
    """Those of them that hold NaN or infinity, anywhere."""

    @property
    def failure(self) -> str | None:
        """What is wrong, in words."""
        words = []
        for name, deviation in self.deviations.items():
            if name in self.not_finite:
                words.append(f"{name} not finite")
            elif not math.isfinite(deviation.error):
                words.append(deviation.what)
            elif not deviation.passes:
                words.append(f"{name} {deviation.ratio:.3g}x allowed")
        return f"check failed: {', '.join(words)}" if words else None


@dataclass(frozen=True)
class Measurement:
    problem: Problem
    variant: str
    pass_name: str
    flops: int
    result: Timing | NoSpeed
    check: Check | None
    """None where it did not come to an end."""

    @property
    def tflops(self) -> float | None:
        """10^12 operations of the visible area per second, at the median."""
        return self.flops / self.result.median / 1e12 if isinstance(self.result, Timing) else None


def measure(
    problem: Problem,
    intervals: Intervals,
    variants: list[str],
    passes: list[str],
    clock: Clock,
    *,
    device: str,
    dtype: torch.dtype,
    warmup: int,
    rounds: int,
    seed: int,
) -> list[Measurement]:
    """Check every variant on the problem and time those that pass, interleaved, one pass after the other.

    What a variant raises is the reason that it has no speed, and ends nothing; an interruption does.

    Inputs and the gradient of out are normal numbers. The forward is that of training, with what the backward
    needs kept; a backward is that of out alone, from a forward just before it.
    """
    q, k, v, dout = _inputs(problem, device, dtype, seed)
    spec = problem.spec(intervals, device, dtype)
    refused = {name: NoSpeed("-", reason) for name in variants if (reason := refusal(name, spec)) is not None}
    calls = {name: partial(attention, intervals=intervals, variant=name) for name in variants if name not in refused}
    checks, unfit = _check(calls, (q, k, v), intervals, dout, seed)

    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    visible = intervals.visible(problem.batch, problem.length, problem.length)
    measurements = []
    for pass_name in passes:
        stages = {name: _stage(pass_name, call, leaves, dout) for name, call in calls.items() if name not in unfit}
        raised: dict[str, NoSpeed] = {}

        def note(name: str, error: Exception, raised: dict[str, NoSpeed] = raised) -> None:
            raised[name] = _raised(error)

        timings = interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed, on_error=note)
        results = refused | unfit | raised | timings
        measurements += [
            Measurement(problem, name, pass_name, problem.flops(pass_name, visible), results[name], checks.get(name))
            for name in variants
        ]
    return measurements


def _inputs(problem: Problem, device: str, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = (problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads, problem.num_q_heads)
    return [
        torch.randn(
            problem.batch, problem.length, count, problem.head_dim, generator=generator, device=device, dtype=dtype
        )
        for count in heads
    ]


def _check(
    calls: dict[str, Call], inputs: tuple[Tensor, Tensor, Tensor], intervals: Intervals, dout: Tensor, seed: int
) -> tuple[dict[str, Check], dict[str, NoSpeed]]:
    """The checks of every call that comes to an end, and why some calls have no speed."""
    if not calls:
        return {}, {}
    compared = _samples(inputs[1].shape[0], inputs[1].shape[2], seed)
    try:
        reference = Reference.of(inputs, intervals, dout=dout, samples=compared)
    except Exception as error:  # on a CPU a lack of memory is no error of its own
        return {}, dict.fromkeys(calls, NoSpeed(f"not checked: {_one_line(error)}"))
    checks, unfit = {}, {}
    for name, call in calls.items():
        try:
            checks[name] = Check(compared, reference.deviations(call), _not_finite(call, inputs, dout))
        except Exception as error:  # whatever it is, the other variants are still to be measured
            unfit[name] = _raised(error)
    unfit |= {name: NoSpeed(check.failure) for name, check in checks.items() if check.failure is not None}
    return checks, unfit


def _samples(rows: int, kv_heads: int, seed: int) -> tuple[tuple[int, int], ...]:
    """The first (row, KV head), the last, and some between that the seed draws, in order."""
    last = rows * kv_heads - 1
    between = range(1, last)
    drawn = random.Random(seed).sample(between, min(DRAWN_SAMPLES, len(between)))
    return tuple(divmod(place, kv_heads) for place in sorted({0, last, *drawn}))


def _not_finite(call: Call, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor) -> tuple[str, ...]:
    """The names of the results of a run on all inputs that hold NaN or infinity."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out = call(*leaves)
    tensors = (out, *torch.autograd.grad(out, leaves, dout))
    names = ("out", "dq", "dk", "dv")
    return tuple(name for name, x in zip(names, tensors, strict=True) if not x.isfinite().all())


def _raised(error: Exception) -> NoSpeed:
    return NoSpeed(f"failed: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _stage(pass_name: str, call: Call, leaves: tuple[Tensor, ...], dout: Tensor) -> Stage:
    if pass_name == "forward":
        return lambda: partial(call, *leaves)
    return lambda: partial(torch.autograd.grad, call(*leaves), leaves, dout)
