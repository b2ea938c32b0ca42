"""What a user may choose about data: the keys of conf/data/*.yaml, and the contradictions of a task's."""

from dataclasses import dataclass


@dataclass
class DataOptions:
    source: str
    """Where rows come from: stdlib, text or recall."""


@dataclass
class CorpusOptions(DataOptions):
    """Documents of text; the standard library's with nothing more."""

    tokenizer: str
    """bytes, or the path of a tokenizer.json."""
    validation_fraction: float
    """The share of documents held out; a document is wholly in one part."""
    isolate_documents: bool
    """Whether the documents of a training row are apart: none sees, counts on from or predicts another."""
    cache_dir: str
    """Where tokenized corpora are kept, by tokenizer and content."""


@dataclass
class TextOptions(CorpusOptions):
    path: str
    """A text, jsonl or parquet file, or a folder of them."""
    column: str | None
    """The field of a jsonl or parquet row that holds the text; null: `text`."""


@dataclass
class RecallOptions(DataOptions):
    """Associative recall (data/recall.py); a row is one document."""

    num_keys: int
    """Keys in the vocabulary; a row has each once, at most."""
    num_values: int
    """Values in the vocabulary, of which each key of a row gets one; a guess is right once in as many times."""
    num_queries: int
    """Keys that a row asks for at its end, each once; rows to train on may ask for more."""
    seed: int
    """Draws the rows; `seed` of the run draws their order and the weights."""

    @property
    def isolate_documents(self) -> bool:
        return False

    @property
    def shortest(self) -> int:
        """The fewest tokens of a row: as many pairs as queries."""
        return 4 * self.num_queries

    def num_pairs(self, length: int) -> int:
        """Pairs of a key and its value before the queries, in a row of `length` tokens."""
        return length // 2 - self.num_queries

    def validate(self) -> list[str]:
        """Return every problem as one sentence."""
        return [
            f"data.{name} is {value}; it must be at least {least}"
            for name, least in (("num_keys", 1), ("num_values", 2), ("num_queries", 1), ("seed", 0))
            if (value := getattr(self, name)) < least
        ]

    def has_rows_of(self, length: int) -> bool:
        """Whether there are rows of `length` tokens."""
        return not self.problems_of_length("", length)

    def problems_of_length(self, key: str, length: int) -> list[str]:
        """Return why there are no rows of `length` tokens, which `key` says."""
        said = f"{key} says {length} tokens"
        if length % 2:
            return [f"{said} and rows of data=recall are of pairs; take an even number"]
        if length < self.shortest:
            pairs = f"data.num_queries={self.num_queries} with as many pairs"
            return [f"{said} and {pairs} takes {self.shortest}; raise the one or lower the other"]
        if (pairs := self.num_pairs(length)) > self.num_keys:
            return [f"{said}, which takes {pairs} different keys, and data.num_keys is {self.num_keys}; take fewer"]
        return []
