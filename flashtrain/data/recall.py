"""Associative recall: keys with a value each, then some of the keys again, whose values are to be told.

A document is `[prefix] k v k v ... k v  q a q a ... q a`: different keys drawn from all, a value drawn for each, then
keys of these in any order, none again before all have been asked for, with their values. Only those answers are scored,
for nothing else can be known. Documents are drawn when they are read, each a function of the seed and its index alone.

In validation `num_queries` are asked for at the end and all else is pairs. A training row has any number of pairs up to
that, small ones as often as large ones on a logarithmic scale, and more queries: a model learns to look up among a few
first, and rows of many pairs alone teach it nothing for long.
Source: multi-query associative recall, arXiv 2312.04927, with all queries at the end and no other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashtrain.data.digest import record_digest
from flashtrain.data.options import RecallOptions
from flashtrain.data.split import TRAIN, VALIDATION
from flashtrain.data.tokenizer import smallest_dtype
from flashtrain.errors import UserError

# Part of every fingerprint: raise it with any change in how rows are drawn.
FORMAT = 1
NUM_ROWS = 1 << 20  # of a split: more than most runs take, which see none twice


class RecallDocument(NamedTuple):
    tokens: np.ndarray
    """(length + 1,) int64: the prefix first, an answer last."""
    depths: np.ndarray
    """(answers,) float32: where among the pairs that of each answer stands; 0 is the first, 1 the last."""


@dataclass(frozen=True)
class RecallStream:
    """The documents of a split; every row is one."""

    options: RecallOptions
    split: str

    def num_rows(self, sequence_length: int) -> int:
        return NUM_ROWS

    def document(self, i: int, length: int) -> RecallDocument:
        """Document i of those with `length` tokens before its last."""
        options = self.options
        rng, num_pairs = self._begin(i, length)
        num_queries = length // 2 - num_pairs
        keys = rng.permutation(options.num_keys)[:num_pairs]
        values = options.num_keys + rng.integers(options.num_values, size=num_pairs)
        rounds = -(-num_queries // num_pairs)
        asked = rng.random((rounds, num_pairs)).argsort(axis=1).ravel()[:num_queries]
        pairs = np.stack([np.concatenate([of, of[asked]]) for of in (keys, values)], axis=1)
        tokens = np.concatenate([[options.num_keys + options.num_values], pairs.ravel()])
        return RecallDocument(tokens, (asked / max(num_pairs - 1, 1)).astype(np.float32))

    def scored(self, i: int, length: int) -> slice:
        """Which of the `length` targets of document i are scored: its answers."""
        _, num_pairs = self._begin(i, length)
        return slice(2 * num_pairs + 1, None, 2)

    def _begin(self, i: int, length: int) -> tuple[np.random.Generator, int]:
        """The generator of document i, and the number of its pairs."""
        rng = np.random.default_rng((self.options.seed, (TRAIN, VALIDATION).index(self.split), i))
        most = self.options.num_pairs(length)
        return rng, most if self.split == VALIDATION else int(np.exp(rng.uniform(0, np.log(most + 1))))

    def row(self, i: int, sequence_length: int) -> np.ndarray:
        """(sequence_length + 1,) row i: inputs without the last token, targets without the first."""
        return self.document(i, sequence_length).tokens


@dataclass(frozen=True)
class RecallCorpus:
    """What `Corpus` is of text: all that is to be known of the data of a run."""

    options: RecallOptions

    @property
    def fingerprint(self) -> str:
        """A digest of all that rows follow from."""
        return record_digest("recall", FORMAT, vars(self.options))

    text_fingerprint = fingerprint

    @property
    def source(self) -> str:
        options = self.options
        return f"recall of {options.num_values:,} values by {options.num_keys:,} keys"

    @property
    def train(self) -> RecallStream:
        return RecallStream(self.options, TRAIN)

    @property
    def validation(self) -> RecallStream:
        return RecallStream(self.options, VALIDATION)

    def summary(self) -> str:
        """One line for people."""
        return f"associative {self.source}, {self.options.num_queries} or more asked for in a row; drawn when read"


class RecallTokenizer:
    """Keys k0, k1, ..., values v0, v1, ... and the prefix, as a `Tokenizer`; text is words with a space before each."""

    name = "recall"

    def __init__(self, options: RecallOptions) -> None:
        words = [f"k{i}" for i in range(options.num_keys)] + [f"v{i}" for i in range(options.num_values)]
        self._words = words
        self._allowed = f"k0 to k{options.num_keys - 1} and v0 to v{options.num_values - 1}"
        self._ids = {word: i for i, word in enumerate(words)}
        self.fingerprint = record_digest(self.name, options.num_keys, options.num_values)
        self.prefix_id = len(words)
        self.vocab_size = len(words) + 1
        self.bytes_per_token = np.zeros(self.vocab_size, np.int64)  # words are names of tokens, no text is predicted
        self.dtype = smallest_dtype(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        for word in words:
            if word not in self._ids:
                raise UserError(f"{word} is no word of data=recall; those are {self._allowed}")
        return np.array([self._ids[word] for word in words], self.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {self._words[i]}" for i in map(int, ids) if i < self.prefix_id)
