"""Geometry against the mask written out: all small shapes, both directions, in integers as strict as a GPU's."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from flashtrain.kernels.attention import Intervals

geometry = pytest.importorskip("flashtrain.kernels.attention.geometry")

LENGTHS = [(1, 1), (1, 9), (9, 1), (5, 5), (8, 8), (9, 9), (4, 11), (11, 4), (7, 13), (13, 7), (16, 12)]
SIDES = [None, 0, 1, 2, 5, 100]
TILES = [1, 2, 3, 4, 8]


@pytest.fixture(autouse=True)
def on_python_ints(monkeypatch):
    monkeypatch.setattr(geometry, "tl", SimpleNamespace(minimum=min, maximum=max))


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
    """The kernels' mask of a window, in their order, as strict integers."""
    arguments = geometry.mask_arguments(Intervals.window(left, right), Sq, Sk)
    return 0, Int32(Sq), Int32(Sk), Int32(arguments["left"]), Int32(arguments["right"]), arguments["bounds"]


def visited(lo, hi, first, tile, block):
    """The blocks of the masked and of the free loop of the tile from row `first`, as a kernel visits them."""
    last = min(first + tile, len(lo)) - 1
    blocks = geometry.block_ranges.fn(*map(Int32, (lo[first], hi[first], lo[last], hi[last], block)))
    return [
        [
            geometry.block_of_step.fn(step, blocks, masked)
            for step in range(*geometry.steps.fn(blocks, masked))
        ]
        for masked in (True, False)
    ]


def assert_tiles_visit_what_is_visible(lo, hi, dense, tile, block):
    """The free loop visits the blocks that all rows see whole, the masked one every other that some row sees."""
    rows, columns = dense.shape
    for first in range(0, rows, tile):
        masked, free = visited(lo, hi, first, tile, block)
        seen = dense[first : first + tile]
        parts = [seen[:, n * block : (n + 1) * block] for n in range(-(-columns // block))]
        assert free == [n for n, part in enumerate(parts) if is_free(part, block)]
        needed = [n for n, part in enumerate(parts) if part.any() and not is_free(part, block)]
        assert set(needed) <= set(masked) and not set(masked) & set(free)
        yield first, masked, needed


def is_free(part: torch.Tensor, block: int) -> bool:
    return part.shape[1] == block and bool(part.all())


@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_bounds_are_those_of_the_mask_in_both_directions(Sq, Sk):
    for left, right in itertools.product(SIDES, SIDES):
        dense = Intervals.window(left, right).dense(Sq, Sk)[0]
        mask = mask_of(left, right, Sq, Sk)
        for bounds, rows_see in ((geometry.key_bounds, dense), (geometry.query_bounds, dense.T)):
            previous = (0, 0)
            for row, seen in enumerate(rows_see.tolist()):
                lo, hi = bounds.fn(Int32(row), *mask)
                assert [geometry.inside.fn(column, lo, hi) for column in range(len(seen))] == seen, (left, right, row)
                assert lo >= previous[0] and hi >= previous[1], "bounds never decrease"
                previous = (lo, hi)


@pytest.mark.parametrize("direction", ["keys of a query tile", "queries of a key tile"])
@pytest.mark.parametrize(("Sq", "Sk"), LENGTHS)
def test_tiles_visit_what_a_window_shows_and_mask_only_the_boundary(Sq, Sk, direction):
    for left, right in itertools.product(SIDES, SIDES):
        dense, bounds = Intervals.window(left, right).dense(Sq, Sk)[0], geometry.key_bounds
        if direction == "queries of a key tile":
            dense, bounds = dense.T, geometry.query_bounds
        mask = mask_of(left, right, Sq, Sk)
        lo, hi = zip(*(bounds.fn(Int32(row), *mask) for row in range(len(dense))), strict=True)
        for tile, block in itertools.product(TILES, TILES):
            for first, masked, needed in assert_tiles_visit_what_is_visible(lo, hi, dense, tile, block):
                assert masked == needed, (left, right, tile, block, first)


def small_masks():
    """Every way to cut rows of up to 6 queries and keys into up to 3 documents, and mixes with the rest."""
    for Sq, Sk in ((1, 1), (5, 5), (6, 6), (3, 6), (6, 3), (2, 5)):
        cuts = [
            (torch.bucketize(torch.arange(Sq), torch.tensor(a), right=True),
             torch.bucketize(torch.arange(Sk), torch.tensor(b), right=True))
            for a in itertools.combinations_with_replacement(range(Sq + 1), 2)
            for b in itertools.combinations_with_replacement(range(Sk + 1), 2)
        ]  # fmt: skip
        for left, right in ((None, 0), (None, None), (1, 0), (0, 2)):
            window = Intervals.window(left, right)
            for q_documents, k_documents in cuts:
                yield Sq, Sk, window.in_documents(q_documents[None], k_documents[None])
            for size in (1, 2, 4):
                yield Sq, Sk, window.in_chunks(size, Sq, Sk)
        for prefix in range(Sk + 1):
            yield Sq, Sk, Intervals.prefix_lm(torch.tensor([prefix]), Sq, Sk)
            yield Sq, Sk, Intervals.prefix_lm(torch.tensor([prefix]), Sq, Sk) & Intervals.window(2, 1)


def test_tiles_visit_what_bounds_show_in_both_directions():
    count = 0
    for Sq, Sk, intervals in small_masks():
        dense = intervals.dense(Sq, Sk)[0]
        for bounds, rows_see in ((intervals.bounds.keys, dense), (intervals.bounds.queries, dense.T)):
            lo, hi = bounds[:, 0].tolist()
            for tile, block in itertools.product((1, 2, 3), (1, 2, 4)):
                for first, masked, _ in assert_tiles_visit_what_is_visible(lo, hi, rows_see, tile, block):
                    last = min(first + tile, len(lo)) - 1
                    assert all(lo[first] // block <= n < -(-hi[last] // block) for n in masked)
                    count += 1
    assert count > 50_000


def test_the_work_on_packed_documents_is_that_of_their_area():
    """32k tokens of documents of 1 to 2047: a tenth of causal's blocks at most, and the masked ones at edges."""
    lengths = torch.randint(1, 2048, (64,), generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.arange(64), lengths)[None, :32768]
    blocks = {}
    for name, intervals in (("packed", Intervals.causal().in_documents(documents)), ("causal", Intervals.causal())):
        lo, hi = intervals.bounds_of(32768, 32768).keys[:, 0].tolist()
        visits = [visited(lo, hi, first, 64, 64) for first in range(0, 32768, 64)]
        blocks[name] = sum(len(masked) + len(free) for masked, free in visits)
    assert blocks["packed"] < blocks["causal"] / 10


def test_a_side_that_reaches_past_everything_is_unbounded():
    unbounded = geometry.mask_arguments(Intervals.full(), 100, 50)
    assert unbounded == {"left": 50, "right": 100, "bounds": None}
    assert geometry.mask_arguments(Intervals.window(2**40, 2**40), 100, 50) == unbounded
    assert geometry.mask_arguments(Intervals.window(48, 98), 100, 50) == {"left": 48, "right": 98, "bounds": None}


def test_rows_that_share_their_bounds_are_one_row_apart_by_nothing():
    documents = torch.zeros(3, 8, dtype=torch.int32)
    keys, queries = geometry.mask_arguments(Intervals.full().in_documents(documents), 8, 8)["bounds"]
    assert keys[2] == queries[2] == 8
    keys, queries = geometry.mask_arguments(Intervals.full().in_documents(documents[:1]), 8, 8)["bounds"]
    assert keys[2] == queries[2] == 0


def test_no_overflow_at_the_longest_lengths():
    longest = 2**30 - 1
    for left, right in ((None, 0), (longest - 2, longest - 2), (0, None), (None, None)):
        mask = mask_of(left, right, longest, longest)
        for bounds in (geometry.key_bounds, geometry.query_bounds):
            visit = bounds.fn(Int32(0), *mask), bounds.fn(Int32(longest - 1), *mask)
            geometry.block_ranges.fn(*visit[0], *visit[1], Int32(256))
