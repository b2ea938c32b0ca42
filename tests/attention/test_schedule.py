"""flash_hopper's tables and loops on the CPU: every tile once, every program as busy, every block of a tile once.

Tiles of queries that visit blocks of keys, as the forward has them, and tiles of keys that visit blocks of queries.
"""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.limits import FLASH_HOPPER_HEAD_DIMS

triton = pytest.importorskip("triton")
forward = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.forward")
backward = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.backward")
launch = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.launch")
schedule = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.schedule")
geometry = pytest.importorskip("flashtrain.kernels.attention.geometry")
pipeline = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.pipeline")

SMS, TOKENS, HIDDEN_SIZE = 132, 32768, 2048
MASKS = {
    "causal": Intervals.causal(),
    "full": Intervals.full(),
    "window": Intervals.window(700, 0),
    "both sides": Intervals.window(150, 40),
}


@pytest.fixture
def on_python_ints(monkeypatch):
    for module in (schedule, geometry):
        monkeypatch.setattr(module, "tl", SimpleNamespace(minimum=min, maximum=max, cdiv=triton.cdiv))
    for name in ("block_of_step", "block_ranges", "key_bounds", "query_bounds"):
        monkeypatch.setattr(schedule, name, getattr(geometry, name).fn)
    for name in ("seen_by", "query_blocks"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).fn)


def each_program(num_programs, monkeypatch):
    """Yields the number of each, of which `key_tile` is then the program, on Python ints."""
    for number in range(num_programs):
        device = {"program_id": lambda axis, number=number: number, "num_programs": lambda axis: num_programs}
        monkeypatch.setattr(schedule, "gl", SimpleNamespace(cdiv=triton.cdiv, **device))
        yield number


@pytest.mark.parametrize("num_programs", [1, 3, 7, SMS])
@pytest.mark.parametrize("heads_in_section", [1, 2, 5, 100])
def test_every_tile_has_one_program(num_programs, heads_in_section):
    for num_tiles, num_heads in itertools.product((1, 2, 9), (1, 4, 17)):
        costs = [1 + tile * 7 % 5 for tile in range(num_tiles)]
        programs = schedule.deal(costs, num_heads, heads_in_section, num_programs)
        dealt = sorted(itertools.chain(*programs))
        assert dealt == list(range(num_tiles * num_heads))
        assert sum(map(bool, programs)) == min(num_programs, len(dealt))
        loads = [sum(costs[number % num_tiles] for number in tiles) for tiles in programs]
        assert max(loads) - min(loads) <= max(costs)


@pytest.mark.parametrize("length", [2048, 8192, 32768])
@pytest.mark.parametrize(("head_dim", "BLOCK_M"), [(64, 128), (64, 192), (128, 128)])
def test_causal_programs_are_as_busy_as_one_another(length, head_dim, BLOCK_M):
    costs = schedule.tile_costs(Intervals.causal(), length, length, BLOCK_M, 128)
    heads = TOKENS // length * HIDDEN_SIZE // head_dim
    programs = schedule.deal(costs, heads, schedule.section(length * head_dim * 4, 1), SMS)
    loads = [sum(costs[number % len(costs)] for number in tiles) for tiles in programs]
    assert max(loads) <= 1.01 * sum(loads) / SMS


def test_a_section_is_a_power_of_two_of_kv_heads_that_stay_in_l2():
    assert schedule.section(4 * 2**20, 1) == 8
    assert schedule.section(5 * 2**20, 1) == 4
    assert schedule.section(4 * 2**20, 3) == 24
    assert schedule.section(2**30, 4) == 4


@pytest.mark.parametrize("intervals", MASKS.values(), ids=MASKS)
def test_a_table_lists_the_tiles_of_each_program(intervals):
    table = schedule.table(intervals, 1000, 1300, 6, 4, 128, 128, 10, torch.device("cpu"))
    assert table.dtype == torch.int32
    begins, numbers = table[:11].tolist(), table[11:].tolist()
    assert begins[0] == 0 and begins[-1] == len(numbers) and begins == sorted(set(begins))
    assert sorted(numbers) == list(range(6 * 8))


@pytest.mark.parametrize("counted", [False, True])
def test_programs_take_every_tile_once_with_its_blocks(counted, on_python_ints, monkeypatch):
    batch, heads, q_len, kv_len, BLOCK_M, BLOCK_N, num_programs = 2, 3, 1000, 1300, 192, 128, 10
    causal = Intervals.causal()
    bounds = causal.bounds_of(q_len, kv_len).keys[:, 0]
    mask = (q_len, kv_len, kv_len, 0, (bounds,) if counted else None)
    monkeypatch.setattr(geometry, "_load", lambda rows, i, b, length: rows[:, i].tolist())
    table = schedule.table(causal, q_len, kv_len, batch * heads, 4, BLOCK_M, BLOCK_N, num_programs, torch.device("cpu"))
    counts, program = [0], None

    def atomic_add(address, value, sem):
        counts[0] += value
        return counts[0] - value

    device = SimpleNamespace(
        cdiv=triton.cdiv,
        program_id=lambda axis: program,
        num_programs=lambda axis: num_programs,
        load=lambda address, mask=True, other=None: table[address].item() if mask else other,
        atomic_add=atomic_add,
        store=lambda address, value: counts.__setitem__(0, value),
    )
    monkeypatch.setattr(schedule, "gl", device)
    found, going_on, n = [], list(range(num_programs)), 0
    while going_on:
        for program in tuple(going_on):
            exists, *tile = schedule.query_tile.fn(0, n, (batch * heads, heads), mask, BLOCK_M, BLOCK_N, FIRST=n == 0)
            found += [tile] * exists
            assert exists or n > 0
            going_on = going_on if exists else [other for other in going_on if other != program]
        n += 1
    assert counts == [0]
    assert sorted(tile[:3] for tile in found) == [
        [b, h, first] for b in range(batch) for h in range(heads) for first in range(0, q_len, BLOCK_M)
    ]
    for *_, first, blocks in found:
        rows = bounds[:, [first, min(first + BLOCK_M, q_len) - 1]]
        assert blocks == geometry.block_ranges.fn(*rows.T.flatten().tolist(), BLOCK_N)


def test_tiles_alike_go_head_by_head():
    table = schedule.table(Intervals.full(), 512, 512, 4, 4, 128, 128, 8, torch.device("cpu"))
    assert [table[9 + begin].item() for begin in table[:8].tolist()] == list(range(8))


def test_a_plan_is_made_once_for_each_shape_and_its_table_stays_where_it_is():
    shape = (2, 500, 500, 4, 2, 64, 64, 2, torch.device("cpu"))
    causal, full, bounds = (forward._plan(mask, *shape) for mask in (Intervals.causal(), Intervals.full(), None))
    assert forward._plan(Intervals.causal(), *shape) is causal
    assert causal.any_masked and full.any_masked and bounds.any_masked
    assert not forward._plan(Intervals.full(), 2, 512, 512, *shape[3:]).any_masked
    assert (full.launch, bounds.launch) == (launch.FORWARD[64], launch.FEW_KEYS[64])
    assert bounds.tiles is None


@pytest.mark.parametrize(
    ("intervals", "kv_len", "few"),
    [
        (Intervals.causal(), 2048, True),
        (Intervals.causal(), 2049, False),
        (Intervals.window(1023, 1024), 8192, True),
        (Intervals.window(1023, 1025), 8192, False),
        (Intervals.full(), 100, False),
        (None, 8192, True),
    ],
    ids=str,
)
def test_a_mask_that_leaves_few_keys_has_smaller_tiles(intervals, kv_len, few):
    assert launch.launch_of(64, intervals, kv_len, kv_len) == (launch.FEW_KEYS if few else launch.FORWARD)[64]
    assert launch.launch_of(72, intervals, kv_len, kv_len) == launch.FORWARD[128]


def test_each_stream_has_a_counter_of_its_own(monkeypatch):
    """Launches on two streams may overlap."""
    monkeypatch.setattr(schedule, "_counter_of_stream", functools.cache(schedule._counter_of_stream.__wrapped__))
    streams = iter([11, 22, 11])
    monkeypatch.setattr(
        schedule, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: next(streams)))
    )
    first, second, again = (schedule.counter(torch.device("cpu")) for _ in range(3))
    assert again is first and first.item() == second.item() == 0
    assert first.data_ptr() != second.data_ptr()


def test_what_lasts_is_made_beside_whatever_this_thread_does_with_memory():
    with FakeTensorMode():
        assert schedule._lasting([3, 5], torch.device("cpu")).tolist() == [3, 5]


def test_there_is_a_launch_for_each_limit_and_a_named_barrier_for_each_use():
    assert tuple(launch.FORWARD) == FLASH_HOPPER_HEAD_DIMS
    for rows in (*launch.FORWARD.values(), *launch.FEW_KEYS.values()):
        # Triton takes 0, 1 and one for each partition but the first; the hardware has 16.
        assert pipeline.FIRST_BARRIER.value >= 2 + rows.CONSUMERS
        assert forward.FIRST_TURN.value + rows.CONSUMERS + 2 * rows.SLOTS <= 16
        assert rows.SLOTS & (rows.SLOTS - 1) == 0
    for rows in launch.BACKWARD.values():
        assert pipeline.FIRST_BARRIER.value >= 2 + len(rows.REGISTERS)
        assert backward.FIRST_TURN.value + 2 * backward.CONSUMERS.value <= backward.BOTH_HERE.value
        assert backward.BOTH_HERE.value < backward.ADDED.value < backward.RINGS.value
        assert backward.RINGS.value + 2 * rows.SLOTS <= 16
        assert rows.SLOTS & (rows.SLOTS - 1) == 0


def test_costs_are_counted_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert schedule.tile_costs(Intervals.causal(), 300, 300, 128, 128) == [2, 3, 4]


@pytest.mark.parametrize("intervals", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1300), (1300, 300)], ids=str)
def test_a_tile_visits_each_block_that_it_sees_once_and_the_masked_first(intervals, lengths, on_python_ints):
    BLOCK_M, BLOCK_N = 192, 128
    q_len, kv_len = lengths
    lo, hi = intervals.bounds_of(q_len, kv_len).keys[:, 0].tolist()
    seen = intervals.dense(q_len, kv_len)[0]
    costs = schedule.tile_costs(intervals, q_len, kv_len, BLOCK_M, BLOCK_N)
    for tile, first in enumerate(range(0, q_len, BLOCK_M)):
        last = min(first + BLOCK_M, q_len) - 1
        blocks = geometry.block_ranges.fn(lo[first], hi[first], lo[last], hi[last], BLOCK_N)
        masked, total = schedule.visits.fn(blocks)
        visited = [schedule.block_at.fn(visit, blocks) for visit in range(total)]
        assert costs[tile] == 1 + len(visited) == 1 + len(set(visited))
        rows = seen[first : last + 1]
        for block in range(-(-kv_len // BLOCK_N)):
            part = rows[:, block * BLOCK_N : (block + 1) * BLOCK_N]
            assert not part.any() or block in visited
            if block in visited[max(masked, 0) :]:
                assert part.all() and part.shape[1] == BLOCK_N or not rows.any()


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("intervals", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 1000), (300, 1300), (1300, 300)], ids=str)
def test_a_tile_of_keys_visits_each_block_that_sees_it_once_and_hides_what_lies_past_the_ends(
    intervals, lengths, in_order, on_python_ints
):
    BLOCK_M, BLOCK_N = 64, 128
    q_len, kv_len = lengths
    arguments = geometry.mask_arguments(intervals, q_len, kv_len)
    mask = (q_len, kv_len, arguments["left"], arguments["right"], None)
    num_blocks = -(-q_len // BLOCK_M)
    seen = torch.zeros(num_blocks * BLOCK_M, -(-kv_len // BLOCK_N) * BLOCK_N, dtype=torch.bool)
    seen[:q_len, :kv_len] = intervals.dense(q_len, kv_len)[0]
    i = torch.arange(len(seen))
    for first in range(0, kv_len, BLOCK_N):
        bounds = [schedule.seen_by(first + n, 0, *mask) for n in range(BLOCK_N)]
        assert bounds == sorted(bounds)
        blocks = schedule.query_blocks(first, 0, mask, in_order, BLOCK_N, BLOCK_M)
        visited = [schedule.block_at.fn(visit, blocks) for visit in range(blocks[3] - blocks[0])]
        masked, free = (
            [geometry.block_of_step.fn(step, blocks, MASKED) for step in range(*geometry.steps.fn(blocks, MASKED))]
            for MASKED in (True, False)
        )
        # The loading warp and the computing warpgroups go the same way.
        assert visited == masked + free and len(set(visited)) == len(visited)
        tile = seen[:, first : first + BLOCK_N].unflatten(0, (num_blocks, BLOCK_M))
        assert all(block in visited or not tile[block].any() for block in range(num_blocks))
        # In order, rows past the last query hide themselves.
        assert all(tile[block][: q_len - block * BLOCK_M if in_order else None].all() for block in free)
        lo, hi = torch.tensor(bounds).T
        shown = ((lo <= i[:, None]) & (i[:, None] < hi)).unflatten(0, (num_blocks, BLOCK_M))
        assert torch.equal(shown[masked], tile[masked])
        ragged = not in_order and q_len % BLOCK_M != 0
        assert not masked or geometry.any_masked(intervals, q_len, kv_len, BLOCK_N) or ragged


@pytest.mark.parametrize("intervals", [MASKS["causal"], MASKS["full"], Intervals.window(None, 77)], ids=str)
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 1000), (300, 1300), (1300, 300), (1, 129)], ids=str)
@pytest.mark.parametrize("BLOCK_M", [64, 128])
def test_who_adds_to_a_block_in_order_are_the_tiles_from_the_last_to_the_first(
    intervals, lengths, BLOCK_M, on_python_ints
):
    BLOCK_N = 128
    q_len, kv_len = lengths
    assert backward.can_keep_order(intervals, q_len, kv_len)
    arguments = geometry.mask_arguments(intervals, q_len, kv_len)
    left, right = arguments["left"], arguments["right"]
    adders = [[] for _ in range(0, q_len, BLOCK_M)]
    mask = (q_len, kv_len, left, right, None)
    for tile, first in enumerate(range(0, kv_len, BLOCK_N)):
        begin, _, _, end = schedule.query_blocks(first, 0, mask, True, BLOCK_N, BLOCK_M)
        for block in range(begin, end):
            adders[block].insert(0, tile)
    for block, tiles in enumerate(adders):
        last_query = min(block * BLOCK_M + BLOCK_M, q_len) - 1
        last_tile = schedule.last_key_tile.fn(last_query, q_len, kv_len, left, right, BLOCK_N)
        assert tiles == list(range(last_tile, -1, -1))


@pytest.mark.parametrize(
    ("heads_at_once", "heads", "firsts"),
    [
        (None, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 128, 256] * 4),
        (1, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [256, 128, 0] * 4),
        (3, [0, 1, 2] * 3 + [3] * 3, [256] * 3 + [128] * 3 + [0] * 3 + [256, 128, 0]),
        (9, [0, 1, 2, 3] * 3, [256] * 4 + [128] * 4 + [0] * 4),
    ],
)
def test_tiles_of_keys_go_head_by_head_or_by_turns_from_the_last_to_the_first(
    heads_at_once, heads, firsts, on_python_ints, monkeypatch
):
    mask = (300, 300, 300, 0, None)
    found = [schedule.key_tile.fn(2, heads_at_once, mask, 128, 64)[:3] for _ in each_program(2 * 2 * 3, monkeypatch)]
    assert found == [(head // 2, head % 2, first) for head, first in zip(heads, firsts, strict=True)]


@pytest.mark.parametrize("resident", [1, 3, 1000])
@pytest.mark.parametrize("heads_at_once", [1, 2, 9])
@pytest.mark.parametrize("intervals", [MASKS["causal"], MASKS["full"], Intervals.window(None, 77)], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 1300), (1300, 300), (1, 129)], ids=str)
def test_in_order_no_tile_waits_for_one_that_has_not_started_however_few_are_there_at_once(
    intervals, lengths, heads_at_once, resident, on_python_ints, monkeypatch
):
    BLOCK_M, BLOCK_N, kv_heads, group_size = 64, 128, 5, 2
    q_len, kv_len = lengths
    arguments = geometry.mask_arguments(intervals, q_len, kv_len)
    mask = (q_len, kv_len, arguments["left"], arguments["right"], None)
    last_queries = [min(first + BLOCK_M, q_len) - 1 for first in range(0, q_len, BLOCK_M)]
    next_tiles = [schedule.last_key_tile.fn(last, *mask[:4], BLOCK_N) for last in last_queries] * kv_heads * group_size
    monkeypatch.setattr(backward, "tl", SimpleNamespace(maximum=max))
    monkeypatch.setattr(backward, "block_at", schedule.block_at.fn)

    to_start = []
    for _ in each_program(kv_heads * triton.cdiv(kv_len, BLOCK_N), monkeypatch):
        _, head, first, blocks = schedule.key_tile.fn(kv_heads, heads_at_once, mask, BLOCK_N, BLOCK_M)
        uses = range(group_size * (blocks[3] - blocks[0]))
        next_of = functools.partial(backward._next_of.fn, dq_next=0, first_head=head * group_size)
        to_start.append((first // BLOCK_N, [next_of(n, blocks_of_head=len(last_queries), blocks=blocks) for n in uses]))
    here = []
    while to_start or here:
        while to_start and len(here) < resident:
            here.append(to_start.pop(0))
        to_add = sum(len(uses) for _, uses in here)
        for tile, uses in here:
            while uses and next_tiles[uses[0]] == tile:
                next_tiles[uses.pop(0)] = tile - 1
        assert sum(len(uses) for _, uses in here) < to_add
        here = [(tile, uses) for tile, uses in here if uses]
    assert set(next_tiles) == {-1}


def test_an_order_is_not_kept_where_a_mask_ends_to_the_left():
    causal = Intervals.causal()
    assert not backward.can_keep_order(Intervals.window(99, 0), 1000, 1000)
    assert backward.can_keep_order(Intervals.window(99, 0), 100, 100)
    assert not backward.can_keep_order(causal.in_documents(torch.zeros(1, 9, dtype=torch.int32)), 9, 9)
