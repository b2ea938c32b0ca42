"""Documents as tokens on disk: built once for a content and a tokenizer, then read from there.

Decides the layout on disk: a folder with tokens and document offsets of both splits and meta.json, written
aside and renamed when whole.
"""

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from flashtrain.data.digest import record_digest
from flashtrain.data.documents import Source
from flashtrain.data.split import TRAIN, VALIDATION, split_documents
from flashtrain.data.token_file import TokenFile
from flashtrain.data.tokenizer import Tokenizer
from flashtrain.errors import UserError

log = logging.getLogger(__name__)

# Part of every fingerprint: raise it with any change in what a corpus holds.
FORMAT = 2
CHARACTERS_PER_BATCH = 1 << 20


@dataclass(frozen=True)
class TokenStream:
    """The documents of a split, one after another, each with the tokenizer's prefix token before it."""

    tokens: np.ndarray | TokenFile
    """(num_tokens,) uint16 or uint32."""
    offsets: np.ndarray
    """(num_documents + 1,) int64: document i is tokens[offsets[i] : offsets[i + 1]]."""
    num_bytes: int
    """UTF-8 bytes of the documents' text."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, i: int) -> np.ndarray:
        """(length,) the prefix token and the tokens of document i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def num_rows(self, sequence_length: int) -> int:
        """The number of rows with `sequence_length` targets each; no target is in two rows."""
        return (self.num_tokens - 1) // sequence_length

    def row(self, i: int, sequence_length: int) -> np.ndarray:
        """(sequence_length + 1,) row i: inputs without the last token, targets without the first."""
        start = i * sequence_length
        return self.tokens[start : start + sequence_length + 1]

    def scored(self, i: int, sequence_length: int) -> slice:
        """Which targets of row i are scored: all."""
        return slice(None)

    def row_documents(self, i: int, sequence_length: int) -> np.ndarray:
        """(sequence_length + 1,) int32: the document that each token of row i is of, counted from 0 in the row."""
        start = i * sequence_length
        places = np.arange(start, start + sequence_length + 1)
        documents = np.searchsorted(self.offsets, places, side="right")
        return (documents - documents[0]).astype(np.int32)

    def piece_lengths(self, sequence_length: int) -> np.ndarray:
        """(num_pieces,) int64: how long the documents are in the inputs of all rows, cut by the rows' edges."""
        end = self.num_rows(sequence_length) * sequence_length
        edges = np.union1d(self.offsets[self.offsets < end], np.arange(0, end + 1, sequence_length))
        return np.diff(edges)


@dataclass(frozen=True)
class Corpus:
    fingerprint: str
    """A digest of the source's files, the tokenizer and the split: equal ones have equal tokens."""
    text_fingerprint: str
    """A digest of the source's files and the split alone: equal ones have the same documents."""
    source: str
    tokenizer: str
    num_empty: int
    """Documents left out for having no text."""
    num_repeated: int
    """Documents left out for having the same text as an earlier one."""
    cut: str | None
    """Where the only document of the source was cut in two, for people; None where there are several."""
    train: TokenStream
    validation: TokenStream

    def summary(self) -> str:
        """One line for people."""
        splits = [
            f"{split} {s.num_documents:,} documents, {s.num_bytes / 1e6:,.2f} MB, {s.num_tokens:,} tokens"
            for split, s in ((TRAIN, self.train), (VALIDATION, self.validation))
        ]
        left_out = f"left out {self.num_empty:,} empty and {self.num_repeated:,} repeated documents"
        cut = [f"the only document is cut in two, {self.cut}"] if self.cut else []
        return "; ".join([f"{self.source} with tokenizer {self.tokenizer}", *splits, left_out, *cut])


def open_corpus(
    source: Source, tokenizer: Tokenizer, *, cache_dir: str | Path, validation_fraction: float
) -> Corpus:
    """The corpus in `cache_dir`, built there if need be; of several processes one builds and the others wait.

    `validation_fraction` of the documents, or of the only one, is held out for validation (see split.py). The
    source's files are hashed each time, which takes a second or two for a gigabyte.
    Raises UserError if the source cannot be read or has too little text to split, if the fraction is not between
    0 and 1, if the folder cannot be written, or if the corpus in it is damaged.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"data.validation_fraction is {validation_fraction}; it has to be between 0 and 1")
    files = source.fingerprint()
    fingerprint = record_digest(FORMAT, files, tokenizer.fingerprint, validation_fraction)
    folder = Path(os.path.expanduser(cache_dir)) / fingerprint
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not folder.is_dir():
                    _build(folder, source, tokenizer, validation_fraction)
    except OSError as error:
        raise UserError(f"data.cache_dir={cache_dir} cannot hold the corpus: {error}") from error
    try:
        return _load(folder, source, tokenizer, record_digest(FORMAT, files, validation_fraction))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"the corpus in {folder} is damaged ({error}); delete that folder to build it anew") from error


def _build(folder: Path, source: Source, tokenizer: Tokenizer, validation_fraction: float) -> None:
    """Fill a folder beside `folder` and rename it, so that `folder` is absent or whole."""
    log.info("tokenizing %s with tokenizer %s into %s", source.label, tokenizer.name, folder)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        split = split_documents(source, validation_fraction)
        writers = {name: _StreamWriter(unfinished, name, tokenizer) for name in (TRAIN, VALIDATION)}
        for (_, text), parts in zip(source.documents(), split.parts, strict=True):
            for name, part in parts.items():
                writers[name].append(text[part])
        meta = {
            "source": source.label,
            "tokenizer": tokenizer.name,
            "num_empty": split.num_empty,
            "num_repeated": split.num_repeated,
            "cut": split.cut,
            "num_bytes": {name: writer.finish() for name, writer in writers.items()},
        }
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=2))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _StreamWriter:
    """Writes the files of one split; texts gather until there are enough for a tokenizer to use all cores."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        self._tokens_file, self._offsets_file = _stream_files(folder, split)
        self._tokenizer = tokenizer
        self._prefix = np.array([tokenizer.prefix_id], tokenizer.dtype).tobytes()
        self._texts: list[str] = []
        self._num_characters = 0
        self._lengths = [0]
        self._num_bytes = 0

    def append(self, text: str) -> None:
        self._texts.append(text)
        self._num_characters += len(text)
        if self._num_characters >= CHARACTERS_PER_BATCH:
            self._flush()

    def finish(self) -> int:
        """Complete the files; the bytes of text that they stand for."""
        self._flush()
        np.save(self._offsets_file, np.cumsum(self._lengths, dtype=np.int64))
        return self._num_bytes

    def _flush(self) -> None:
        with self._tokens_file.open("ab") as file:
            for tokens in self._tokenizer.encode_batch(self._texts):
                file.write(self._prefix + tokens.tobytes())
                self._lengths.append(1 + len(tokens))
        self._num_bytes += sum(len(text.encode()) for text in self._texts)
        self._texts, self._num_characters = [], 0


def _load(folder: Path, source: Source, tokenizer: Tokenizer, text_fingerprint: str) -> Corpus:
    """Source and tokenizer go by their present names; meta.json has those of the time of building.

    Raises OSError, ValueError or EOFError for files that are missing or cut.
    """
    meta = json.loads((folder / "meta.json").read_text())
    streams = {}
    for split, num_bytes in meta["num_bytes"].items():
        tokens_file, offsets_file = _stream_files(folder, split)
        offsets, size = np.load(offsets_file), tokens_file.stat().st_size
        expected = int(offsets[-1]) * tokenizer.dtype.itemsize
        if size != expected:
            raise ValueError(f"{tokens_file.name} has {size} bytes instead of {expected}")
        tokens = TokenFile(tokens_file, tokenizer.dtype, int(offsets[-1]), tokenizer.vocab_size)
        streams[split] = TokenStream(tokens, offsets, num_bytes)
    found = {key: meta[key] for key in ("num_empty", "num_repeated", "cut")}
    return Corpus(folder.name, text_fingerprint, source.label, tokenizer.name, **found, **streams)


def _stream_files(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.tokens", folder / f"{split}.offsets.npy"


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk, so that no crash leaves the new name without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
