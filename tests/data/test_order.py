"""Rows as a function of the step: each once per epoch, the same for every number of ranks."""

import numpy as np
import pytest

from flashtrain.data.order import rows_for_step

SHAPES = pytest.mark.parametrize(
    ("rows_per_step", "num_rows"),
    [
        pytest.param(4, 32, id="steps-divide-an-epoch"),
        pytest.param(6, 32, id="steps-straddle-epochs"),
        pytest.param(50, 12, id="steps-span-epochs"),
        pytest.param(7, 1, id="one-row"),
    ],
)


def rows(steps, rows_per_step, num_rows, seed=5):
    parts = [rows_for_step(s, seed=seed, rows_per_step=rows_per_step, num_rows=num_rows) for s in steps]
    return np.concatenate(parts)


@SHAPES
def test_each_row_once_per_epoch(rows_per_step, num_rows):
    num_epochs = 5
    taken = rows(range(-(-num_epochs * num_rows // rows_per_step)), rows_per_step, num_rows)
    for epoch in taken[: num_epochs * num_rows].reshape(num_epochs, num_rows):
        assert sorted(epoch) == list(range(num_rows))


@SHAPES
def test_order_depends_on_rows_consumed_and_not_on_step_size(rows_per_step, num_rows):
    by_steps = rows(range(20), rows_per_step, num_rows)
    one_by_one = rows(range(20 * rows_per_step), 1, num_rows)
    np.testing.assert_array_equal(by_steps, one_by_one)


@SHAPES
def test_steps_are_a_pure_function(rows_per_step, num_rows):
    forward = [rows([step], rows_per_step, num_rows) for step in range(12)]
    backward = [rows([step], rows_per_step, num_rows) for step in reversed(range(12))]
    np.testing.assert_array_equal(forward, backward[::-1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_split_each_step(world_size):
    for step in range(20):
        shape = dict(seed=1, rows_per_step=6, num_rows=20)
        parts = [rows_for_step(step, **shape, rank=rank, world_size=world_size) for rank in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(parts), rows_for_step(step, **shape))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = rows(range(2), 100, 100).reshape(2, 100)
    other = rows([0], 100, 100, seed=6)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, np.arange(100))


def test_order_stays_as_it_is():
    """Runs resume by it: a change of these numbers breaks every checkpoint there is."""
    assert rows(range(3), 5, 8, seed=1337).tolist() == [5, 3, 2, 6, 4, 7, 0, 1, 5, 4, 0, 7, 2, 6, 1]


def test_far_steps_of_long_corpora_are_cheap():
    taken = rows_for_step(10**7, seed=0, rows_per_step=512, num_rows=3 * 10**6 + 1)
    assert taken.dtype == np.int64
    assert len(set(taken)) == 512
