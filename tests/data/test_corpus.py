"""The corpus on disk: its content and split, and that no interrupted or second builder spoils it."""

import subprocess
import sys

import numpy as np
import pytest

from flashtrain.data.corpus import open_corpus
from flashtrain.data.documents import stdlib_source, text_source
from flashtrain.data.tokenizer import ByteTokenizer
from flashtrain.errors import UserError

BYTES = ByteTokenizer()


def write(folder, texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return text_source(folder)


def numbered(num_documents):
    return {f"{i:03}": f"document number {i} " * (1 + i % 7) for i in range(num_documents)}


def opened(source, cache_dir, tokenizer=BYTES, validation_fraction=0.1):
    return open_corpus(source, tokenizer, cache_dir=cache_dir, validation_fraction=validation_fraction)


def texts_of(stream):
    return [BYTES.decode(stream.document(i)) for i in range(stream.num_documents)]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "texts", numbered(40))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


# Content


def test_streams_hold_every_document_behind_its_prefix(source, cache):
    corpus = opened(source, cache)
    for stream in (corpus.train, corpus.validation):
        assert stream.tokens.dtype == np.uint16 and stream.offsets.dtype == np.int64
        assert stream.offsets[0] == 0 and stream.offsets[-1] == stream.num_tokens
        tokens = np.asarray(stream.tokens)
        assert (tokens[stream.offsets[:-1]] == BYTES.prefix_id).all()
        assert (tokens == BYTES.prefix_id).sum() == stream.num_documents
        assert stream.num_bytes == stream.num_tokens - stream.num_documents
    both = texts_of(corpus.train) + texts_of(corpus.validation)
    assert sorted(both) == sorted(numbered(40).values())


def test_documents_keep_the_order_of_the_source(source, cache):
    order = {text: i for i, text in enumerate(numbered(40).values())}
    places = [order[text] for text in texts_of(opened(source, cache).train)]
    assert places == sorted(places)


def test_rows_tile_the_stream(source, cache):
    stream = opened(source, cache).train
    length = 64
    rows = [stream.row(i, length) for i in range(stream.num_rows(length))]
    targets = np.concatenate([row[1:] for row in rows])
    assert {len(row) for row in rows} == {length + 1}
    np.testing.assert_array_equal(targets, stream.tokens[1 : 1 + len(targets)])
    assert stream.num_tokens - 1 - len(targets) < length


@pytest.mark.parametrize("length", [1, 7, 64, 500])
def test_documents_of_a_row_start_where_the_stream_says(source, cache, length):
    stream = opened(source, cache).train
    document_of = np.repeat(np.arange(stream.num_documents), np.diff(stream.offsets))
    pieces = []
    for i in range(stream.num_rows(length)):
        documents = stream.row_documents(i, length)
        expected = document_of[i * length : (i + 1) * length + 1]
        assert documents.dtype == np.int32
        np.testing.assert_array_equal(documents, expected - expected[0])
        pieces += np.unique(documents[:-1], return_counts=True)[1].tolist()
    assert stream.piece_lengths(length).tolist() == pieces


def test_empty_and_repeated_documents_are_left_out(tmp_path, cache):
    repeats = {f"again{i}": text for i, text in enumerate(numbered(40).values())}
    corpus = opened(write(tmp_path / "texts", numbered(40) | repeats | {"nothing": ""}), cache)
    both = texts_of(corpus.train) + texts_of(corpus.validation)
    assert sorted(both) == sorted(numbered(40).values())
    assert (corpus.num_empty, corpus.num_repeated) == (1, 40)
    assert "left out 1 empty and 40 repeated documents" in corpus.summary()


def test_many_batches_give_what_one_gives(source, tmp_path, monkeypatch):
    whole = opened(source, tmp_path / "whole")
    monkeypatch.setattr("flashtrain.data.corpus.CHARACTERS_PER_BATCH", 50)
    pieces = opened(source, tmp_path / "pieces")
    np.testing.assert_array_equal(whole.train.tokens, pieces.train.tokens)
    np.testing.assert_array_equal(whole.train.offsets, pieces.train.offsets)
    assert whole.train.num_bytes == pieces.train.num_bytes


# The split


@pytest.mark.parametrize(
    ("num_documents", "fraction", "num_validation"), [(40, 0.1, 4), (40, 0.05, 2), (2, 0.01, 1), (3, 0.9, 2)]
)
def test_fraction_of_documents_is_held_out_and_no_split_is_empty(
    tmp_path, cache, num_documents, fraction, num_validation
):
    source = write(tmp_path / "texts", numbered(num_documents))
    corpus = opened(source, cache, validation_fraction=fraction)
    assert corpus.validation.num_documents == num_validation
    assert corpus.train.num_documents == num_documents - num_validation


def test_split_depends_on_names_alone(tmp_path):
    first = opened(write(tmp_path / "first", numbered(40)), tmp_path / "cache")
    renumbered = {name: f"other text {name}" for name in numbered(40)}
    second = opened(write(tmp_path / "second", renumbered), tmp_path / "cache")
    held_out = [renumbered[name] for name, text in numbered(40).items() if text in texts_of(first.validation)]
    assert texts_of(second.validation) == held_out


def test_new_documents_move_few_others(tmp_path, cache):
    before = set(texts_of(opened(write(tmp_path / "texts", numbered(400)), cache).validation))
    after = set(texts_of(opened(write(tmp_path / "texts", numbered(440)), cache).validation))
    old = set(numbered(400).values())
    assert len(before ^ (after & old)) <= 6


def test_the_end_of_the_only_file_is_held_out(tmp_path, cache):
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "input.txt").write_text("".join(lines))
    corpus = opened(text_source(tmp_path / "input.txt"), cache)
    (train,), (validation,) = texts_of(corpus.train), texts_of(corpus.validation)
    assert train + validation == "".join(lines)
    assert validation.startswith("line 9") and 99 <= validation.count("\n") <= 101
    assert corpus.summary().endswith("; the only document is cut in two, at a line end")


# Refusals


def test_text_too_short_to_split(tmp_path, cache):
    with pytest.raises(UserError, match="does not have two characters"):
        opened(write(tmp_path / "texts", {"a": "x", "empty": ""}), cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_fraction_outside_its_range(source, cache, fraction):
    with pytest.raises(UserError, match="data.validation_fraction"):
        opened(source, cache, validation_fraction=fraction)


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="data.cache_dir=.*cannot hold the corpus"):
        opened(source, tmp_path / "file")


def test_cache_below_home(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (tmp_path / "cache" / opened(source, "~/cache").fingerprint).is_dir()


def test_source_that_vanished(source, cache, tmp_path):
    (tmp_path / "texts" / "003.txt").unlink()
    with pytest.raises(UserError, match="003.txt"):
        opened(source, cache)


# The cache


class Failing(ByteTokenizer):
    """Fails as `error` when it is to tokenize."""

    def __init__(self, error):
        self._error = error

    def encode_batch(self, texts):
        raise self._error


def test_second_opening_reads_the_cache(source, cache):
    built = opened(source, cache)
    found = opened(source, cache, Failing(AssertionError("tokenized again")))
    assert found.fingerprint == built.fingerprint
    assert found.summary() == built.summary()
    np.testing.assert_array_equal(found.train.tokens, built.train.tokens)


def test_moved_source_finds_its_corpus_and_goes_by_its_new_name(source, cache, tmp_path):
    opened(source, cache)
    moved = text_source((tmp_path / "texts").rename(tmp_path / "elsewhere"))
    found = opened(moved, cache, Failing(AssertionError("tokenized again")))
    assert found.source == str(tmp_path / "elsewhere")


def test_any_change_makes_another_corpus(tmp_path, cache):
    class Other(ByteTokenizer):
        fingerprint = "other"

    source = write(tmp_path / "texts", numbered(40))
    corpora = [opened(source, cache), opened(source, cache, Other())]
    corpora.append(opened(source, cache, validation_fraction=0.2))
    corpora.append(opened(write(tmp_path / "texts", {"000": "changed"}), cache))
    corpora.append(opened(write(tmp_path / "texts", {"new": "more"}), cache))
    assert len({corpus.fingerprint for corpus in corpora}) == 5


@pytest.mark.parametrize("cut", [None, 0, 20], ids=["missing", "empty", "cut"])
@pytest.mark.parametrize("name", ["meta.json", "train.tokens", "validation.offsets.npy"])
def test_damaged_corpus_names_the_folder_to_delete(source, cache, name, cut):
    folder = cache / opened(source, cache).fingerprint
    content = (folder / name).read_bytes()
    (folder / name).unlink() if cut is None else (folder / name).write_bytes(content[:cut])
    with pytest.raises(UserError, match=f"the corpus in {folder} is damaged .*delete that folder"):
        opened(source, cache)


def cut(path, itemsize):
    path.write_bytes(path.read_bytes()[: 300 * itemsize + 1])


def spoil(path, itemsize):
    content = np.fromfile(path, f"u{itemsize}")
    content[700] = 60_000
    content.tofile(path)


def remove(path, itemsize):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "it ends after 300 of its {length} tokens"),
        (spoil, "its token 700 is 60000, and the tokenizer has 257"),
        (remove, "its tokens 600 to 800 cannot be read: No such file or directory"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_tokens_damaged_behind_our_back_name_their_file_and_place(source, cache, damage, reason):
    stream = opened(source, cache).train
    path, length = stream.tokens.path, stream.num_tokens
    before = stream.tokens[200:300]
    damage(path, stream.tokens.dtype.itemsize)
    if damage is not remove:
        np.testing.assert_array_equal(stream.tokens[200:300], before)
    with pytest.raises(UserError) as told:
        stream.tokens[600:800]
    sentence = f"{path} is damaged ({reason.format(length=length)}); delete {path.parent} to build it anew"
    assert str(told.value) == sentence


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left"), RuntimeError()], ids=repr)
def test_interrupted_build_leaves_nothing(source, cache, error):
    with pytest.raises((KeyboardInterrupt, UserError, RuntimeError)):
        opened(source, cache, Failing(error))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert opened(source, cache).train.num_documents == 36


BUILD = """
import sys, time
from flashtrain.data import corpus
from flashtrain.data.documents import text_source
from flashtrain.data.tokenizer import ByteTokenizer

class Slow(ByteTokenizer):
    def encode_batch(self, texts):
        print("tokenizing", flush=True)
        time.sleep(0.05)
        return super().encode_batch(texts)

corpus.CHARACTERS_PER_BATCH = 50
opened = corpus.open_corpus(text_source(sys.argv[1]), Slow(), cache_dir=sys.argv[2], validation_fraction=0.1)
print(opened.fingerprint, opened.train.tokens[:].sum())
"""


def builder(tmp_path, cache):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "texts"), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_build_is_begun_again(source, cache, tmp_path):
    with builder(tmp_path, cache) as process:
        assert process.stdout.readline() == "tokenizing\n"
        process.kill()
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".unfinished"}
    assert texts_of(opened(source, cache).train)
    assert {path.suffix for path in cache.iterdir()} == {".lock", ""}


def test_of_several_processes_one_builds(source, cache, tmp_path):
    processes = [builder(tmp_path, cache) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert len({lines[-1] for lines in outputs}) == 1
    assert sum(len(lines) > 1 for lines in outputs) == 1, "only one tokenizes"
    assert outputs[0][-1].split()[0] == opened(source, cache).fingerprint


# The standard library


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return opened(stdlib_source(), tmp_path_factory.mktemp("stdlib"))


def test_stdlib_splits_share_no_document(stdlib):
    train, validation = set(texts_of(stdlib.train)), set(texts_of(stdlib.validation))
    assert not train & validation
    assert len(train) + len(validation) == stdlib.train.num_documents + stdlib.validation.num_documents
    assert 0.05 < stdlib.validation.num_bytes / stdlib.train.num_bytes < 0.25


def test_stdlib_holds_out_long_documents(stdlib):
    """Evaluation at long context needs them; on CPython 3.6 to 3.13 there are five to seven."""
    lengths = np.diff(stdlib.validation.offsets)
    assert (lengths > 64 * 1024).sum() >= 3
    assert (lengths > 128 * 1024).sum() >= 1
