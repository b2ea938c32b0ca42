"""Systems by turns: what they are timed as, who has no speed, and that compiled ones stay so."""

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Unsupported
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.training_steps import Steps, measure


@dataclass
class Told:
    """A system whose rounds take what it is told, and are noted in `log`."""

    name: str
    seconds: list[float]
    log: list[str]
    tokens: int = 100
    flops_per_token: float | None = None
    predicted_bytes: int | None = None

    def take_round(self):
        self.log.append(self.name)
        return self.seconds.pop(0)


def raising(error):
    def build(*_):
        raise error

    return build


def measured(builders, rounds=3, device_type="cpu"):
    return measure(builders, device_type=device_type, rounds=rounds, seed=0)


def test_a_speed_is_of_the_median_round():
    log = []
    builders = {
        "A": lambda: Told("A", [2.0, 1.0, 4.0], log, flops_per_token=7.0),
        "B": lambda: Told("B", [1.0] * 3, log),
    }
    found = measured(builders)
    assert list(found) == ["A", "B"] and sorted(log) == ["A"] * 3 + ["B"] * 3
    assert found["A"].tokens_per_second == 50.0 and found["A"].timing.seconds == (2.0, 1.0, 4.0)
    assert found["A"].flops == 350.0 and found["B"].flops is None
    assert found["A"].peak_bytes is None


def test_all_are_built_before_any_takes_a_step():
    log = []

    def build(name):
        log.append(f"build {name}")
        return Told(name, [1.0], log)

    measured({name: lambda name=name: build(name) for name in "AB"}, rounds=1)
    assert log[:2] == ["build A", "build B"]


def test_a_round_is_untimed_steps_and_the_mean_of_the_timed(monkeypatch):
    clock, taken = [0.0], []

    def step():
        taken.append(clock[0])
        clock[0] += 10.0 if len(taken) <= 2 else 1.0

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert Steps(step, 100, "cpu", untimed=2, timed=4).take_round() == 1.0
    assert len(taken) == 6


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3 GiB is free."
)


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (OUT_OF_MEMORY, NoSpeed("failed: out of memory, 16.00 GiB asked for")),
        (torch.OutOfMemoryError("no more"), NoSpeed("failed: out of memory")),
        (ValueError("odd\nand more"), NoSpeed("failed: ValueError: odd")),
        (Unsupported("attention: bad takes no rows; A would do"), NoSpeed("refused", "takes no rows; A would do")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_that_cannot_be_built_has_the_reason_and_the_others_a_speed(error, result):
    found = measured({"bad": raising(error), "A": lambda: Told("A", [1.0] * 3, [])})
    assert found["bad"] == result and found["A"].tokens_per_second == 100.0 and list(found) == ["bad", "A"]


@pytest.mark.parametrize("good_rounds", [0, 1])
def test_one_that_raises_in_a_round_has_the_reason_and_the_others_a_speed(good_rounds):
    @dataclass
    class Short(Told):
        def take_round(self):
            if not self.seconds:
                raise OUT_OF_MEMORY
            return super().take_round()

    log = []
    found = measured({"bad": lambda: Short("bad", [1.0] * good_rounds, log), "A": lambda: Told("A", [1.0] * 3, log)})
    assert found["bad"] == NoSpeed("failed: out of memory, 16.00 GiB asked for")
    assert found["A"].tokens_per_second == 100.0 and log.count("bad") == good_rounds


def test_a_mistake_of_the_user_is_none_of_a_system():
    with pytest.raises(UserError, match="there is no such tokenizer"):
        measured({"A": raising(UserError("there is no such tokenizer"))})


def test_an_interruption_ends_all():
    @dataclass
    class Interrupted(Told):
        def take_round(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured({"A": lambda: Interrupted("A", [], [])})


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def test_each_of_many_systems_is_compiled_once():
    """Though all are of one code, and one resets torch.compile when it is built."""
    systems = torch._dynamo.config.recompile_limit + 3

    def build(factor):
        torch.compiler.reset()
        model = Scaled(factor)
        model.compile(backend="eager")
        return Steps(lambda: model(torch.ones(3)), 3, "cpu", untimed=1, timed=1)

    counters.clear()
    found = measured({str(factor): lambda factor=factor: build(factor) for factor in range(systems)}, rounds=4)
    assert all(isinstance(one.tokens_per_second, float) for one in found.values())
    assert counters["stats"]["unique_graphs"] == counters["frames"]["total"] == systems


@pytest.mark.gpu
def test_a_peak_is_of_the_tensors_of_its_own_system():
    mib = 2**20

    def build(held, added):
        kept = torch.empty(held * mib, dtype=torch.int8, device="cuda")

        def step():
            assert torch.empty(added * mib, dtype=torch.int8, device="cuda").numel() and kept.numel()

        return Steps(step, 1, "cuda", untimed=0, timed=1)

    builders = {"A": lambda: build(64, 256), "B": lambda: build(512, 32), "bad": lambda: build(128, 10**7)}
    gc.collect()  # what an earlier test left
    before = torch.cuda.memory_allocated()
    found = measured(builders, rounds=2, device_type="cuda")
    assert (found["A"].peak_bytes, found["B"].peak_bytes) == (320 * mib, 544 * mib)
    assert found["bad"].word.startswith("failed: out of memory, ")
    assert torch.cuda.memory_allocated() == before
