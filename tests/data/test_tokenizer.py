"""Ids and their sizes in bytes: the byte tokenizer, and the kinds of tokenizer.json that have such sizes."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from flashtrain.data.tokenizer import BYTE_CHARACTERS, load_tokenizer
from flashtrain.errors import UserError

TEXT = "def f(x):\n    return 'naïve ∑ 🙂'\t# <|endoftext|> </s>\r\n"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "return the naïve sum of x"] * 4, trainer)
    tokenizer.add_tokens([AddedToken("    ")])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *single_bytes, "\u2581", *"abcdefï", "\u2581a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def saved(tokenizer: tokenizers.Tokenizer, folder: Path) -> str:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path):
    makers = {"byte_level": byte_level, "byte_fallback": byte_fallback}
    return load_tokenizer("bytes" if request.param == "bytes" else saved(makers[request.param](), tmp_path))


def test_text_comes_back(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    assert tokenizer.bytes_per_token[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
    assert tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,)


def test_prefix_never_comes_out_of_text_and_has_no_bytes(tokenizer):
    assert tokenizer.prefix_id not in tokenizer.encode(TEXT)
    assert tokenizer.bytes_per_token[tokenizer.prefix_id] == 0
    assert tokenizer.decode([tokenizer.prefix_id, *tokenizer.encode("abc")]) == "abc"


def test_batch_equals_one_by_one(tokenizer):
    texts = [TEXT, "", "abc" * 100]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert ids.dtype == tokenizer.dtype
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_byte_tokenizer_is_the_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.prefix_id, tokenizer.dtype) == (257, 256, np.uint16)
    assert tokenizer.decode([0xC3, 256, 0x28]) == "\ufffd("
    assert tokenizer.decode([0x61, 257, 0x162, 0x62]) == "a\ufffd\ufffdb", "ids of a model with more"


def test_byte_level_counts_added_text_and_half_characters(tmp_path):
    tokenizer = load_tokenizer(saved(byte_level(), tmp_path))
    sizes = tokenizer.bytes_per_token[tokenizer.encode("🙂")]
    assert len(sizes) > 1, "the case wants a character in several tokens"
    assert sizes.sum() == 4
    assert tokenizer.bytes_per_token[-1] == 4, "the added token of four spaces"


def test_large_vocabularies_take_uint32(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", *(f"piece {i}" for i in range(1 << 16)), *alphabet]
    large = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    large.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    large.decoder = decoders.ByteLevel()
    large.add_special_tokens(["<s>"])
    tokenizer = load_tokenizer(saved(large, tmp_path))
    assert tokenizer.dtype == np.uint32
    assert tokenizer.encode("abc").tolist() == [65537 + alphabet.index(letter) for letter in "abc"]


def test_fingerprint_is_of_the_content(tmp_path):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for folder in (first, second, other):
        folder.mkdir()
    changed = byte_level()
    changed.add_tokens(["more"])
    names = saved(byte_level(), first), saved(byte_level(), second), saved(changed, other)
    prints = [load_tokenizer(name).fingerprint for name in names]
    assert prints[0] == prints[1] != prints[2]


def test_saved_truncation_and_padding_do_not_reach_documents(tmp_path):
    short = byte_level()
    short.enable_truncation(4)
    short.enable_padding(length=1000)
    tokenizer = load_tokenizer(saved(short, tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("a")) == 1


def test_home_is_spelled_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    saved(byte_level(), tmp_path)
    assert load_tokenizer("~/tokenizer.json").name == str(tmp_path / "tokenizer.json")


def without_a(maker, unk, folder):
    """The path of a tokenizer that has no token for the byte A."""
    parts = json.loads(maker().to_str())
    vocab = parts["model"]["vocab"]
    del vocab["A" if "A" in vocab else "<0x41>"]
    vocab.setdefault("<unk>", len(vocab) + 1)
    parts["model"]["unk_token"] = unk
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(parts))
    return str(path)


each_unk = pytest.mark.parametrize("unk", [None, "<unk>"], ids=["drops", "unk"])


@each_unk
def test_fallback_without_some_byte_is_refused(tmp_path, unk):
    """Such a tokenizer drops the byte, or gives <unk> for it, which has no size."""
    with pytest.raises(UserError, match="no token for 1 of the 256 bytes, such as <0x41>, and would lose"):
        load_tokenizer(without_a(byte_fallback, unk, tmp_path))


@each_unk
def test_byte_level_without_some_byte_refuses_the_texts_that_have_it(tmp_path, unk):
    """SmolLM2's is without 0x04 and twenty others."""
    tokenizer = load_tokenizer(without_a(byte_level, unk, tmp_path))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    with pytest.raises(UserError, match="no token for the bytes 0x41 of a text, as in 'return A or B', and would lose"):
        tokenizer.encode_batch([TEXT, "return A or B"])


def test_byte_level_spells_bytes_as_the_library_does():
    assert set(BYTE_CHARACTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    single_bytes = tokenizers.Tokenizer(models.BPE(BYTE_CHARACTERS, []))
    single_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert single_bytes.encode(TEXT).ids == list(TEXT.encode())


@pytest.mark.parametrize("name", ["gpt2", "x" * 300, "."], ids=["missing", "system-error", "folder"])
def test_what_cannot_be_read_is_refused(name):
    with pytest.raises(UserError, match=f"data.tokenizer={name} is no file to be read .*name a tokenizer.json"):
        load_tokenizer(name)


def test_refusals(tmp_path):
    not_json = tmp_path / "not.json"
    not_json.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_tokenizer(str(not_json))
    without_prefix = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(UserError, match="no token to put before a document.*none"):
        load_tokenizer(saved(without_prefix, tmp_path))
    with pytest.raises(UserError, match="no size in bytes"):
        load_tokenizer(saved(word_level(), tmp_path))
