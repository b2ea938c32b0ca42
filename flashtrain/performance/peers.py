"""Attention functions of other packages, to be measured beside the variants: how they are named and called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Intervals


@dataclass(frozen=True)
class Peer:
    """A function of flash-attention's convention: `function(q, k, v, causal=...)` with q (B, S, Hq, D) and k and v
    (B, S, Hkv, D) gives out (B, S, Hq, D), or a tuple that begins with it; the scale is D**-0.5."""

    name: str
    """MODULE:FUNCTION, as it was asked for; no variant has a colon."""
    function: Callable[..., Tensor | tuple[Tensor, ...]]

    @classmethod
    def named(cls, name: str) -> Peer:
        """The function that `name` says, its module imported. Raises UserError where there is none."""
        module_name, _, function_name = name.partition(":")
        if not (module_name and function_name):
            raise UserError(f"peers has {name}; write MODULE:FUNCTION, as in flash_attn_interface:flash_attn_func")
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
        return cls(name, function)

    @property
    def versions(self) -> list[str]:
        """The installed distributions that the module may be of."""
        package, _, _ = self.name.partition(":")[0].partition(".")
        return [f"{found} {version(found)}" for found in sorted(set(packages_distributions().get(package, [])))]

    def refusal(self, intervals: Intervals) -> str | None:
        """Why it cannot do that mask, as the end of a sentence that begins with its name, or None."""
        if intervals.is_full or intervals.is_causal:
            return None
        mask = "documents, chunks or a prefix" if intervals.bounds is not None else str(intervals)
        return f"takes the full and the causal mask, not {mask}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, intervals: Intervals) -> Tensor:
        """Its out. Raises what the function raises, RuntimeError in place of SystemExit, and TypeError where out is no
        tensor."""
        try:
            result = self.function(q, k, v, causal=intervals.is_causal)
        except SystemExit as stop:
            raise RuntimeError(f"raised {stop!r}") from stop
        is_sequence = isinstance(result, tuple | list)
        out = result[0] if is_sequence and result else result
        if not isinstance(out, Tensor):
            what = f"an empty {type(result).__name__}" if is_sequence and not result else type(out).__name__
            raise TypeError(f"returned {what}, not out or a tuple that begins with it")
        return out
