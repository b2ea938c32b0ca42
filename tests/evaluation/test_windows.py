import numpy as np
import pytest

from flashtrain.errors import UserError
from flashtrain.evaluation.windows import (
    anchors_every,
    documents_of,
    evenly_spaced,
    opening_windows,
    reached_lengths,
)


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [
        (5, None, [0, 1, 2, 3, 4]),
        (5, 9, [0, 1, 2, 3, 4]),
        (5, 5, [0, 1, 2, 3, 4]),
        (10, 4, [0, 2, 5, 7]),
        (10, 1, [0]),
        (0, 3, []),
    ],
)
def test_evenly_spaced(count, limit, expected):
    assert evenly_spaced(count, limit).tolist() == expected


def test_evenly_spaced_never_repeats_and_spans_the_whole():
    for count in range(1, 60):
        for limit in range(1, count + 1):
            chosen = evenly_spaced(count, limit)
            assert len(set(chosen.tolist())) == limit
            assert chosen[0] == 0
            assert count - chosen[-1] <= -(-count // limit)


def test_lengths_that_no_document_has_are_not_reached():
    assert reached_lengths(np.array([9, 300, 256]), [128, 300, 301]) == [128, 300]


@pytest.mark.parametrize("documents", [[], [127, 5]], ids=["no document", "only short documents"])
def test_no_reachable_length_is_a_user_error(documents):
    with pytest.raises(
        UserError, match=rf"starts at 128 .* has {max(documents, default=0)}; lower eval.lengths"
    ):
        reached_lengths(np.array(documents, dtype=np.int64), [128, 256])


def test_opening_windows_score_all_but_the_first_token():
    windows = opening_windows(documents_of(np.array([10, 7, 8, 30]), 8), 8)
    assert windows.documents.tolist() == [0, 2, 3]
    assert windows.starts.tolist() == [0, 0, 0]
    assert (windows.length, windows.num_targets) == (8, 7)


def test_anchors_lie_at_multiples_of_the_spacing_inside_documents():
    rng = np.random.default_rng(0)
    for spacing in (1, 3, 16, 64):
        document_tokens = rng.integers(1, 200, 30)
        anchors = anchors_every(document_tokens, spacing)
        expected = [
            (document, end)
            for document, tokens in enumerate(document_tokens)
            for end in range(spacing, tokens + 1, spacing)
        ]
        assert list(zip(anchors.documents, anchors.ends, strict=True)) == expected


def test_an_anchor_has_the_same_targets_at_every_length():
    anchors = anchors_every(np.array([200, 63, 64, 130]), spacing=64)
    for length in (9, 16, 33, 64):
        windows = anchors.windows(length, num_targets=8)
        assert (windows.starts + windows.length).tolist() == anchors.ends.tolist()
        assert windows.documents.tolist() == anchors.documents.tolist()
        assert windows.starts.min() >= 0


def test_picked_anchors_are_some_of_the_anchors_in_their_order():
    anchors = anchors_every(np.array([200, 64, 130]), spacing=32)
    picked = anchors.pick(4)
    everything = list(zip(anchors.documents, anchors.ends, strict=True))
    indices = [everything.index(anchor) for anchor in zip(picked.documents, picked.ends, strict=True)]
    assert indices == evenly_spaced(len(anchors), 4).tolist()
