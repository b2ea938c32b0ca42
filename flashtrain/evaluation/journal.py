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
        content = path.read_bytes() if path.exists() else b""
        self._known = np.frombuffer(content[: len(content) // DTYPE.itemsize * DTYPE.itemsize], DTYPE)
        self._taken = 0
        self._num_bytes = len(content)

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
        """Keep the values of the next targets that `take` did not know.

        Raises UserError where the file cannot be written, or is not as this process left it.
        """
        exists = self.path.exists()
        if (self.path.stat().st_size if exists else 0) != self._num_bytes:
            raise UserError(
                f"{self.path} was changed while this evaluation went on: another process makes the same one, or it was "
                "removed; leave one process to it, or give the command again to go on from what is there"
            )
        try:
            with self.path.open("r+b" if exists else "xb") as file:
                file.truncate(self._taken * DTYPE.itemsize)  # a batch that was cut while it was written
                file.seek(0, 2)
                file.write(values.astype(DTYPE).tobytes())
                self._num_bytes = file.tell()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); make room, and the same command goes on from there"
            ) from error
        self._taken += len(values)

    def remove(self) -> None:
        """Remove the file, once what it was for is written."""
        self.path.unlink(missing_ok=True)
