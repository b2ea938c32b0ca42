"""Sources: the standard library as it is installed here, and text, jsonl and parquet through `datasets`."""

import errno
import json
import logging
import os
import subprocess
import sys
import sysconfig

import pyarrow
import pyarrow.parquet
import pytest

from flashtrain.data.documents import stdlib_source, text_source
from flashtrain.errors import UserError


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def documents(*args):
    return [tuple(document) for document in text_source(*args).documents()]


def refusal(*args):
    with pytest.raises(UserError) as caught:
        documents(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The standard library


def test_stdlib_is_the_library_without_its_tests():
    names = list(stdlib_source().files)
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/base_events.py", "tkinter/__init__.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in names)


def test_stdlib_documents_are_the_files():
    source = stdlib_source()
    texts = dict(source.documents())
    assert list(texts) == list(source.files)
    assert "class ArgumentParser" in texts["argparse.py"]
    assert sum(len(text.encode()) for text in texts.values()) > 8e6


def test_stdlib_without_sources_is_refused(monkeypatch, tmp_path):
    (tmp_path / "os.pyc").write_bytes(b"")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=f"no library sources in {tmp_path}; say data=text"):
        stdlib_source()


# Text


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "book.txt").write_bytes("naïve\r\n\n end".encode())
    assert documents(tmp_path / "book.txt") == [("book.txt", "naïve\n\n end")]


def test_folder_of_text_is_read_in_order_of_path_without_hidden_files(tmp_path, caplog):
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden.txt", ".git/c.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with caplog.at_level(logging.WARNING):
        assert documents(tmp_path) == [("a.txt", "a.txt"), ("a/z.txt", "a/z.txt"), ("b.txt", "b.txt")]
    assert f"{tmp_path}: only .txt is read; left out: 1, such as notes.md" in caplog.text


def test_home_is_spelled_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    assert documents("~/a.txt") == [("a.txt", "a")]


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    assert "latin.txt cannot be read as UTF-8" in refusal(tmp_path)


def test_text_has_no_column(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    assert "data.column=body" in refusal(tmp_path, "body")


# Rows


def test_jsonl_rows(tmp_path):
    rows = {"text": "one", "n": 1}, {"text": ""}, {"n": "2", "text": "two\u2028\n2"}
    path = jsonl(tmp_path / "a.jsonl", *rows)
    path.write_text(path.read_text() + "\n\n")
    assert documents(path) == [("a.jsonl:0", "one"), ("a.jsonl:1", ""), ("a.jsonl:2", "two\u2028\n2")]


def test_parquet_rows(tmp_path):
    path = parquet(tmp_path / "a.parquet", body=["one", "naïve"], n=[1, 2])
    assert documents(path, "body") == [("a.parquet:0", "one"), ("a.parquet:1", "naïve")]


def test_folders_of_rows_keep_the_rows_of_each_file_apart(tmp_path):
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "sub" / "b.jsonl", {"text": "b0"})
    jsonl(tmp_path / "a.jsonl", {"text": "a0"}, {"text": "a1"})
    (tmp_path / "empty.jsonl").touch()
    assert documents(tmp_path) == [("a.jsonl:0", "a0"), ("a.jsonl:1", "a1"), ("sub/b.jsonl:0", "b0")]


def test_rows_of_large_files_may_differ_in_their_other_fields(tmp_path):
    """The json builder of datasets fails on the last row, since it infers the schema from the first 10 MB."""
    rows = [{"text": "word " * 400}] * 6000 + [{"text": "2020-01-01", "extra": {"a": 1}}]
    texts = [text for _, text in documents(jsonl(tmp_path / "large.jsonl", *rows))]
    assert len(texts) == 6001 and texts[-1] == "2020-01-01"


READ_FILES = """
import sys
from flashtrain.data.documents import text_source
from flashtrain.errors import UserError

for path in sys.argv[1:]:
    try:
        assert [document.text for document in text_source(path).documents()] == ["one"]
    except UserError:
        assert "bad" in path
"""


def test_datasets_leaves_nothing_behind_and_says_nothing(tmp_path):
    jsonl(tmp_path / "a.jsonl", {"text": "one"})
    parquet(tmp_path / "a.parquet", text=["one"])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    home = tmp_path / "home"
    home.mkdir()
    files = [str(tmp_path / name) for name in ("a.jsonl", "a.parquet", "bad.parquet")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", READ_FILES, *files],
        env=variables | {"HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path for path in home.rglob("*") if path.is_file()] == []


# What is refused


def test_missing_path(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert "does not exist or cannot be reached (No such file" in message
    assert "; name a .txt, .jsonl or .parquet file" in message


def test_path_that_the_system_refuses(tmp_path):
    """As it does below a folder without the right to search it, which root always has."""
    assert "cannot be reached (File name too long); name a .txt" in refusal(tmp_path / ("x" * 300))


def test_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    def scandir(folder, real=os.scandir):
        if folder.endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return real(folder)

    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    assert f"the folder {tmp_path / 'locked'} cannot be listed (Permission denied)" in refusal(tmp_path)


def test_unknown_kind(tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    assert "no .txt, .jsonl or .parquet file" in refusal(tmp_path / "a.csv")


def test_empty_folder(tmp_path):
    assert "holds none" in refusal(tmp_path)


def test_folder_of_two_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    jsonl(tmp_path / "a.jsonl", {"text": "a"})
    assert "holds .jsonl and .txt" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_missing_column_names_the_columns(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    jsonl(path, {"body": "a", "n": 1}) if kind == "jsonl" else parquet(path, body=["a"], n=[1])
    assert "no column text; set data.column to one of: body, n" in refusal(path)


@pytest.mark.parametrize("value", [None, 5, ["a"]], ids=repr)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_not_text_names_the_row(tmp_path, kind, value):
    path = tmp_path / f"a.{kind}"
    jsonl(path, {"text": value}) if kind == "jsonl" else parquet(path, text=[value])
    assert f"row 0 of {path} has no Unicode text in column text: " in refusal(path)


def test_half_a_surrogate_pair_is_no_text(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "\ud83d"})
    assert f"row 1 of {path} has no Unicode text" in refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b'{"text": "a"}\n{"text": \n', "line 2 of", id="cut-line"),
        pytest.param(b'{"text": "a"}\n["a"]\n', "line 2 of", id="not-an-object"),
        pytest.param(b'{"text": "\xff"}\n', "cannot be read as .jsonl", id="not-utf8"),
    ],
)
def test_broken_jsonl(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert message in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("content", [b"", b"PAR1"], ids=["empty", "cut"])
def test_broken_parquet(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    assert "cannot be read as .parquet" in refusal(tmp_path / "a.parquet")


# Fingerprints


def test_fingerprint_follows_content_names_and_column_but_not_the_place(tmp_path):
    def fingerprint(place, name="a.jsonl", text="a", column=None):
        (tmp_path / place).mkdir()
        jsonl(tmp_path / place / name, {"text": text})
        return text_source(tmp_path / place, column).fingerprint()

    same = fingerprint("here"), fingerprint("there"), fingerprint("spelled-out", column="text")
    others = fingerprint("x", text="b"), fingerprint("y", name="b.jsonl"), fingerprint("z", column="body")
    assert len(set(same)) == 1
    assert len({*same, *others}) == 4
