from dataclasses import replace

import pytest

from flashtrain.performance.attention import Measurement, Problem
from flashtrain.performance.masks import Masks
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.report import Conditions, as_multiples_row, markdown, multiples, multiples_tables
from flashtrain.performance.timing import Timing

CELL = Problem("causal", 64, batch=2, head_dim=16, num_q_heads=4, num_kv_heads=4)
CELLS = [CELL, replace(CELL, length=128, batch=1), replace(CELL, mask="full"), replace(CELL, head_dim=32)]
PEER = "other.attention:attend"
GIVEN = Conditions("a device", "bfloat16", 128, 3, False, Masks(10, 40, 0), PEER, "(versions)")


def measured(variant, pass_name, seconds):
    """A measurement of each cell; None is no speed."""
    return [
        Measurement(
            cell, variant, pass_name, 10**9, NoSpeed("-", "cannot") if some is None else Timing((some,)), None
        )
        for cell, some in zip(CELLS, seconds, strict=True)
    ]


FOUND = [
    *measured("flash_v2", "forward", [1.0, 1.0, 1.0, 1.0]),
    *measured(PEER, "forward", [2.0, 0.5, 4.0, 0.5]),
    *measured("flash_v2", "backward", [3.0, None, 2.0, 2.0]),
    *measured(PEER, "backward", [3.0, 3.0, None, 8.0]),
    *measured("flex", "backward", [None, None, 1.0, None]),
]


def test_the_multiples_are_of_the_cells_where_both_have_a_speed_by_pass():
    forward, backward = multiples(FOUND, PEER)
    assert (forward.variant, forward.pass_name, backward.pass_name) == ("flash_v2", "forward", "backward")
    assert list(forward.values.values()) == [2.0, 0.5, 4.0, 0.5]
    assert forward.mean == pytest.approx(2**0.25) and forward.smallest == CELLS[1]
    assert backward.values == {CELLS[0]: 1.0, CELLS[3]: 4.0} and backward.mean == pytest.approx(2.0)
    assert multiples(FOUND, None) == multiples(FOUND, "standard") == []


def test_a_table_has_the_mean_the_smallest_and_of_how_many_cells():
    (table,) = multiples_tables(FOUND, GIVEN)
    assert table.headings == ["forward", "backward"]
    assert table.rows == {
        "flash_v2": [["1.189x", "smallest 0.500x", "4 cells"], ["2.000x", "smallest 1.000x", "2 of 4 cells"]]
    }
    assert multiples_tables(FOUND, replace(GIVEN, relative_to=None)) == []
    assert markdown(FOUND, GIVEN).endswith(
        f"| geometric means over head dims, masks and lengths, relative to {PEER} | forward | backward |\n"
        "|---|---:|---:|\n"
        "| `flash_v2` | 1.189x (smallest 0.500x, 4 cells) | 2.000x (smallest 1.000x, 2 of 4 cells) |\n\n"
        "(versions)\n"
    )


def test_a_pass_that_has_no_multiple_is_a_dash():
    found = [one for one in FOUND if (one.variant, one.pass_name) != ("flash_v2", "backward")]
    found += measured("standard", "backward", [1.0] * 4)
    (table,) = multiples_tables(found, GIVEN)
    assert table.rows["flash_v2"][1] == ["-"] and table.rows["standard"][0] == ["-"]


def test_the_file_says_where_the_smallest_is():
    _, backward = multiples(FOUND, PEER)
    row = as_multiples_row(backward)
    assert (row["variant"], row["pass"], row["geometric_mean"], row["smallest"]) == ("flash_v2", "backward", 2.0, 1.0)
    assert row["smallest_at"]["mask"] == "causal" and row["smallest_at"]["head_dim"] == 16
    assert (row["cells"], row["cells_measured"]) == (2, 4)
