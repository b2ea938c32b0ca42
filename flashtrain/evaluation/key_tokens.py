"""Key tokens: the targets that a model predicts well with long context and badly without; their perplexity.

Perplexity averages over targets of which most need only the last few tokens. Here one model, the evaluator, says which
need more; that choice is kept as places in the text, so that other models, of other tokenizers too, are scored on it.
Source: LongPPL, arXiv 2410.23771: log-probability gain above 2 and log-likelihood above -2, both in nats; the short
context is L / 8 to L / 8 + L / 32 tokens, as its 4,096 and 1,024 are of 32,768.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flashtrain.errors import UserError
from flashtrain.evaluation.metrics import Score, longest_openings, summarize
from flashtrain.evaluation.table import METADATA, TargetTable
from flashtrain.evaluation.windows import SHORT

LEAST_GAIN = 2.0  # alpha: nats that the long context saves
MOST_NLL = 2.0  # -beta: nats that are left
CONTEXT_SHARE = 8
STEP_SHARE = 32


@dataclass(frozen=True)
class Choice:
    """Whose key tokens they are: of which model, on which text."""

    evaluator: str
    text: str  # digest of the validation documents' text
    longest: int  # tokens of each document that the evaluator read
    short_context: int


@dataclass(frozen=True)
class KeyTokens:
    """Places in documents, in their order and apart: bytes start to stop of a document's text."""

    documents: np.ndarray  # (keys,) int32
    starts: np.ndarray  # (keys,) int64
    stops: np.ndarray  # (keys,) int64
    choice: Choice


@dataclass(frozen=True)
class KeyScore:
    """How the key targets of a model were predicted, and of how many targets they are those."""

    score: Score | None  # None where there is no key target
    scored: int  # targets of the longest openings
    chosen: int  # key tokens of the evaluator, in its own documents
    reached: int  # of which some byte is of those targets
    choice: Choice

    @property
    def keys(self) -> int:
        return self.score.targets if self.score else 0

    @property
    def fraction(self) -> float:
        return self.keys / self.scored


def short_context(longest: int) -> tuple[int, int]:
    """Tokens before a target in the short context, at least, and how many targets share a window."""
    return max(1, longest // CONTEXT_SHARE), max(1, longest // STEP_SHARE)


def choose_keys(table: TargetTable, choice: Choice) -> KeyTokens:
    """The key tokens of the model that the table is of, which has openings and their targets in short context."""
    short, full = table.of(SHORT), longest_openings(table)
    full = full.where(full.position >= choice.short_context)
    assert np.array_equal(short.document, full.document) and np.array_equal(short.position, full.position)
    is_key = (short.nll - full.nll > LEAST_GAIN) & (full.nll < MOST_NLL) & (full.bytes > 0)
    chosen = full.where(is_key)
    return KeyTokens(chosen.document, chosen.offset, chosen.offset + chosen.bytes, choice)


def score_keys(table: TargetTable, keys: KeyTokens) -> KeyScore:
    """Score the targets, of the longest openings, that stand for a byte of a key token."""
    openings = longest_openings(table)
    of_keys, reached = _overlaps(openings, keys)
    score = summarize(openings.where(of_keys)) if of_keys.any() else None
    return KeyScore(score, len(openings), len(keys.documents), int(reached.sum()), keys.choice)


def _overlaps(table: TargetTable, keys: KeyTokens) -> tuple[np.ndarray, np.ndarray]:
    """Whether some byte of a target is one of a key, (targets,) bool, and whether one of a key is, (keys,) bool."""
    found, reached = np.zeros(len(table), bool), np.zeros(len(keys.documents), bool)
    for document in np.unique(keys.documents):
        of_keys, rows = keys.documents == document, np.flatnonzero((table.document == document) & (table.bytes > 0))
        starts, stops = keys.starts[of_keys], keys.stops[of_keys]
        begins, ends = table.offset[rows], table.offset[rows] + table.bytes[rows]
        found[rows] = _meet(begins, ends, starts, stops)
        reached[of_keys] = _meet(starts, stops, begins, ends)
    return found, reached


def _meet(begins: np.ndarray, ends: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """(n,) bool: whether some of the bytes begins to ends are of those from starts to stops, which are in order."""
    first_behind = np.searchsorted(stops, begins, side="right")  # the first that stops behind the begin
    return np.append(starts, np.iinfo(np.int64).max)[first_behind] < ends


def write_keys(keys: KeyTokens, path: Path) -> None:
    """Write a parquet file of the places, with the choice in its schema."""
    columns = {"document": keys.documents, "start": keys.starts, "stop": keys.stops}
    pq.write_table(pa.table(columns).replace_schema_metadata({METADATA: json.dumps(asdict(keys.choice))}), path)


def read_keys(path: Path, text: str) -> KeyTokens:
    """The key tokens in a file of `write_keys`. Raises UserError where it is none, or is of another text."""
    try:
        stored = pq.read_table(path)
        choice = Choice(**json.loads(stored.schema.metadata[METADATA]))
        columns = (stored[name].to_numpy() for name in ("document", "start", "stop"))
        keys = KeyTokens(*columns, choice)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error if path.is_file() else "there is no such file"
        raise UserError(
            f"eval.key_tokens={path} is no file of key tokens ({reason}); name the key_tokens.parquet of an evaluation "
            "with eval.key_tokens=self"
        ) from None
    if choice.text != text:
        raise UserError(
            f"eval.key_tokens={path} is of the validation text {choice.text[:8]} and this run's is {text[:8]}; name "
            "one of the same data and data.validation_fraction"
        )
    return keys
