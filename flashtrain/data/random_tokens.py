"""Rows of random tokens, as a corpus: for measurements that ask for no text."""

from dataclasses import dataclass

import numpy as np

from flashtrain.data.split import TRAIN, VALIDATION

NUM_ROWS = 1 << 16  # of a split: more than a measurement takes


@dataclass(frozen=True)
class RandomStream:
    """The rows of a split, each drawn when it is read from the seed and its index alone."""

    vocab_size: int
    seed: int
    split: str

    def num_rows(self, sequence_length: int) -> int:
        return NUM_ROWS

    def row(self, i: int, sequence_length: int) -> np.ndarray:
        """(sequence_length + 1,) int64 row i: inputs without the last token, targets without the first."""
        rng = np.random.default_rng((self.seed, (TRAIN, VALIDATION).index(self.split), i))
        return rng.integers(self.vocab_size, size=sequence_length + 1)

    def scored(self, i: int, sequence_length: int) -> slice:
        """Which of the targets of a row are scored: all."""
        return slice(None)


@dataclass(frozen=True)
class RandomCorpus:
    """What `Corpus` is of text; its rows hold no documents."""

    vocab_size: int
    seed: int

    source = "random tokens"

    @property
    def train(self) -> RandomStream:
        return RandomStream(self.vocab_size, self.seed, TRAIN)

    @property
    def validation(self) -> RandomStream:
        return RandomStream(self.vocab_size, self.seed, VALIDATION)
