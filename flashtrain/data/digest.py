"""The hash that names corpora, finds repeated documents and splits off validation."""

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

_blake2b = partial(hashlib.blake2b, digest_size=16)


def digest(data: bytes) -> str:
    """BLAKE2b-128 of `data`, as 32 hexadecimal characters."""
    return _blake2b(data).hexdigest()


def file_digest(path: Path) -> str:
    """`digest` of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def parts_digest(parts: Iterable[bytes]) -> str:
    """`digest` of bytes that come in parts."""
    whole = _blake2b()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def record_digest(*fields: object) -> str:
    """`digest` of JSON values, equal only for equal values."""
    return digest(json.dumps(fields).encode())
