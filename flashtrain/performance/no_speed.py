"""What stands in place of a speed: a word, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NoSpeed:
    """Why a variant or peer has no speed on a problem."""

    word: str
    """In place of a figure."""
    reason: str | None = None
    """The end of a sentence that begins with its name, where the word does not say it all."""

    @classmethod
    def of(cls, error: Exception) -> NoSpeed:
        """That of one which raises."""
        return cls(f"failed: {one_line(error)}")

    def __str__(self) -> str:
        return self.word if self.reason is None else self.reason


def one_line(error: BaseException) -> str:
    """Its type and the first line of what it says; of a lack of memory, how much was asked for where that is said."""
    if isinstance(error, torch.OutOfMemoryError):
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        return f"out of memory, {asked[1]} asked for" if asked else "out of memory"
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
