from collections import Counter

import pytest
import torch

from flashtrain.performance.timing import CudaClock, HostClock, Timing, interleaved


class Device:
    """A device whose calls take the seconds they are told, and a clock that reads it; all is written down."""

    def __init__(self):
        self.now, self.log, self.asked = 0.0, [], False

    def stage(self, name, *seconds):
        """Preparation takes an hour; calls take the given seconds in turn, the last for ever."""
        left = list(seconds)

        def call():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        def prepare():
            self.now += 3600
            return call

        return prepare

    def read(self, call):
        assert not self.asked, "asked for a reading before the last was taken"
        start = self.now
        call()
        seconds = self.now - start

        def ask():
            self.asked = True
            return seconds

        return ask


def test_every_round_reads_every_call_once_in_an_order_of_its_own():
    device = Device()
    stages = {name: device.stage(name, 1) for name in "ABC"}
    timings = interleaved(stages, device, warmup=0, rounds=40, seed=0)
    rounds = ["".join(device.log[start : start + 3]) for start in range(0, 120, 3)]
    assert all(sorted(order) == ["A", "B", "C"] for order in rounds)
    assert len(Counter(rounds)) == 6
    assert all(len(timing.seconds) == 40 for timing in timings.values())


def test_the_seed_makes_the_order():
    logs = []
    for seed in (0, 0, 1):
        device = Device()
        interleaved({name: device.stage(name, 1) for name in "ABC"}, device, warmup=1, rounds=20, seed=seed)
        logs.append(device.log)
    assert logs[0] == logs[1] != logs[2]


def test_neither_warm_up_nor_preparation_is_in_a_reading():
    device = Device()
    stages = {"slow at first": device.stage("slow at first", 9, 9, 2, 4, 3), "B": device.stage("B", 1)}
    timings = interleaved(stages, device, warmup=2, rounds=3, seed=0)
    assert device.log[:4] == ["slow at first", "B"] * 2
    assert timings["slow at first"].seconds == (2, 4, 3)
    assert timings["slow at first"].median == 3


def test_median_and_quartiles_leave_an_outlier_out():
    timing = Timing((5.0, 1.0, 3.0, 2.0, 900.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 5.0)
    assert timing.spread == pytest.approx(2 / 3)


def test_nothing_keeps_a_call_while_the_next_is_prepared():
    alive = []

    def stage():
        assert not alive

        class Call:
            def __init__(self):
                alive.append(1)

            def __del__(self):
                alive.pop()

            def __call__(self):
                pass

        return Call()

    interleaved({"A": stage, "B": stage}, HostClock(), warmup=1, rounds=3, seed=0)


def test_no_calls_have_no_timings():
    assert interleaved({}, HostClock(), warmup=1, rounds=3, seed=0) == {}


@pytest.mark.parametrize("good_calls", [0, 1, 2, 4], ids=lambda count: f"after {count}")
def test_a_call_that_raises_is_told_of_and_the_others_go_on(good_calls):
    """In warm-up, or in a timed round."""
    device, left, told = Device(), [None] * good_calls, []

    def short_lived():
        left.pop()

    stages = {"A": device.stage("A", 1), "B": lambda: short_lived, "C": device.stage("C", 2)}
    timings = interleaved(
        stages, device, warmup=2, rounds=4, seed=0, on_error=lambda name, error: told.append((name, type(error)))
    )
    assert told == [("B", IndexError)]
    assert timings == {"A": Timing((1,) * 4), "C": Timing((2,) * 4)}


def test_preparation_and_readings_that_raise_are_told_of_too():
    class Late(Device):
        def read(self, call):
            asked = super().read(call)
            return asked if device.log[-1] != "late" else lambda: 1 / 0

    device, told = Late(), {}
    stages = {"late": device.stage("late", 1), "unprepared": lambda: [][0], "A": device.stage("A", 1)}
    timings = interleaved(stages, device, warmup=0, rounds=2, seed=0, on_error=told.__setitem__)
    assert {name: type(error) for name, error in told.items()} == {"late": ZeroDivisionError, "unprepared": IndexError}
    assert list(timings) == ["A"]


def test_errors_are_raised_unless_somebody_is_told():
    with pytest.raises(ZeroDivisionError):
        interleaved({"A": lambda: lambda: 1 / 0}, Device(), warmup=0, rounds=1, seed=0)


def test_an_interruption_ends_all():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleaved({"A": interrupted}, Device(), warmup=1, rounds=1, seed=0, on_error=lambda *told: None)


def test_the_host_clock_reads_wall_time(monkeypatch):
    ticks = iter((10.0, 10.25))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    assert HostClock().read(lambda: None)() == 0.25


@pytest.mark.gpu
def test_the_cuda_clock_reads_the_device_and_not_the_host():
    clock = CudaClock()
    cycles = 10_000_000
    readings = [clock.read(lambda: torch.cuda._sleep(cycles)) for _ in range(3)]
    nothing = [clock.read(lambda: None) for _ in range(3)]
    assert min(reading() for reading in readings) > 1e-3 > max(reading() for reading in nothing)
