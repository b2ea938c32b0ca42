"""Functions of other packages, to be measured beside ours: how they are named and called."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Intervals


def named_function(name: str, example: str) -> Callable[..., Any]:
    """The function that `name`, MODULE:FUNCTION as in `example`, says, its module imported.

    Raises UserError where there is none.
    """
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise UserError(f"peers has {name}; write MODULE:FUNCTION, as in {example}")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
    except (Exception, SystemExit) as error:  # a library that does not fit the others here raises anything
        raise UserError(
            f"peers has {name}, and {module_name} cannot be imported ({error!r}); install the package that holds "
            "it, put its folder on PYTHONPATH, or leave it out"
        ) from error
    if not callable(function):
        raise UserError(f"peers has {name}, and {module_name} has no function {function_name}; name one of its own")
    return function


def versions_of(name: str) -> list[str]:
    """The installed distributions that the module of a peer may be of, or where it is of none its own file, in words;
    empty where it has neither."""
    module_name, _, _ = name.partition(":")
    package, _, _ = module_name.partition(".")
    if found := packages_distributions().get(package):
        return [f"{distribution} {version(distribution)}" for distribution in sorted(set(found))]
    file = getattr(importlib.import_module(module_name), "__file__", None)
    return [_contents(Path(file))] if file and Path(file).is_file() else []


def _contents(file: Path) -> str:
    """Its name and the first 12 digits of what `sha256sum` prints of it."""
    return f"{file.name} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


@contextlib.contextmanager
def _exits_as_errors() -> Iterator[None]:
    try:
        yield
    except SystemExit as stop:
        raise RuntimeError(f"raised {stop!r}") from stop


@dataclass(frozen=True)
class Peer:
    """A function of flash-attention's convention: `function(q, k, v, causal=...)` with q (B, S, Hq, D) and k and v
    (B, S, Hkv, D) gives out (B, S, Hq, D), or a tuple that begins with it; the scale is D**-0.5."""

    name: str
    """MODULE:FUNCTION, as it was asked for; no variant has a colon."""
    function: Callable[..., Tensor | tuple[Tensor, ...]]

    @classmethod
    def named(cls, name: str) -> Peer:
        """The function that `name` says. Raises UserError where there is none."""
        return cls(name, named_function(name, "flash_attn_interface:flash_attn_func"))

    def refusal(self, intervals: Intervals) -> str | None:
        """Why it cannot do that mask, as the end of a sentence that begins with its name, or None."""
        if intervals.is_full or intervals.is_causal:
            return None
        mask = "documents, chunks or a prefix" if intervals.bounds is not None else str(intervals)
        return f"takes the full and the causal mask, not {mask}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, intervals: Intervals) -> Tensor:
        """Its out. Raises what the function raises, RuntimeError in place of SystemExit, and TypeError where out is no
        tensor."""
        with _exits_as_errors():
            result = self.function(q, k, v, causal=intervals.is_causal)
        is_sequence = isinstance(result, tuple | list)
        out = result[0] if is_sequence and result else result
        if not isinstance(out, Tensor):
            what = f"an empty {type(result).__name__}" if is_sequence and not result else type(out).__name__
            raise TypeError(f"returned {what}, not out or a tuple that begins with it")
        return out


@dataclass(frozen=True)
class TrainingPeer:
    """A function `function(sequence_length, tokens)` that gives (step, tokens): `step()` takes one optimizer step of so
    many tokens, in rows of that length; it is asked for about as many as are given."""

    name: str
    """MODULE:FUNCTION, as it was asked for."""
    function: Callable[[int, int], tuple[Callable[[], object], int]]

    @classmethod
    def named(cls, name: str) -> TrainingPeer:
        """The function that `name` says. Raises UserError where there is none."""
        return cls(name, named_function(name, "my_trainer:gpt2"))

    def build(self, sequence_length: int, tokens: int) -> tuple[Callable[[], None], int]:
        """Its step and the tokens of one. Raises what the function raises, RuntimeError in place of SystemExit, also
        in a step, and TypeError where it gives something else."""
        with _exits_as_errors():
            result = self.function(sequence_length, tokens)
        match result:
            case (step, taken) if callable(step):
                return _step_of(step), _count(taken)
        is_sequence = isinstance(result, tuple | list)
        what = f"({', '.join(type(part).__name__ for part in result)})" if is_sequence else type(result).__name__
        raise TypeError(
            f"returned {what}, not (step, tokens); return a function that takes one step, and how many tokens that has"
        )


def _count(tokens: object) -> int:
    """An integer of any type but bool. Raises TypeError for what is none, or not above 0."""
    try:
        count = 0 if isinstance(tokens, bool) else operator.index(tokens)
    except TypeError:
        count = 0
    if count < 1:
        raise TypeError(
            f"returned {tokens!r} as the tokens of a step; return an integer above 0, the rows times their length"
        )
    return count


def _step_of(step: Callable[[], object]) -> Callable[[], None]:
    def take() -> None:
        with _exits_as_errors():
            step()

    return take
