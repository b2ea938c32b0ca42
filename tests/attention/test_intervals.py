"""Intervals against the definition written out key by key."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.intervals import Bounds

EXTRA = (None, 0, 1, 2, 5, 40)
MASKS = [Intervals.window(left, right) for left, right in itertools.product(EXTRA, EXTRA)]
LENGTHS = list(itertools.product((0, 1, 2, 5, 8), (0, 1, 3, 5, 9)))


def sees(intervals: Intervals, i: int, j: int, Sq: int, Sk: int) -> bool:
    position = i + Sk - Sq
    after_left = intervals.left is None or j >= position - intervals.left
    before_right = intervals.right is None or j <= position + intervals.right
    return after_left and before_right


def is_the_definition(intervals: Intervals, expected: list[list[list[bool]]]) -> None:
    """`expected` (R, Sq, Sk): dense says it, the bounds of both sides too, and these never decrease."""
    dense = torch.tensor(expected)
    Sq, Sk = dense.shape[1:]
    assert torch.equal(intervals.dense(Sq, Sk), dense)
    bounds = intervals.bounds_of(Sq, Sk)
    for (lo, hi), rows_see in ((bounds.keys, dense), (bounds.queries, dense.mT)):
        assert lo.dtype == torch.int32 and lo.shape == rows_see.shape[:2]
        column = torch.arange(rows_see.shape[2])
        assert torch.equal((lo[..., None] <= column) & (column < hi[..., None]), rows_see)
        assert (lo >= 0).all() and (lo <= hi).all() and (hi <= rows_see.shape[2]).all()
        assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all()
    assert intervals.visible(len(dense), Sq, Sk) == dense.sum()
    assert intervals.may_have_empty_rows(Sq, Sk) or dense.any(dim=-1).all()


@pytest.mark.parametrize("intervals", MASKS, ids=str)
def test_windows_are_the_definition(intervals):
    for Sq, Sk in LENGTHS:
        expected = [[sees(intervals, i, j, Sq, Sk) for j in range(Sk)] for i in range(Sq)]
        assert intervals.dense(Sq, Sk)[0].tolist() == expected
        assert intervals.visible(3, Sq, Sk) == 3 * sum(map(sum, expected))
        assert intervals.may_have_empty_rows(Sq, Sk) == any(not any(row) for row in expected)
        if Sq and Sk:
            is_the_definition(intervals, [expected])


extras = st.sampled_from([None, 0, 1, 2, 5, 2**40])
windows = st.builds(Intervals.window, extras, extras)
documents = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(sorted)


def expected_in_documents(window: Intervals, q_documents: list[int], k_documents: list[int]) -> list[list[bool]]:
    """Document by document: the window on its own queries and keys."""

    def shown(i: int, j: int) -> bool:
        document = q_documents[i]
        if k_documents[j] != document:
            return False
        lengths = q_documents.count(document), k_documents.count(document)
        return sees(window, i - q_documents.index(document), j - k_documents.index(document), *lengths)

    return [[shown(i, j) for j in range(len(k_documents))] for i in range(len(q_documents))]


@given(windows, documents, documents)
def test_in_documents_is_the_window_of_each_document(window, q_documents, k_documents):
    intervals = window.in_documents(torch.tensor([q_documents]), torch.tensor([k_documents]))
    is_the_definition(intervals, [expected_in_documents(window, q_documents, k_documents)])


@given(windows, documents)
def test_documents_of_queries_and_keys_are_the_same_unless_given(window, documents):
    rows = torch.tensor([documents, [5] * len(documents)])
    expected = [expected_in_documents(window, row, row) for row in rows.tolist()]
    is_the_definition(window.in_documents(rows), expected)


@given(windows, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), st.integers(0, 2))
def test_in_sequences_is_the_window_of_each_sequence(window, lengths, padding):
    q_documents, k_documents = ([n for n, pair in enumerate(lengths) for _ in range(pair[side])] for side in (0, 1))
    q_ends, k_ends = (torch.tensor([(0, 0), *lengths]).cumsum(0)[:, side].int() for side in (0, 1))
    Sq, Sk = len(q_documents) + padding, len(k_documents) + padding
    intervals = window.in_sequences(q_ends, Sq, k_ends, Sk)
    expected = expected_in_documents(window, q_documents + [-1] * padding, k_documents + [-2] * padding)
    if Sq and Sk:
        is_the_definition(intervals, [expected])
    same = window.in_sequences(q_ends, Sq).dense(Sq, Sq)
    assert torch.equal(same, window.in_sequences(q_ends, Sq, q_ends, Sq).dense(Sq, Sq))


@given(windows, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_in_chunks_counts_chunks_of_keys(window, size, Sq, Sk):
    expected = [
        [sees(window, i, j, Sq, Sk) and (i + Sk - Sq) // size == j // size for j in range(Sk)] for i in range(Sq)
    ]
    is_the_definition(window.in_chunks(size, Sq, Sk), [expected])


@given(st.lists(st.integers(0, 10), min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 9))
def test_prefix_lm_lets_all_see_the_prefix(prefixes, Sq, Sk):
    expected = [
        [[j < prefix or j <= i + Sk - Sq for j in range(Sk)] for i in range(Sq)] for prefix in prefixes
    ]
    is_the_definition(Intervals.prefix_lm(torch.tensor(prefixes), Sq, Sk), expected)


@given(windows, windows, st.integers(1, 9), st.integers(1, 9))
def test_both_windows(a, b, Sq, Sk):
    assert torch.equal((a & b).dense(Sq, Sk), a.dense(Sq, Sk) & b.dense(Sq, Sk))


@given(windows, windows, documents, documents, st.integers(1, 4))
def test_both_of_any_masks(a, b, q_documents, k_documents, size):
    Sq, Sk = len(q_documents), len(k_documents)
    masks = [
        a,
        b.in_documents(torch.tensor([q_documents]), torch.tensor([k_documents])),
        a.in_chunks(size, Sq, Sk),
        Intervals.prefix_lm(torch.tensor([size, 1]), Sq, Sk),
    ]
    for x, y in itertools.product(masks, masks):
        is_the_definition(x & y, (x.dense(Sq, Sk) & y.dense(Sq, Sk)).tolist())


@given(windows, st.lists(st.integers(-1, 3), min_size=1, max_size=9))
def test_documents_alone_are_runs_whatever_they_are_called(window, names):
    """Such as -1 for the padding at the end, or a name that comes back."""
    runs = [sum(a != b for a, b in itertools.pairwise(names[: i + 1])) for i in range(len(names))]
    expected = expected_in_documents(window, runs, runs)
    is_the_definition(window.in_documents(torch.tensor([names])), [expected])


def test_strided_documents_and_other_devices():
    documents = torch.tensor([[0, 9], [0, 9], [1, 9], [1, 9]]).T[:1]
    assert not documents.is_contiguous() or documents.stride(-1) == 2
    expected = [expected_in_documents(Intervals.causal(), [0, 0, 1, 1], [0, 0, 1, 1])]
    is_the_definition(Intervals.causal().in_documents(documents), expected)
    assert torch.equal(
        Intervals.causal().in_documents(documents, documents).dense(4, 4), torch.tensor(expected)
    )
    for mask in (Intervals.causal().in_chunks(2, 4, 4, "meta"), Intervals.causal().in_documents(documents).to("meta")):
        assert mask.bounds.keys.device.type == mask.bounds.queries.device.type == "meta"
    assert Intervals.causal().to("meta") == Intervals.causal()


def test_visible_counts_every_row_of_the_batch_that_shares_its_bounds():
    documents = torch.tensor([[0, 0, 1]])
    assert Intervals.causal().in_documents(documents).visible(4, 3, 3) == 4 * 4
    assert Intervals.causal().in_documents(documents.expand(2, -1)).visible(4, 3, 3) == 4 * 4


IDS, LONGER = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Intervals.causal().in_documents(IDS).in_documents(IDS), "bounds of its own already; use &"),
        (lambda: Intervals.causal().in_documents(IDS).in_chunks(2, 3, 3), "bounds of its own already; use &"),
        (
            lambda: Intervals.prefix_lm(torch.tensor([1]), 3, 3).in_sequences(torch.tensor([0, 3]), 3),
            "bounds of its own already; use &",
        ),
        (lambda: Intervals.causal().in_documents(IDS[0]), r"must be \(rows, tokens\)"),
        (lambda: Intervals.causal().in_documents(IDS, IDS.expand(2, -1)), "of as many rows"),
        (lambda: Intervals.causal().in_chunks(0, 3, 3), "at least 1 key, not 0"),
        (lambda: Intervals.causal().in_sequences(torch.tensor([0, 2]), 3, Sk=4), "go together"),
        (lambda: Intervals.causal().in_sequences(torch.tensor([0, 2]), 3, torch.tensor([0, 2])), "go together"),
        (lambda: Intervals.causal().in_sequences(torch.tensor([]), 3), "one more than sequences"),
        (
            lambda: Intervals.causal().in_sequences(torch.tensor([0, 2]), 3, torch.tensor([0, 1, 2]), 3),
            "as many numbers for queries and keys",
        ),
        (lambda: Intervals.causal().in_documents(IDS).dense(4, 4), "was made for"),
        (
            lambda: Intervals.causal().in_documents(IDS) & Intervals.causal().in_documents(LONGER),
            "was made for",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bounds_are_made_without_looking_at_values():
    """Meta tensors have none: so nothing waits for a GPU, and torch.compile meets no branch on data."""
    documents = torch.zeros(2, 8, dtype=torch.int32, device="meta")
    for intervals in (Intervals.causal().in_documents(documents), Intervals.prefix_lm(documents[:, 0], 8, 8)):
        assert (intervals & Intervals.window(3, 0)).bounds.keys.shape == (2, 2, 8)


def test_causal_is_aligned_bottom_right():
    assert Intervals.causal() == Intervals.window(None, 0)
    assert Intervals.causal().dense(2, 4)[0].tolist() == [[True, True, True, False], [True, True, True, True]]
    assert Intervals.causal().dense(4, 2)[0].tolist() == [
        [False, False],
        [False, False],
        [True, False],
        [True, True],
    ]


def test_window_counts_extra_keys_on_each_side():
    assert torch.equal(Intervals.window(0, 0).dense(3, 3)[0], torch.eye(3, dtype=torch.bool))
    assert Intervals.window(1, 2).bounds_of(9, 9).keys[:, 0, 4].tolist() == [3, 7]
    assert Intervals.window(1, None).bounds_of(9, 9).keys[:, 0, 4].tolist() == [3, 9]


@given(windows, st.integers(0, 9), st.integers(0, 9))
def test_the_mask_at_some_lengths_is_the_same_in_the_plainest_words(window, Sq, Sk):
    plain = window.at(Sq, Sk)
    assert torch.equal(plain.dense(Sq, Sk), window.dense(Sq, Sk))
    if Sq and Sk and window.dense(Sq, Sk).all():
        assert plain.is_full


def test_a_window_as_long_as_the_row_is_causal():
    assert Intervals.window(1023, 0).at(1024, 1024).is_causal
    assert Intervals.window(1022, 0).at(1024, 1024) == Intervals.window(1022, 0)
    assert Intervals.causal().at(1, 9).is_full
    documents = Intervals.causal().in_documents(torch.zeros(1, 4, dtype=torch.int32))
    assert documents.at(4, 4) is documents


def test_dense_is_needed_but_for_the_full_mask_and_the_triangle():
    assert not Intervals.full().needs_dense(5, 9)
    assert not Intervals.causal().needs_dense(5, 5)
    assert Intervals.causal().needs_dense(5, 9)
    assert Intervals.window(3, 0).needs_dense(5, 5)
    assert Intervals.full().in_chunks(5, 5, 5).needs_dense(5, 5)


def test_visible_counts_a_million_tokens_in_closed_form():
    n = 1 << 20
    assert Intervals.full().visible(1, n, n) == n * n
    assert Intervals.causal().visible(1, n, n) == n * (n + 1) // 2
    assert Intervals.window(4095, 0).visible(2, n, n) == 2 * (4096 * 4097 // 2 + (n - 4096) * 4096)


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (None, -1)])
def test_negative_extra_keys_are_refused(left, right):
    with pytest.raises(ValueError, match="use None for no bound"):
        Intervals.window(left, right)


def test_a_side_beside_bounds_is_refused():
    with pytest.raises(ValueError, match="bounds hold the whole mask; use & to add a right of 0"):
        Intervals(right=0, bounds=Intervals.full().bounds_of(3, 3))


def test_intervals_are_values_and_bounds_are_themselves():
    assert Intervals.full() == Intervals.window(None, None)
    assert len({Intervals.causal(), Intervals.window(None, 0), Intervals.window(3, 0)}) == 2
    bounds = Intervals.full().bounds_of(3, 3)
    assert Intervals(bounds=bounds) == Intervals(bounds=bounds) != Intervals.full()
    assert Intervals(bounds=bounds) != Intervals(bounds=Bounds(bounds.keys, bounds.queries))
    masks = (Intervals.full(), Intervals.causal(), Intervals.window(3, None), Intervals(bounds=bounds))
    assert [str(x) for x in masks] == ["full", "causal", "window(3, None)", "bounds"]
