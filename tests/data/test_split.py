"""The end that is held out of a text which is the only one: how much it is, and that lines stay whole."""

import os

import pytest

from flashtrain.data.documents import text_source
from flashtrain.data.split import cut_place, split_documents
from flashtrain.errors import UserError

LINES = "".join(f"line {i}: {'word ' * (i % 13)}\n" for i in range(400))


def split(folder, texts, validation_fraction=0.1):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return split_documents(text_source(folder), validation_fraction)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_lines_stay_whole_and_the_last_fraction_is_held_out(fraction):
    place = cut_place(LINES, fraction)
    assert LINES[place - 1] == "\n"
    longest = max(map(len, LINES.splitlines(keepends=True)))
    assert abs(len(LINES) - place - fraction * len(LINES)) <= longest / 2 + 1


@pytest.mark.parametrize("ends", [(880,), (930,), (880, 930), (900, 901)], ids=str)
def test_the_nearest_line_end_is_taken(ends):
    text = "".join("\n" if i + 1 in ends else "x" for i in range(1000))
    assert cut_place(text, 0.1) == min(ends, key=lambda end: abs(end - 900))


@pytest.mark.parametrize("end", [None, 6, 850, 950, 1000], ids=str)
def test_without_a_line_end_at_hand_the_cut_is_exact(end):
    """As in a headline before one long line, whose end would leave nothing to train on."""
    text = "".join("\n" if i + 1 == end else "x" for i in range(1000))
    assert cut_place(text, 0.1) == 900


@pytest.mark.parametrize("text", ["ab", "\n\n", "a\n", "\na", "abc", "a\nb", "one\ntwo\n"], ids=repr)
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_no_part_is_empty(text, fraction):
    assert 0 < cut_place(text, fraction) < len(text)


@pytest.mark.parametrize(("text", "where"), [(LINES, "at a line end"), ("x" * 1000, "inside a line")])
def test_the_only_document_is_parted_whatever_empty_and_repeated_ones_there_are(tmp_path, text, where):
    found = split(tmp_path, {"a": "", "b": text, "c": text})
    empty, only, repeated = found.parts
    assert (empty, repeated) == ({}, {})
    assert text[only["train"]] + text[only["validation"]] == text
    assert (found.num_empty, found.num_repeated, found.cut) == (1, 1, where)


def test_one_of_several_documents_is_never_cut(tmp_path):
    found = split(tmp_path, {"a": LINES, "b": "another"})
    assert found.cut is None
    assert sorted(map(str, found.parts)) == sorted(str({name: slice(None)}) for name in ("train", "validation"))


def test_names_need_not_be_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("one")
    found = split(tmp_path, {"a": "another"})
    assert sorted(name for parts in found.parts for name in parts) == ["train", "validation"]


@pytest.mark.parametrize("texts", [{"a": ""}, {"a": "x"}, {"a": "x", "b": "x", "c": ""}], ids=["no", "one", "same"])
def test_a_text_too_short_to_cut_is_refused(tmp_path, texts):
    with pytest.raises(UserError, match="does not have two characters of text"):
        split(tmp_path, texts)
