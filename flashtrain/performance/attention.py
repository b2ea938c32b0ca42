"""The speed of attention variants on one problem, forward and backward, on the area that the mask shows.

A variant whose results are not right on exactly that problem has no speed, only the reason.
"""

import math
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


@dataclass(frozen=True)
class Measurement:
    problem: Problem
    variant: str
    pass_name: str
    flops: int
    result: Timing | NoSpeed
    check: dict[str, Deviation] | None
    """Of each tensor; None where the check did not come to an end."""

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

    Inputs and the gradient of out are normal numbers. The forward is that of training, with what the backward
    needs kept; a backward is that of out alone, from a forward just before it.
    """
    q, k, v, dout = _inputs(problem, device, dtype, seed)
    spec = problem.spec(intervals, device, dtype)
    refused = {name: NoSpeed("-", reason) for name in variants if (reason := refusal(name, spec)) is not None}
    calls = {name: partial(attention, intervals=intervals, variant=name) for name in variants if name not in refused}
    checks, failed = _check(calls, (q, k, v), intervals, dout)

    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    visible = intervals.visible(problem.batch, problem.length, problem.length)
    measurements = []
    for pass_name in passes:
        stages = {name: _stage(pass_name, call, leaves, dout) for name, call in calls.items() if name not in failed}
        results = refused | failed | interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed)
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
    calls: dict[str, Call], inputs: tuple[Tensor, Tensor, Tensor], intervals: Intervals, dout: Tensor
) -> tuple[dict[str, dict[str, Deviation]], dict[str, NoSpeed]]:
    """The deviations of every call that comes to an end, on the first KV head of the first row and the last of the
    last, and why some have no speed."""
    if not calls:
        return {}, {}
    last = (inputs[1].shape[0] - 1, inputs[1].shape[2] - 1)
    try:
        reference = Reference.of(inputs, intervals, dout=dout, samples=list(dict.fromkeys([(0, 0), last])))
    except torch.OutOfMemoryError:
        return {}, dict.fromkeys(calls, NoSpeed("no memory to check it"))
    checks, failed = {}, {}
    for name, call in calls.items():
        try:
            checks[name] = reference.deviations(call)
        except torch.OutOfMemoryError:
            failed[name] = NoSpeed("out of memory")
    failed |= {name: NoSpeed(words) for name, check in checks.items() if (words := _check_failed(check))}
    return checks, failed


def _check_failed(check: dict[str, Deviation]) -> str | None:
    beyond = {name: deviation for name, deviation in check.items() if not deviation.passes}
    words = [
        f"{name} {deviation.ratio:.3g}x allowed" if math.isfinite(deviation.error) else f"{name} not finite"
        for name, deviation in beyond.items()
    ]
    return f"check failed: {', '.join(words)}" if words else None


def _stage(pass_name: str, call: Call, leaves: tuple[Tensor, ...], dout: Tensor) -> Stage:
    if pass_name == "forward":
        return lambda: partial(call, *leaves)
    return lambda: partial(torch.autograd.grad, call(*leaves), leaves, dout)
