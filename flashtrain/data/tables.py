"""The texts in a column of a jsonl or parquet file, read through Hugging Face `datasets` a batch at a time.

Nothing is kept on disk and datasets says nothing of its own: what goes wrong is one UserError.
"""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtrain.errors import UserError


def column_texts(path: Path, column: str) -> Iterator[str]:
    """The texts in `column` of a .jsonl or .parquet file, in order. Raises UserError for what is no text."""
    values = _json_values(path, column) if path.suffix == ".jsonl" else _table_values(path, "parquet", column)
    for row, text in enumerate(values):
        if not (isinstance(text, str) and _is_unicode(text)):
            raise UserError(f"row {row} of {path} has no Unicode text in column {column}: {text!r:.40}")
        yield text


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_values(path: Path, column: str) -> Iterator[object]:
    """Parsed here, line by line: datasets' JSON parser takes all columns and types from the first 10 MB."""
    for number, line in enumerate(_table_values(path, "text", "text"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} has to be a JSON object and is a {type(row).__name__}")
        if column not in row:
            raise _missing_column(f"line {number} of {path}", column, row)
        yield row[column]


def _table_values(path: Path, builder: str, column: str) -> Iterator[object]:
    """A column of a file through a builder of datasets, streamed: otherwise it would keep a second copy."""
    import datasets  # here: it takes two seconds, which a corpus that is already tokenized need not wait for

    with tempfile.TemporaryDirectory() as locks, _silenced(datasets.utils.logging):
        try:
            table = datasets.load_dataset(
                builder, data_files=[str(path)], split="train", streaming=True, cache_dir=locks
            )
            for batch in table.with_format("arrow").iter(batch_size=1000):
                if column not in batch.column_names:
                    raise _missing_column(str(path), column, batch.column_names)
                yield from batch[column].to_pylist()
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path} cannot be read as {path.suffix}: {reason}; mend or drop it") from error


def _missing_column(where: str, column: str, columns: Iterable[str]) -> UserError:
    return UserError(f"{where} has no column {column}; set data.column to one of: {', '.join(columns)}")


@contextmanager
def _silenced(logging_of_datasets) -> Iterator[None]:
    before = logging_of_datasets.get_verbosity()
    logging_of_datasets.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging_of_datasets.set_verbosity(before)
