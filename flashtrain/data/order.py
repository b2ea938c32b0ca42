"""Which rows an optimizer step trains on: a function of the seed and the rows consumed before, nothing else.

Rows come epoch after epoch, each in a permutation of its own, and a step may straddle two epochs. All ranks
share one order and take adjacent parts of a step, so a run may continue on another number of them.
"""

from functools import lru_cache

import numpy as np


def rows_for_step(
    step: int, *, seed: int, rows_per_step: int, num_rows: int, rank: int = 0, world_size: int = 1
) -> np.ndarray:
    """(rows_per_step / world_size,) int64: the rows of one rank in a step, each in [0, num_rows).

    Steps count from 0. `rows_per_step` is of all ranks together and a multiple of `world_size`.
    """
    assert rows_per_step % world_size == 0
    share = rows_per_step // world_size
    start = step * rows_per_step + rank * share
    epochs, places = np.divmod(np.arange(start, start + share), num_rows)
    parts = [_permutation(seed, int(epoch), num_rows)[places[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(parts)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
