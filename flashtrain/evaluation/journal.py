"""What an evaluation has scored so far, so that one that was stopped goes on where it was.

Which targets come in which order follows from the settings, so the file holds their NLLs alone: float32, appended
after each batch of windows, or each round of batches of several ranks, of which the first has the file. A batch is a
long document, a part of one, or several short ones.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flashtrain.errors import UserError

DTYPE = np.dtype(np.float32)


class Journal:
    """The file at `path`, whose name is of one model, corpus and settings; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = np.fromfile(path, DTYPE) if path.exists() else np.empty(0, DTYPE)
        self._taken = 0

    @property
    def num_known(self) -> int:
        """Targets that an earlier process scored."""
        return len(self._known)

    def take(self, counts: Iterable[int]) -> list[np.ndarray]:
        """The values of each batch of so many targets, as far as whole ones are known; then `append` those behind."""
        batches = []
        for count in counts:
            values = self._known[self._taken : self._taken + count]
            if len(values) < count:
                break
            self._taken += count
            batches.append(values)
        return batches

    def append(self, values: np.ndarray) -> None:
        """Keep the values of the next targets that `take` did not know."""
        try:
            with self.path.open("r+b" if self.path.exists() else "xb") as file:
                file.truncate(self._taken * DTYPE.itemsize)  # a batch that was cut while it was written
                file.seek(0, 2)
                file.write(values.astype(DTYPE).tobytes())
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); make room, and the same command goes on from there"
            ) from error
        self._taken += len(values)

    def remove(self) -> None:
        """Remove the file, once what it was for is written."""
        self.path.unlink(missing_ok=True)
