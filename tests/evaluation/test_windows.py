import numpy as np
import pytest

from flashtrain.errors import UserError
from flashtrain.evaluation.windows import (
    anchors_every,
    documents_of,
    evenly_spaced,
    opening_windows,
    reached_lengths,
    short_windows,
    strided_windows,
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
    with pytest.raises(UserError, match=rf"starts at 128 .* has {max(documents, default=0)}; lower eval.lengths"):
        reached_lengths(np.array(documents, dtype=np.int64), [128, 256])


def test_opening_windows_score_all_but_the_first_token():
    windows = opening_windows(documents_of(np.array([10, 7, 8, 30]), 8), 8)
    assert windows.documents.tolist() == [0, 2, 3]
    assert windows.starts.tolist() == [0, 0, 0]
    assert (windows.length, windows.num_targets.tolist()) == (8, [7, 7, 7])
    assert windows.stops.tolist() == [8, 8, 8]


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


def inputs_and_targets(predicted, window, stride):
    """(start, end, first target, last target) of windows with inputs y[start:end], one window after the other."""
    end = min(window, predicted)
    yield 0, end, 1, end
    while end < predicted:
        last = min(end + stride, predicted)
        yield last - window, last, end + 1, last
        end = last


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 8), (8, 3), (8, 1), (30, 7), (64, 64)])
def test_strided_windows_are_end_anchored_and_the_first_scores_all(window, stride):
    document_tokens = np.array([30, 2, 1, 9, 10, 65, 100])
    chosen = np.array([0, 1, 3, 4, 5, 6])
    found = {document: [] for document in chosen.tolist()}
    for windows in strided_windows(chosen, document_tokens, window, stride):
        columns = (windows.documents, windows.starts, windows.stops, windows.num_targets)
        for document, start, stop, count in zip(*(column.tolist() for column in columns), strict=True):
            found[document].append((start, start + windows.length, stop - count, stop - 1))
    for document in chosen.tolist():
        assert found[document] == list(inputs_and_targets(int(document_tokens[document]) - 1, window, stride))


def test_windows_in_short_context_share_a_length_and_end_with_the_opening():
    windows = short_windows(np.array([3, 5]), length=100, context=12, step=30)
    assert windows.length == 42
    assert windows.documents.tolist() == [3] * 3 + [5] * 3
    assert windows.starts.tolist() == [0, 30, 58] * 2
    assert windows.stops.tolist() == [42, 72, 100] * 2
    assert windows.num_targets.tolist() == [30, 30, 28] * 2
