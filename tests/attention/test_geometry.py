"""Geometry against the mask written out: all small shapes, both directions, in integers as strict as a GPU's."""

import itertools

import pytest
import torch

from flashtrain.kernels.attention import Intervals

geometry = pytest.importorskip("flashtrain.kernels.attention.geometry")

LENGTHS = [(1, 1), (1, 9), (9, 1), (5, 5), (8, 8), (9, 9), (4, 11), (11, 4), (7, 13), (13, 7), (16, 12)]
SIDES = [None, 0, 1, 2, 5, 100]
TILES = [1, 2, 3, 4, 8]


class Int32(int):
    """Raises where 32-bit arithmetic would overflow and where Triton's `//` would differ from Python's."""

    def __new__(cls, value):
        if not -(2**31) <= value < 2**31:
            raise OverflowError(f"{value} does not fit in 32 bits")
        return super().__new__(cls, value)

    def __floordiv__(self, other):
        if self < 0:
            raise ArithmeticError(f"{int(self)} // {other}: Triton truncates, Python floors")
        return Int32(int(self) // int(other))

    def __neg__(self):
        return Int32(-int(self))


def _checked(name):
    def operate(self, other):
        return Int32(getattr(int, name)(int(self), int(other)))

    return operate


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"):
    setattr(Int32, _name, _checked(_name))


def mask_of(left, right, Sq, Sk):
    """The kernels' mask arguments, in their order, as strict integers."""
    arguments = geometry.mask_arguments(left, right, Sq, Sk)
    return (
        Int32(Sq),
        Int32(Sk),
        Int32(arguments["left"]),
        Int32(arguments["right"]),
        arguments["HAS_LEFT"],
        arguments["HAS_RIGHT"],
    )


def visited(bounds, mask, rows, first, tile, block):
    """The blocks of the masked and of the free loop of one tile, as a kernel visits them."""
    last = min(first + tile, rows) - 1
    blocks = geometry.block_ranges.fn(
        *bounds.fn(Int32(first), *mask), *bounds.fn(Int32(last), *mask), Int32(block)
    )
    return [
        [
            geometry.block_of_step.fn(step, blocks, masked)
            for step in range(*geometry.steps.fn(blocks, masked))
        ]
        for masked in (True, False)
    ]


@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_bounds_are_those_of_the_mask_in_both_directions(Sq, Sk):
    for left, right in itertools.product(SIDES, SIDES):
        dense = Intervals.window(left, right).dense(Sq, Sk)[0]
        mask = mask_of(left, right, Sq, Sk)
        for bounds, rows_see in ((geometry.key_bounds, dense), (geometry.query_bounds, dense.T)):
            previous = (0, 0)
            for row, seen in enumerate(rows_see.tolist()):
                lo, hi = bounds.fn(Int32(row), *mask)
                assert [lo <= column < hi for column in range(len(seen))] == seen, (left, right, row)
                assert (lo, hi) >= previous and hi >= previous[1], "bounds never decrease"
                previous = (lo, hi)


@pytest.mark.parametrize("direction", ["keys of a query tile", "queries of a key tile"])
@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_tiles_visit_what_is_visible_and_mask_only_the_boundary(Sq, Sk, direction):
    for left, right in itertools.product(SIDES, SIDES):
        dense = Intervals.window(left, right).dense(Sq, Sk)[0]
        bounds = geometry.key_bounds
        if direction == "queries of a key tile":
            dense, bounds = dense.T, geometry.query_bounds
        rows, columns = dense.shape
        mask = mask_of(left, right, Sq, Sk)
        for tile, block in itertools.product(TILES, TILES):
            for first in range(0, rows, tile):
                masked, free = visited(bounds, mask, rows, first, tile, block)
                seen = dense[first : first + tile]
                parts = [seen[:, n * block : (n + 1) * block] for n in range(-(-columns // block))]
                partial = [n for n, part in enumerate(parts) if part.any() and not is_free(part, block)]
                assert free == [n for n, part in enumerate(parts) if is_free(part, block)]
                assert masked == partial, (left, right, tile, block, first)


def is_free(part: torch.Tensor, block: int) -> bool:
    return part.shape[1] == block and bool(part.all())


@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_visible_is_the_mask_and_false_beyond_the_ends(Sq, Sk):
    i, j = torch.arange(Sq + 3)[:, None], torch.arange(Sk + 3)[None, :]
    for left, right in itertools.product(SIDES, SIDES):
        arguments = geometry.mask_arguments(left, right, Sq, Sk)
        seen = geometry.visible.fn(i, j, Sq, Sk, *arguments.values())
        expected = torch.zeros(Sq + 3, Sk + 3, dtype=torch.bool)
        expected[:Sq, :Sk] = Intervals.window(left, right).dense(Sq, Sk)[0]
        assert torch.equal(seen, expected), (left, right)


def test_a_side_that_reaches_past_everything_is_unbounded():
    unbounded = geometry.mask_arguments(None, None, 100, 50)
    assert geometry.mask_arguments(49, 99, 100, 50) == unbounded
    assert geometry.mask_arguments(2**40, 2**40, 100, 50) == unbounded
    assert geometry.mask_arguments(48, 98, 100, 50) == {
        "left": 48,
        "right": 98,
        "HAS_LEFT": True,
        "HAS_RIGHT": True,
    }


def test_no_overflow_at_the_longest_lengths():
    longest = 2**30 - 1
    for left, right in ((None, 0), (longest - 2, longest - 2), (0, None)):
        mask = mask_of(left, right, longest, longest)
        for bounds in (geometry.key_bounds, geometry.query_bounds):
            visit = bounds.fn(Int32(0), *mask), bounds.fn(Int32(longest - 1), *mask)
            geometry.block_ranges.fn(*visit[0], *visit[1], Int32(256))
