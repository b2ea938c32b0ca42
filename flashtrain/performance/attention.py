"""The speed of attention variants and peers on one problem, forward and backward, on the area that the mask shows.

One that raises, or whose results are not right on exactly that problem, has no speed, only the reason. Of a peer
without a backward, out alone is checked and the forward alone timed.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashtrain.kernels.attention import AttentionSpec, Deviation, Intervals, Reference, attention, refusal
from flashtrain.performance.no_speed import NoSpeed, one_line
from flashtrain.performance.peers import Peer
from flashtrain.performance.timing import Clock, Stage, Timing, interleaved

FLOPS_PER_VISIBLE_PAIR = {"forward": 4, "backward": 10}
"""For each head and element of the head dimension: two products of two operations, and five (FlashAttention's
convention; arXiv 2205.14135). What a kernel computes twice, or of hidden pairs, is not counted."""

Inputs = tuple[Tensor, Tensor, Tensor]
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
class Check:
    """What a variant or peer made of a problem, forward and backward, beside what is right."""

    compared: tuple[tuple[int, int], ...]
    """The (row of the batch, KV head) whose elements the deviations are of, each with its group of query heads."""
    deviations: dict[str, Deviation]
    """Of out, dq, dk and dv; of out alone where there is no backward."""
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
    """Its name, or that of a peer."""
    pass_name: str
    flops: int
    result: Timing | NoSpeed
    check: Check | None
    """None where it did not come to an end."""
    detached: bool = False
    """Whether the inputs required no gradients, as those of all others did, because it takes no such inputs."""

    @property
    def tflops(self) -> float | None:
        """10^12 operations of the visible area per second, at the median."""
        return self.flops / self.result.median / 1e12 if isinstance(self.result, Timing) else None


class _ChangedInputs(Exception):
    """Somebody wrote to what all are given."""


class _Kept:
    """Copies of what all are given, for when one writes to it."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._pairs = [(tensor, tensor.clone()) for tensor in tensors]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """At the end all is as it was. Raises _ChangedInputs if it was not, in place of other exceptions."""
        try:
            yield
        except Exception as error:
            if self._restore():
                raise _ChangedInputs from error
            raise
        if self._restore():
            raise _ChangedInputs

    def _restore(self) -> bool:
        """Whether there was anything to restore."""
        changed = [(tensor, copy) for tensor, copy in self._pairs if not torch.equal(tensor, copy)]
        for tensor, copy in changed:
            tensor.copy_(copy)
        return bool(changed)


@dataclass(frozen=True)
class _Contender:
    """What is checked and timed under one name."""

    call: Call
    no_backward: str | None = None
    """Why it has none, as the end of a sentence that begins with its name."""
    detached: bool = False
    """Whether it takes no inputs that require gradients."""


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
    peers: Sequence[Peer] = (),
) -> list[Measurement]:
    """Check every variant and peer on the problem and time those that pass, interleaved, one pass after the other.

    What one raises is the reason that it has no speed, and ends nothing; an interruption does. A peer that writes to
    what it is given has none either, and the others are given what was there before.

    Inputs and the gradient of out are normal numbers. The forward is that of training, with what the backward
    needs kept; a backward is that of out alone, from a forward just before it. Only a peer that takes no inputs that
    require gradients is given others.
    """
    q, k, v, dout = _inputs(problem, device, dtype, seed)
    spec = problem.spec(intervals, device, dtype)
    refusals = {name: refusal(name, spec) for name in variants}
    refusals |= {peer.name: peer.refusal(spec.intervals) for peer in peers}
    refused = {name: NoSpeed("-", reason) for name, reason in refusals.items() if reason is not None}
    contenders = {
        name: _Contender(partial(attention, intervals=intervals, variant=name))
        for name in variants
        if name not in refused
    }
    kept = _Kept((q, k, v, dout) if peers else ())
    unfit = {}
    for peer in peers:
        if peer.name not in refused:
            try:
                with kept.unchanged():
                    contender = _tried(partial(peer.attend, intervals=spec.intervals), (q, k, v), dout)
                contenders[peer.name] = contender
            except Exception as error:
                unfit[peer.name] = _raised(error)
    checks, failed = _check(contenders, (q, k, v), intervals, dout, seed, kept)
    unfit |= failed

    leaves = _leaves((q, k, v))
    visible = intervals.visible(problem.batch, problem.length, problem.length)
    measurements = []
    for pass_name in passes:
        fit = {name: contender for name, contender in contenders.items() if name not in unfit}
        lacking = {} if pass_name == "forward" else _without_backward(fit)
        stages = {name: _stage(pass_name, one, leaves, dout) for name, one in fit.items() if name not in lacking}
        raised: dict[str, NoSpeed] = {}

        def note(name: str, error: Exception, raised: dict[str, NoSpeed] = raised) -> None:
            raised[name] = _raised(error)

        timings = interleaved(stages, clock, warmup=warmup, rounds=rounds, seed=seed, on_error=note)
        results = refused | unfit | lacking | raised | timings
        measurements += [
            Measurement(
                problem,
                name,
                pass_name,
                problem.flops(pass_name, visible),
                results[name],
                checks.get(name),
                detached=name in timings and contenders[name].detached,
            )
            for name in refusals
        ]
    return measurements


def _tried(call: Call, inputs: Inputs, dout: Tensor) -> _Contender:
    """The call of a peer, and whether it has a backward. Raises what it raises on inputs without gradients, too, and
    OutOfMemoryError, which says nothing about a backward."""
    leaves = _leaves(inputs)
    try:
        out = call(*leaves)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"has no backward: it takes no inputs that require gradients ({one_line(error)})"
    else:
        return _Contender(call, _lack_of_backward(out, leaves, dout))
    call(*inputs)
    return _Contender(call, reason, detached=True)


def _lack_of_backward(out: Tensor, leaves: Inputs, dout: Tensor) -> str | None:
    if out.grad_fn is None:
        return "has no backward: its out has no grad_fn"
    try:
        torch.autograd.grad(out, leaves, dout)
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        return f"has no backward: it raises {one_line(error)}"
    return None


def _without_backward(contenders: dict[str, _Contender]) -> dict[str, NoSpeed]:
    return {
        name: NoSpeed("-", contender.no_backward)
        for name, contender in contenders.items()
        if contender.no_backward is not None
    }


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
    contenders: dict[str, _Contender], inputs: Inputs, intervals: Intervals, dout: Tensor, seed: int, kept: _Kept
) -> tuple[dict[str, Check], dict[str, NoSpeed]]:
    """The checks of all that come to an end, and why some have no speed."""
    if not contenders:
        return {}, {}
    compared = _samples(inputs[1].shape[0], inputs[1].shape[2], seed)
    try:
        reference = Reference.of(inputs, intervals, dout=dout, samples=compared)
    except Exception as error:  # on a CPU a lack of memory is no error of its own
        return {}, dict.fromkeys(contenders, NoSpeed(f"not checked: {one_line(error)}"))
    checks, unfit = {}, {}
    for name, contender in contenders.items():
        try:
            with kept.unchanged():
                if contender.no_backward is None:
                    deviations = reference.deviations(contender.call)
                    not_finite = _not_finite(contender.call, inputs, dout)
                else:
                    deviations, not_finite = _check_out(contender, reference, inputs)
            checks[name] = Check(compared, deviations, not_finite)
        except Exception as error:  # whatever it is, the others are still to be measured
            unfit[name] = _raised(error)
    unfit |= {name: NoSpeed(check.failure) for name, check in checks.items() if check.failure is not None}
    return checks, unfit


def _samples(rows: int, kv_heads: int, seed: int) -> tuple[tuple[int, int], ...]:
    """The first (row, KV head), the last, and some between that the seed draws, in order."""
    last = rows * kv_heads - 1
    between = range(1, last)
    drawn = random.Random(seed).sample(between, min(DRAWN_SAMPLES, len(between)))
    return tuple(divmod(place, kv_heads) for place in sorted({0, last, *drawn}))


def _not_finite(call: Call, inputs: Inputs, dout: Tensor) -> tuple[str, ...]:
    """The names of the results of a run on all inputs that hold NaN or infinity."""
    leaves = _leaves(inputs)
    out = call(*leaves)
    tensors = (out, *torch.autograd.grad(out, leaves, dout))
    names = ("out", "dq", "dk", "dv")
    return tuple(name for name, x in zip(names, tensors, strict=True) if not x.isfinite().all())


def _check_out(
    contender: _Contender, reference: Reference, inputs: Inputs
) -> tuple[dict[str, Deviation], tuple[str, ...]]:
    """The deviation of out, by the same rule, and its name where it is not finite."""
    out = contender.call(*(inputs if contender.detached else _leaves(inputs))).detach()
    deviations = reference.deviations(lambda *leaves: _Given.apply(out, *leaves))
    return {"out": deviations["out"]}, () if out.isfinite().all() else ("out",)


class _Given(torch.autograd.Function):
    """An out that is there already, with gradients of zero, for a comparison that runs a backward."""

    @staticmethod
    def forward(ctx, out: Tensor, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return out.view_as(out)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def _leaves(inputs: Inputs) -> Inputs:
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    return q, k, v


def _raised(error: Exception) -> NoSpeed:
    return NoSpeed("failed: changes its inputs") if isinstance(error, _ChangedInputs) else NoSpeed.of(error)


def _stage(pass_name: str, contender: _Contender, leaves: Inputs, dout: Tensor) -> Stage:
    call = contender.call
    if pass_name == "forward":
        inputs = tuple(x.detach() for x in leaves) if contender.detached else leaves
        return lambda: partial(call, *inputs)
    return lambda: partial(torch.autograd.grad, call(*leaves), leaves, dout)
