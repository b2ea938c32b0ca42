import pytest

from flashtrain.training.meter import SpeedMeter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_first_lap_only_starts_the_clock(clock):
    meter = SpeedMeter(1000, clock)
    clock.now += 60  # compilation
    assert meter.lap(2) is None and meter.average() is None and meter.seconds_for(10) is None
    clock.now += 4
    assert meter.lap(10) == 8 * 1000 / 4


def test_time_between_pause_and_resume_is_left_out(clock):
    meter = SpeedMeter(1000, clock)
    meter.lap(0)
    clock.now += 1
    for _ in range(2):  # a validation and a checkpoint
        meter.pause()
        clock.now += 30
        meter.resume()
    clock.now += 1
    assert meter.lap(4) == 4 * 1000 / 2
    clock.now += 2
    assert meter.lap(8) == 4 * 1000 / 2


def test_a_pause_before_the_first_lap_does_not_count_later(clock):
    meter = SpeedMeter(1000, clock)
    meter.pause()
    clock.now += 30
    meter.resume()
    meter.lap(1)
    clock.now += 1
    assert meter.lap(2) == 1000


def test_average_and_time_left_are_over_all_laps(clock):
    meter = SpeedMeter(1000, clock)
    meter.lap(0)
    for step, seconds in ((4, 1), (8, 3)):
        clock.now += seconds
        meter.lap(step)
    assert meter.average() == 8 * 1000 / 4
    assert meter.seconds_for(100) == 50
