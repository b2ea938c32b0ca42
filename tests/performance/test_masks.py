import pytest
import torch

from flashtrain.performance.masks import MASKS, Masks, packed_documents

SOME = Masks(window=3, longest_document=5, seed=0)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_its_name_says(name):
    length = 16
    query, key = torch.arange(length)[:, None], torch.arange(length)
    documents = packed_documents(2, length, longest=5, seed=0)
    expected = {
        "full": torch.ones(1, length, length, dtype=torch.bool),
        "causal": (key <= query)[None],
        "window": ((key <= query) & (key > query - 3))[None],
        "documents": (key <= query) & (documents[:, :, None] == documents[:, None, :]),
    }[name]
    intervals = SOME.intervals(name, 2, length, "cpu")
    assert torch.equal(intervals.dense(length, length), expected)
    assert intervals.visible(2, length, length) == int(expected.expand(2, -1, -1).sum())


def test_documents_are_one_stream_cut_into_rows():
    rows = packed_documents(4, 4096, longest=100, seed=0)
    assert torch.equal(rows.flatten(), packed_documents(1, 16384, longest=100, seed=0)[0])
    lengths = rows.flatten().bincount()[:-1]
    assert (lengths.min(), lengths.max()) == (1, 100)
    assert lengths.double().mean().item() == pytest.approx(50.5, rel=0.1)
    assert not torch.equal(rows, packed_documents(4, 4096, longest=100, seed=1))


def test_the_documents_of_the_goal():
    """Lengths uniform on 1..2047, seed 0, in a row of 32k: a twentieth of what causal shows, or less."""
    masks = Masks(window=1024, longest_document=2047, seed=0)
    shown = {name: masks.intervals(name, 1, 32768, "cpu").visible(1, 32768, 32768) for name in MASKS}
    assert shown["causal"] == 32768 * 32769 // 2
    assert shown["window"] == 1024 * 32768 - 1024 * 1023 // 2
    assert shown["documents"] < shown["causal"] / 20


def test_labels_say_what_is_shown():
    assert [SOME.label(name) for name in MASKS] == [
        "causal", "full", "window of 3 keys", "documents of 1 to 5 tokens",
    ]  # fmt: skip
