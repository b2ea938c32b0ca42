"""The table of scored targets, of which every metric is a reduction, and the parquet file that it is kept in."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flashtrain.evaluation.windows import PURPOSES

METADATA = b"flashtrain"  # the key of a parquet file's schema under which JSON says what the figures depend on


@dataclass(frozen=True)
class TargetTable:
    """One row per scored target, as columns of equal length; a target has one row for each length it is fed in."""

    purpose: np.ndarray  # int8, index into PURPOSES: what the target was scored for
    length: np.ndarray  # int32, tokens fed in its window
    window: np.ndarray  # int32, number of its window, of all windows
    document: np.ndarray  # int32, index of the document
    position: np.ndarray  # int32, index of the target in its document, whose first token, the prefix if any, is 0
    context: np.ndarray  # int32, tokens the model saw before the target
    offset: np.ndarray  # int64, UTF-8 bytes of the document's text before the target
    bytes: np.ndarray  # int32, UTF-8 bytes of text the target stands for; 0 for a special token
    nll: np.ndarray  # float32, negative log-likelihood in nats

    def __len__(self) -> int:
        return len(self.nll)

    def where(self, mask: np.ndarray) -> Self:
        return type(self)(*(column[mask] for column in vars(self).values()))

    def of(self, purpose: str, length: int | None = None) -> Self:
        """The rows that were scored for `purpose`, in windows of `length` tokens if that is given."""
        chosen = self.purpose == PURPOSES.index(purpose)
        return self.where(chosen if length is None else chosen & (self.length == length))

    def lengths(self, purpose: str) -> list[int]:
        """The numbers of tokens fed for `purpose`, increasing."""
        return np.unique(self.length[self.purpose == PURPOSES.index(purpose)]).tolist()


@dataclass(frozen=True)
class RecallTable(TargetTable):
    """Targets that are answers: each says again what its document said once (data/recall.py)."""

    correct: np.ndarray  # bool, whether the target was the most probable token
    depth: np.ndarray  # float32, where it was said among all that was: 0 the first, 1 the last


Table = TypeVar("Table", bound=TargetTable)


def concatenate(tables: Sequence[Table]) -> Table:
    """The rows of all tables, of one kind and at least one."""
    return type(tables[0])(*map(np.concatenate, zip(*(vars(table).values() for table in tables), strict=True)))


def write_table(table: TargetTable, path: Path, facts: dict) -> None:
    """Write a parquet file, the purpose in words; `facts`, plain values, goes into its schema as JSON."""
    columns = vars(table) | {"purpose": pa.DictionaryArray.from_arrays(table.purpose, pa.array(PURPOSES))}
    written = pa.table(columns).replace_schema_metadata({METADATA: json.dumps(facts)})
    pq.write_table(written, path, compression="zstd")


def read_table(path: Path, kind: type[Table] = TargetTable) -> tuple[Table, dict]:
    """The table and the facts of a file that `write_table` wrote of a table of that kind."""
    stored = pq.read_table(path)
    columns = {field.name: stored[field.name].combine_chunks() for field in fields(kind)}
    purpose = columns.pop("purpose")
    codes = np.array([PURPOSES.index(name) for name in purpose.dictionary.to_pylist()], np.int8)
    numbers = {name: column.to_numpy(zero_copy_only=False) for name, column in columns.items()}
    table = kind(purpose=codes[purpose.indices.to_numpy()], **numbers)
    return table, json.loads(stored.schema.metadata[METADATA])
