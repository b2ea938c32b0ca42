"""Where documents come from: which files, in which order, and how a file is cut into documents.

A document is a file of text, or a row of a jsonl or parquet file. Its name does not depend on where the files
lie. A source reads its files anew each time it is asked, so no corpus has to fit in memory.
"""

import logging
import os
import platform
import stat
import sysconfig
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from flashtrain.data.digest import file_digest, record_digest
from flashtrain.data.tables import column_texts
from flashtrain.errors import UserError

log = logging.getLogger(__name__)

KINDS = (".txt", ".jsonl", ".parquet")
NOT_STDLIB_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages")


class Document(NamedTuple):
    name: str
    """The file's path below the source's folder; a row has `:` and its number from 0 behind that."""
    text: str


@dataclass(frozen=True)
class Source:
    """Files, and the way to read them."""

    label: str
    """What it is, for people."""
    files: dict[str, Path]
    """Each file under its name, in reading order."""
    column: str | None
    """The field that holds the text where a document is a row; None where a document is a file."""

    def fingerprint(self) -> str:
        """A digest of the names and bytes of the files and of how they are read."""
        try:
            with ThreadPoolExecutor() as pool:
                digests = list(pool.map(file_digest, self.files.values()))
        except OSError as error:
            raise UserError(f"{self.label} cannot be read: {error}") from error
        return record_digest(self.column, list(self.files), digests)

    def documents(self) -> Iterator[Document]:
        """All documents in order, empty and repeated ones too. Raises UserError for what cannot be read."""
        for name, path in self.files.items():
            if self.column is None:
                yield Document(name, _whole_text(path))
            else:
                for row, text in enumerate(column_texts(path, self.column)):
                    yield Document(f"{name}:{row}", text)


def stdlib_source() -> Source:
    """The running Python's standard library without its tests; a document is a source file."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _files_below(root, skip=NOT_STDLIB_FOLDERS)
    sources = {name: path for name, path in files.items() if path.suffix == ".py"}
    if not sources:
        raise UserError(f"this Python has no library sources in {root}; say data=text data.path=... instead")
    return Source(f"the standard library of Python {platform.python_version()}", sources, column=None)


def text_source(path: str | Path, column: str | None = None) -> Source:
    """A .txt, .jsonl or .parquet file, or a folder of one of these kinds; a document is a text file or a row.

    `column` is the field of a row that holds the text, None for the usual `text`; text files have no columns.
    Raises UserError if there is no such file, or if a folder cannot be listed or holds none or several of these
    kinds.
    """
    path = Path(os.path.expanduser(path))
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise UserError(
            f"data.path={path} does not exist or cannot be reached ({error.strerror}); name a {_either(KINDS)} "
            f"file or a folder of them"
        ) from error
    files = _files_of_one_kind(path) if is_folder else {path.name: path}
    kind = next(iter(files.values())).suffix
    if kind not in KINDS:
        raise UserError(f"data.path={path} is no {_either(KINDS)} file; convert or rename it")
    if kind == ".txt" and column is not None:
        raise UserError(f"data.column={column} does not go with {path}: text has no columns; leave it out")
    return Source(str(path), files, None if kind == ".txt" else column or "text")


def _files_of_one_kind(folder: Path) -> dict[str, Path]:
    everything = _files_below(folder)
    files = {name: path for name, path in everything.items() if path.suffix in KINDS}
    kinds = sorted({path.suffix for path in files.values()})
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise UserError(f"data.path={folder} needs {_either(KINDS)} files of one kind and holds {found}")
    others = [name for name in everything if name not in files]
    if others:
        log.warning("%s: only %s is read; left out: %d, such as %s", folder, kinds[0], len(others), others[0])
    return files


def _files_below(root: Path, skip: Collection[str] = ()) -> dict[str, Path]:
    """Files by their path below `root`, sorted; without hidden ones and without folders named in `skip`."""
    found = {}
    for folder, subfolders, names in os.walk(root, onerror=_refuse_folder):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(
        f"the folder {error.filename} cannot be listed ({error.strerror}); make it readable or move it away"
    ) from error


def _whole_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}; mend or remove it") from error


def _either(kinds: Collection[str]) -> str:
    *others, last = kinds
    return f"{', '.join(others)} or {last}"
