"""Triton's interpreter, without a search through triton.language at every call of a device function."""

import functools
import inspect

from triton.language.core import is_builtin
from triton.runtime import interpreter


def search_once() -> None:
    """Have the interpreter replace the builtins of a module by the names that it found at first."""
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(module, *arguments) -> None:
    """As Triton's, which a device function calls for all that its kernel has replaced already."""
    for name in _builtin_names(module):
        member = getattr(module, name)
        if is_builtin(member):
            interpreter._patch_attr(module, name, member, *arguments)


@functools.cache
def _builtin_names(module) -> list[str]:
    return [name for name, member in inspect.getmembers(module) if is_builtin(member)]
