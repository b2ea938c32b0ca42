import math
from dataclasses import replace

import pytest

from flashtrain.training.schedule import ConstantOptions, CosineOptions, WsdOptions, learning_rate_factor


def constant(warmup):
    return ConstantOptions(name="constant", warmup_fraction=warmup)


def cosine(warmup, final):
    return CosineOptions(name="cosine", warmup_fraction=warmup, final_fraction=final)


def wsd(warmup, decay, final, shape="linear"):
    return WsdOptions("wsd", warmup, decay_fraction=decay, decay_shape=shape, final_fraction=final)


def factors(num_steps, options):
    return [learning_rate_factor(step, num_steps, options) for step in range(num_steps)]


@pytest.mark.parametrize(
    "options", [constant(0.1), cosine(0.1, 0.2), wsd(0.1, 0.3, 0.2), wsd(0.1, 0.9, 0.0, "1-sqrt")], ids=str
)
def test_warms_up_linearly_without_a_step_at_zero(options):
    values = factors(100, options)
    assert values[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert values[9] == 1.0 and max(values) == 1.0


def test_a_cosine_falls_to_the_final_fraction():
    values = factors(100, cosine(0.1, 0.2))
    assert all(later < earlier for earlier, later in zip(values[9:], values[10:], strict=False))
    assert values[54] == pytest.approx(0.6)  # half way down: between 1 and 0.2
    assert values[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("shape", "at_a_quarter"), [("linear", 0.2 + 0.8 * 0.75), ("1-sqrt", 0.2 + 0.8 * (1 - math.sqrt(0.25)))]
)
def test_wsd_stays_at_the_peak_and_falls_in_its_last_part(shape, at_a_quarter):
    values = factors(100, wsd(0.1, 0.2, 0.2, shape))
    assert values[9:80] == 71 * [1.0]
    assert all(later < earlier for earlier, later in zip(values[79:], values[80:], strict=False))
    assert values[84] == pytest.approx(at_a_quarter)
    assert values[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("num_steps", "options", "expected"),
    [
        pytest.param(4, constant(0.5), [0.5, 1, 1, 1], id="constant"),
        pytest.param(3, constant(0.0), [1, 1, 1], id="constant-without-warm-up"),
        pytest.param(2, constant(1.0), [0.5, 1], id="constant-all-warm-up"),
        pytest.param(4, cosine(0.0, 1.0), [1, 1, 1, 1], id="cosine-to-the-peak"),
        pytest.param(4, cosine(1.0, 0.1), [0.25, 0.5, 0.75, 1], id="cosine-all-warm-up"),
        pytest.param(1, cosine(0.05, 0.1), [0.1], id="cosine-one-step"),
        pytest.param(2, cosine(0.0, 0.0), [0.5, 0.0], id="cosine-to-zero"),
        pytest.param(5, wsd(0.4, 0.6, 0.1), [0.5, 1, 0.7, 0.4, 0.1], id="wsd-without-stable-part"),
        pytest.param(5, wsd(0.3, 0.7, 0.1), [0.5, 1, 0.7, 0.4, 0.1], id="wsd-both-shares-rounded-up"),
        pytest.param(4, wsd(0.0, 1.0, 0.0), [0.75, 0.5, 0.25, 0], id="wsd-all-decay"),
        pytest.param(2, wsd(1.0, 0.0, 0.0), [0.5, 1], id="wsd-all-warm-up"),
        pytest.param(3, wsd(0.0, 0.0, 0.5), [1, 1, 1], id="wsd-all-stable"),
        pytest.param(1, wsd(0.05, 0.6, 0.1), [0.1], id="wsd-one-step"),
    ],
)
def test_corners(num_steps, options, expected):
    assert factors(num_steps, options) == pytest.approx(expected)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize(
    ("good", "name"),
    [
        (constant(0.1), "warmup_fraction"),
        (cosine(0.1, 0.1), "warmup_fraction"),
        (cosine(0.1, 0.1), "final_fraction"),
        (wsd(0.1, 0.1, 0.1), "warmup_fraction"),
        (wsd(0.1, 0.1, 0.1), "decay_fraction"),
        (wsd(0.1, 0.1, 0.1), "final_fraction"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_fraction_outside_0_to_1_is_named(good, name, value):
    assert good.validate() == []
    assert replace(good, **{name: value}).validate() == [
        f"schedule.{name}={value} is not a fraction; give a number from 0 to 1"
    ]


def test_a_decay_that_starts_in_the_warm_up_is_refused():
    assert wsd(0.25, 0.75, 0.1).validate() == []
    assert wsd(0.3, 0.8, 0.1).validate() == [
        "schedule.warmup_fraction=0.3 and schedule.decay_fraction=0.8 are more than the whole run; lower one of them"
    ]


def test_an_unknown_shape_is_refused():
    assert wsd(0.1, 0.1, 0.1, shape="step").validate() == ["schedule.decay_shape=step is not one of linear, 1-sqrt"]
