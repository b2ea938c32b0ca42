"""A trace of chosen steps, and what the meter is told of it and of waiting for data."""

import gzip
import json
import re

import pytest
from commands import SMALL, run_command
from lightning.pytorch import Callback
from tiny_training import Steps, StopAt, make_module, make_trainer

from flashtrain.training.meter import SpeedMeter
from flashtrain.training.profiler import TraceSteps

NUM_STEPS = 12


def run(folder, trace, edit=lambda step, batch: batch, ckpt=None, last=None, **changes):
    trainer = make_trainer(folder, NUM_STEPS, trace=trace, **changes)
    trainer.callbacks += [] if last is None else [last]
    trainer.fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS, edit), ckpt_path=ckpt)


def traces(folder):
    """Name of each trace -> the steps in it; each has the operators of its steps."""
    found = {}
    for path in folder.glob("*"):
        with gzip.open(path, "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        steps = {int(name.removeprefix("step ")) for name in names if re.fullmatch(r"step \d+", name)}
        found[path.name] = sorted(steps)
        assert names.count("aten::embedding_dense_backward") == len(found[path.name])
    return found


def test_a_trace_of_the_steps_asked_for(tmp_path):
    run(tmp_path, TraceSteps(5, 7, tmp_path / "logs", SpeedMeter(1)))
    assert traces(tmp_path / "logs") == {"trace_steps_5-7.json.gz": [5, 6, 7]}


def test_the_meter_leaves_profiled_steps_out(tmp_path):
    class Time(Callback):
        now = 0.0

        def __call__(self):
            return self.now

        def on_train_batch_start(self, trainer, *_):
            self.now += 100 if 5 <= trainer.global_step + 1 <= 7 else 1

    clock = Time()
    meter = SpeedMeter(1000, clock)
    run(tmp_path, TraceSteps(5, 7, tmp_path, meter), callbacks=[clock], meter=meter, log_every=1)
    assert meter.average() == 1000


def test_a_stopped_run_traces_the_steps_it_took_and_a_resumed_one_the_rest(tmp_path, caplog):
    def trace():
        return TraceSteps(5, 7, tmp_path / "logs", SpeedMeter(1))

    run(tmp_path, trace(), callbacks=[StopAt(6)])
    assert traces(tmp_path / "logs") == {"trace_steps_5-6.json.gz": [5, 6]}
    last = tmp_path / "checkpoints" / "last.ckpt"
    run(tmp_path, trace(), callbacks=[StopAt(8)], ckpt=last)
    assert traces(tmp_path / "logs").keys() == {"trace_steps_5-6.json.gz", "trace_steps_7-7.json.gz"}
    with caplog.at_level("INFO", "flashtrain"):
        run(tmp_path, trace(), ckpt=last)
    assert "steps 5 to 7 are not profiled: 8 are done" in caplog.text


def test_a_run_stopped_just_before_its_profiled_steps_leaves_none(tmp_path):
    run(tmp_path, TraceSteps(5, 7, tmp_path / "logs", SpeedMeter(1)), callbacks=[StopAt(4)])
    assert not (tmp_path / "logs").exists()


def test_a_stop_while_the_checkpoint_before_the_profiled_steps_is_written_leaves_none(tmp_path):
    class Stop(Callback):
        """Comes after the trace, as the writer of checkpoints does."""

        def on_train_batch_start(self, trainer, pl_module, *_):
            pl_module.stop_requested = trainer.global_step == 4

    run(tmp_path, TraceSteps(5, 7, tmp_path / "logs", SpeedMeter(1)), last=Stop())
    assert not (tmp_path / "logs").exists()


def test_a_failure_within_a_trace_ends_the_profiler(tmp_path):
    def fail(step, batch):
        if step == 5:
            raise ValueError("no data")
        return batch

    with pytest.raises(ValueError, match="no data"):
        run(tmp_path / "failed", TraceSteps(5, 7, tmp_path / "logs", SpeedMeter(1)), edit=fail)
    assert not (tmp_path / "logs").exists()
    run(tmp_path / "next", TraceSteps(2, 2, tmp_path / "logs", SpeedMeter(1)))
    assert traces(tmp_path / "logs") == {"trace_steps_2-2.json.gz": [2]}


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train("key=value", ...) trains 4 steps into `run`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"line {i} of the only file\n" for i in range(300)))
    return lambda *overrides: run_command("python train.py data=text data.path=book.txt output=run", *SMALL, *overrides)


def test_the_switch_leaves_a_trace_among_the_logs_and_says_where(train, tmp_path, capsys):
    train("trainer.profile_steps=[2,3]")
    assert "run/logs/trace_steps_2-3.json.gz" in capsys.readouterr().out
    assert (tmp_path / "run/logs/trace_steps_2-3.json.gz").exists()


@pytest.mark.parametrize("steps", ["[3,2]", "[0,2]", "[2,5]", "[2]", "[]", "[1,2,3]"])
def test_a_range_that_no_step_of_the_run_is_in_is_refused(train, tmp_path, steps):
    with pytest.raises(SystemExit) as stop:
        train(f"trainer.profile_steps={steps}")
    given = steps.replace(",", ", ")
    assert stop.value.code == (
        f"error: trainer.profile_steps is {given}; give the first and the last step to profile, as in "
        "trainer.profile_steps=[2,4], counted from 1 and none beyond train.steps=4"
    )
    assert not (tmp_path / "run").exists()
