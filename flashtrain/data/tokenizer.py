"""Text to token ids and back, and how many bytes of text each token stands for.

A tokenizer is named `bytes` or by the path of a `tokenizer.json`. No special token ever comes out of text: a
document that spells `<|endoftext|>` gets the tokens of its letters. The one special token in a corpus is the
prefix that stands before each document.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from flashtrain.data.digest import digest
from flashtrain.errors import UserError

# What the published tokenizers put before a document; the first that a tokenizer has is its prefix.
PREFIX_TOKENS = ("<|begin_of_text|>", "<bos>", "<s>", "<|endoftext|>", "</s>")

# How the two kinds of vocabulary spell the 256 bytes. Byte-level: those that print in Latin-1 as themselves, the
# others by the characters from U+0100 on, in order.
PRINTING = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
NOT_PRINTING = tuple(byte for byte in range(256) if byte not in PRINTING)
BYTE_CHARACTERS = {chr(byte): byte for byte in PRINTING} | {chr(256 + i): byte for i, byte in enumerate(NOT_PRINTING)}
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}


class Tokenizer(Protocol):
    name: str
    fingerprint: str
    """Equal for tokenizers that give equal ids."""
    vocab_size: int
    prefix_id: int
    """The special token before each document."""
    bytes_per_token: np.ndarray
    """(vocab_size,) int64: UTF-8 bytes of text that a token stands for; 0 for special tokens."""
    dtype: np.dtype
    """The smallest that holds every id: uint16 or uint32."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (length,) of `dtype`, without the prefix. Raises UserError where text would be lost."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel where the tokenizer can."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens give none, and bytes that are not UTF-8 give U+FFFD."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes`, or the one in the file `name`.

    Raises UserError if that is no tokenizer.json, has no prefix token, has tokens without a size in bytes, or
    lacks a token to fall back to for some byte.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(os.path.expanduser(name)))


def smallest_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """The 256 bytes, and the prefix token 256."""

    name = "bytes"
    fingerprint = digest(b"bytes")
    vocab_size = 257
    prefix_id = 256
    bytes_per_token = np.array([1] * 256 + [0], np.int64)
    dtype = smallest_dtype(vocab_size)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids beyond the vocabulary, which a model with a larger one may give, are U+FFFD, too."""
        ids = np.asarray(ids, np.int64)
        ids = np.minimum(ids[ids != self.prefix_id], 0xFF)  # a byte that is nowhere in UTF-8
        return ids.astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the tokenizers library."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.tokenizer={path} is no file to be read ({error.strerror}); name a tokenizer.json or say bytes"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"data.tokenizer={path} is not a tokenizer.json ({error}); name one") from error
        self._tokenizer.encode_special_tokens = True  # that is: as the letters they are spelled with
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.prefix_id = _prefix_id(self._tokenizer, path)
        self.name = str(path)
        self.fingerprint = digest(content)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self.bytes_per_token, self._unknown = _bytes_per_token(self._tokenizer, self.vocab_size, path)
        self.dtype = smallest_dtype(self.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        for text in texts:
            self._refuse_unknown(text)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def _refuse_unknown(self, text: str) -> None:
        """Raise UserError for bytes that no token of a byte-level vocabulary has, which the library would drop."""
        if self._unknown and (lost := set(text.encode()) & self._unknown):
            spelled = ", ".join(f"0x{byte:02X}" for byte in sorted(lost))
            place = next(i for i, character in enumerate(text) if lost & set(character.encode()))
            raise UserError(
                f"tokenizer {self.name} has no token for the bytes {spelled} of a text, as in "
                f"{text[max(place - 20, 0) : place + 20]!r}, and would lose them; remove them or name another tokenizer"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Ids beyond the vocabulary give no text."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _prefix_id(tokenizer: tokenizers.Tokenizer, path: Path) -> int:
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    for token in PREFIX_TOKENS:
        if token in special:
            return special[token]
    raise UserError(
        f"data.tokenizer={path} has no token to put before a document: its special tokens are "
        f"{', '.join(special) or 'none'}; add one of {', '.join(PREFIX_TOKENS)} to them"
    )


def _bytes_per_token(tokenizer: tokenizers.Tokenizer, vocab_size: int, path: Path) -> tuple[np.ndarray, frozenset[int]]:
    """Bytes of text by token, as the tokenizer normalizes it, and the bytes of which it makes no token.

    A space that it puts before every text counts, too.
    A byte-level vocabulary (GPT-2, Llama 3) spells each byte as one character. A byte-fallback one (Llama 2,
    Gemma) spells text with U+2581 for a space, and <0x00> to <0xFF> for bytes that it has no piece for.
    """
    parts = json.loads(tokenizer.to_str())
    decoder = parts["decoder"] or {"type": None}
    if "ByteLevel" in [step["type"] for step in decoder.get("decoders", [decoder])]:
        num_bytes, spellings = len, BYTE_CHARACTERS
    elif parts["model"].get("byte_fallback"):
        num_bytes, spellings = _num_bytes_with_fallback, BYTE_PIECES
    else:
        raise UserError(
            f"data.tokenizer={path} is neither byte-level nor byte-fallback, so its tokens have no size in "
            f"bytes; name one like those of GPT-2 or Llama, or say data.tokenizer=bytes"
        )
    missing = sorted(spellings.keys() - tokenizer.get_vocab(with_added_tokens=False).keys())
    if missing and spellings is BYTE_PIECES:
        raise UserError(
            f"data.tokenizer={path} has no token for {len(missing)} of the 256 bytes, such as {missing[0]}, and "
            f"would lose text; train it with all of them or say data.tokenizer=bytes"
        )
    table = np.zeros(vocab_size, np.int64)
    added = tokenizer.get_added_tokens_decoder()
    for token, i in tokenizer.get_vocab().items():
        if i not in added:
            table[i] = num_bytes(token)
        elif not added[i].special:
            table[i] = len(token.encode())
    return table, frozenset(spellings[spelling] for spelling in missing)


def _num_bytes_with_fallback(token: str) -> int:
    return 1 if token in BYTE_PIECES else len(token.replace("\u2581", " ").encode())
