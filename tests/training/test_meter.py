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
    assert meter.lap(10) == (8 * 1000 / 4, 0)


def test_time_between_pause_and_resume_is_left_out(clock):
    meter = SpeedMeter(1000, clock)
    meter.lap(0)
    clock.now += 1
    for _ in range(2):  # a validation and a checkpoint
        meter.pause()
        clock.now += 30
        meter.resume()
    clock.now += 1
    assert meter.lap(4).tokens_per_second == 4 * 1000 / 2
    clock.now += 2
    assert meter.lap(8).tokens_per_second == 4 * 1000 / 2


def test_a_pause_before_the_first_lap_does_not_count_later(clock):
    meter = SpeedMeter(1000, clock)
    meter.pause()
    clock.now += 30
    meter.resume()
    meter.lap(1)
    clock.now += 1
    assert meter.lap(2).tokens_per_second == 1000


def wait_for_a_batch(meter, clock, seconds):
    meter.start_waiting()
    clock.now += seconds
    meter.stop_waiting()


def test_data_wait_is_the_share_of_the_time_that_is_not_left_out(clock):
    meter = SpeedMeter(1000, clock)
    wait_for_a_batch(meter, clock, 50)  # the first batch, before the first lap
    meter.lap(0)
    for _ in range(2):
        wait_for_a_batch(meter, clock, 0.5)
        clock.now += 1.5
    meter.pause()
    clock.now += 30
    meter.resume()
    assert meter.lap(2) == (2 * 1000 / 4, 0.25)
    clock.now += 2
    assert meter.lap(3) == (1000 / 2, 0)


def test_a_restart_leaves_out_what_was_since_the_last_lap(clock):
    meter = SpeedMeter(1000, clock)
    meter.lap(0)
    clock.now += 1
    meter.lap(1)
    wait_for_a_batch(meter, clock, 100)  # a profiled step
    meter.restart()
    assert meter.lap(2) is None
    clock.now += 1
    assert meter.lap(3) == (1000, 0)
    assert meter.average() == 1000


class Gpu:
    """Steps take the host 1 second to queue and the device `seconds` to do; the host is a step ahead at most."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.done, self.done_before = clock.now, clock.now

    def step(self):
        start = self.clock.now
        self.clock.now += 1
        self.done_before, self.done = self.done, max(start, self.done) + self.seconds
        self.clock.now = max(self.clock.now, self.done_before)

    def finish(self):
        self.clock.now = max(self.clock.now, self.done)


@pytest.mark.parametrize("seconds", [0.5, 4], ids="{} s on the device".format)
def test_laps_without_waiting_for_the_device_tell_its_speed(clock, seconds):
    gpu, meter = Gpu(clock, seconds), SpeedMeter(1000, clock)
    speeds = []
    for step in range(1, 41):
        gpu.step()
        if step == 2:
            meter.lap(step)
        elif step % 5 == 0:
            speeds.append(meter.lap(step).tokens_per_second)
        if step in (15, 22):  # a validation at a lap, a checkpoint between laps
            gpu.finish()
            meter.pause()
            clock.now += 30
            meter.resume()
    assert speeds == [1000 / max(seconds, 1)] * 8


def test_average_and_time_left_are_over_all_laps(clock):
    meter = SpeedMeter(1000, clock)
    meter.lap(0)
    for step, seconds in ((4, 1), (8, 3)):
        clock.now += seconds
        meter.lap(step)
    assert meter.average() == 8 * 1000 / 4
    assert meter.seconds_for(100) == 50
