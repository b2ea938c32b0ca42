"""What the tests of whole runs share: an empty working folder with a folder of text."""

import pytest


@pytest.fixture(autouse=True)
def books(tmp_path, monkeypatch):
    """An empty working folder but for `books`, eight documents of a few thousand characters."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(" ".join(f"{number} times {i} is {number * i}." for i in range(300)))
    return folder
