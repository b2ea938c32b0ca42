"""Intervals against the definition written out key by key."""

import itertools

import pytest
import torch

from flashtrain.kernels.attention import Intervals

EXTRA = (None, 0, 1, 2, 5, 40)
MASKS = [Intervals.window(left, right) for left, right in itertools.product(EXTRA, EXTRA)]
LENGTHS = list(itertools.product((0, 1, 2, 5, 8), (0, 1, 3, 5, 9)))


def sees(intervals: Intervals, i: int, j: int, Sq: int, Sk: int) -> bool:
    position = i + Sk - Sq
    after_left = intervals.left is None or j >= position - intervals.left
    before_right = intervals.right is None or j <= position + intervals.right
    return after_left and before_right


@pytest.mark.parametrize("intervals", MASKS, ids=str)
def test_bounds_dense_and_visible_are_the_definition(intervals):
    for Sq, Sk in LENGTHS:
        expected = [[sees(intervals, i, j, Sq, Sk) for j in range(Sk)] for i in range(Sq)]
        assert intervals.dense(Sq, Sk).tolist() == expected
        assert intervals.visible(Sq, Sk) == sum(map(sum, expected))
        assert intervals.has_empty_rows(Sq, Sk) == any(not any(row) for row in expected)
        for i, row in enumerate(expected):
            lo, hi = intervals.bounds(i, Sq, Sk)
            assert [lo <= j < hi for j in range(Sk)] == row
            assert 0 <= lo <= hi <= Sk


@pytest.mark.parametrize("intervals", MASKS, ids=str)
def test_bounds_never_decrease_along_the_row(intervals):
    for Sq, Sk in LENGTHS:
        bounds = [intervals.bounds(i, Sq, Sk) for i in range(Sq)]
        for (lo, hi), (next_lo, next_hi) in itertools.pairwise(bounds):
            assert lo <= next_lo and hi <= next_hi


def test_causal_is_aligned_bottom_right():
    assert Intervals.causal() == Intervals.window(None, 0)
    assert Intervals.causal().dense(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert Intervals.causal().dense(4, 2).tolist() == [
        [False, False],
        [False, False],
        [True, False],
        [True, True],
    ]


def test_window_counts_extra_keys_on_each_side():
    assert Intervals.window(0, 0).dense(3, 3).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert Intervals.window(1, 2).bounds(4, 9, 9) == (3, 7)
    assert Intervals.window(1, None).bounds(4, 9, 9) == (3, 9)


def test_dense_is_needed_but_for_the_full_mask_and_the_triangle():
    assert not Intervals.full().needs_dense(5, 9)
    assert not Intervals.causal().needs_dense(5, 5)
    assert Intervals.causal().needs_dense(5, 9)
    assert Intervals.window(3, 0).needs_dense(5, 5)


def test_visible_counts_a_million_tokens_in_closed_form():
    n = 1 << 20
    assert Intervals.full().visible(n, n) == n * n
    assert Intervals.causal().visible(n, n) == n * (n + 1) // 2
    assert Intervals.window(4095, 0).visible(n, n) == 4096 * 4097 // 2 + (n - 4096) * 4096


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (None, -1)])
def test_negative_extra_keys_are_refused(left, right):
    with pytest.raises(ValueError, match="use None for no bound"):
        Intervals.window(left, right)


def test_intervals_are_values():
    assert Intervals.full() == Intervals.window(None, None)
    assert len({Intervals.causal(), Intervals.window(None, 0), Intervals.window(3, 0)}) == 2
    assert [str(x) for x in (Intervals.full(), Intervals.causal(), Intervals.window(3, None))] == [
        "full",
        "causal",
        "window(3, None)",
    ]
