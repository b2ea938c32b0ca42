import math

import pytest

from flashtrain.training.schedule import ScheduleOptions, learning_rate_factor


def factors(num_steps, warmup, final):
    options = ScheduleOptions(warmup_fraction=warmup, final_fraction=final)
    return [learning_rate_factor(step, num_steps, options) for step in range(num_steps)]


def test_warms_up_linearly_without_a_step_at_zero_then_falls_to_the_final_fraction():
    values = factors(100, warmup=0.1, final=0.2)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[9] == 1.0 and max(values) == 1.0
    assert all(later < earlier for earlier, later in zip(values[9:], values[10:], strict=False))
    assert values[54] == pytest.approx(0.6)  # half way down: between 1 and 0.2
    assert values[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("num_steps", "warmup", "final", "expected"),
    [
        pytest.param(4, 0.0, 1.0, [1, 1, 1, 1], id="constant"),
        pytest.param(4, 1.0, 0.1, [0.25, 0.5, 0.75, 1], id="all-warm-up"),
        pytest.param(1, 0.05, 0.1, [0.1], id="one-step"),
        pytest.param(2, 0.0, 0.0, [0.5, 0.0], id="to-zero"),
    ],
)
def test_corners(num_steps, warmup, final, expected):
    assert factors(num_steps, warmup, final) == pytest.approx(expected)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("name", ["warmup_fraction", "final_fraction"])
def test_a_fraction_outside_0_to_1_is_named(name, value):
    options = ScheduleOptions(**{"warmup_fraction": 0.1, "final_fraction": 0.1, name: value})
    assert options.validate() == [f"schedule.{name}={value} is not a fraction; give a number from 0 to 1"]
