"""Tokens on disk, read a piece at a time: what is wrong with them is one sentence, in whatever process reads.

The file is not mapped into memory, since a process that touches a mapped file which has been cut short, or whose disk
fails, is killed by SIGBUS.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashtrain.errors import UserError


@dataclass(frozen=True)
class TokenFile:
    """`length` token ids below `vocab_size`, to be sliced as an array (length,) is; each slice is read anew."""

    path: Path
    dtype: np.dtype
    length: int
    vocab_size: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read adjacent tokens.

        Raises:
            UserError: the file cannot be read, ends before them, or has an id there that no token has.
        """
        start, stop, step = place.indices(self.length)
        assert step == 1
        try:
            tokens = np.fromfile(self.path, self.dtype, count=max(stop - start, 0), offset=start * self.dtype.itemsize)
        except OSError as error:
            raise self._damaged(f"its tokens {start} to {stop} cannot be read: {os.strerror(error.errno)}") from error
        if len(tokens) < stop - start:
            whole = self.path.stat().st_size // self.dtype.itemsize
            raise self._damaged(f"it ends after {whole} of its {self.length} tokens")
        unknown = np.flatnonzero(tokens >= self.vocab_size)
        if len(unknown):
            raise self._damaged(
                f"its token {start + unknown[0]} is {tokens[unknown[0]]}, and the tokenizer has {self.vocab_size}"
            )
        return tokens

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self.path} is damaged ({reason}); delete {self.path.parent} to build it anew")
