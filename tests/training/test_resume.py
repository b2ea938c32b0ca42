"""A run that stops and resumes is the run that did not: same batches, same bits, same validations."""

import multiprocessing
import os
import random
import signal
import time

import pytest
from lightning.pytorch import Callback
from tiny_training import (
    ADAMW,
    COSINE,
    MUON,
    WSD,
    Steps,
    assert_same_weights,
    make_module,
    make_trainer,
    train_to_be_killed,
    weights,
)

from flashtrain.errors import UserError
from flashtrain.training.checkpoint import read_checkpoint

NUM_STEPS = 40


class Watch(Callback):
    """Notes the loss of every step and validation; `at_step` maps a number of steps done to an action."""

    def __init__(self, at_step=None):
        self.losses, self.validations, self.at_step = {}, {}, at_step or {}

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.losses[trainer.global_step] = outputs["loss"].item()
        self.at_step.get(trainer.global_step, lambda: None)()

    def on_validation_end(self, trainer, pl_module):
        assert trainer.global_step not in self.validations
        self.validations[trainer.global_step] = pl_module.validation_metrics["val/loss"]


def run(folder, at_step=None, ckpt=None, optimizer=ADAMW, schedule=COSINE, **changes):
    module = make_module(NUM_STEPS, micro_batch_rows=3, optimizer=optimizer, schedule=schedule)
    data, watch = Steps(NUM_STEPS), Watch(at_step)
    trainer = make_trainer(folder, NUM_STEPS, callbacks=[watch], **changes)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, data, watch, trainer


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"))


def test_a_run_takes_each_batch_once_and_validates_at_its_interval(straight):
    module, data, watch, trainer = straight
    assert data.seen == list(range(NUM_STEPS))
    assert list(watch.losses) == list(range(1, NUM_STEPS + 1)) and trainer.global_step == NUM_STEPS
    assert list(watch.validations) == [10, 20, 30, 40]
    assert watch.losses[NUM_STEPS] < 0.5 * watch.losses[1]


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([20], id="where-a-validation-was"),
        pytest.param([17], id="between-validations"),
        pytest.param([1], id="after-the-first-step"),
        pytest.param([39], id="before-the-last-step"),
        pytest.param([13, 20], id="twice"),
        pytest.param([7, 10, 11], id="three-times"),
    ],
)
def test_stopped_and_resumed_equals_straight(straight, tmp_path, stops):
    assert_resumed_equals(straight, tmp_path, stops)


@pytest.mark.parametrize("stops", [[1, 38], [7, 10, 35]], ids=str)
def test_muon_stopped_and_resumed_equals_straight(tmp_path, stops):
    choices = {"optimizer": MUON, "schedule": WSD}
    assert_resumed_equals(run(tmp_path / "straight", **choices), tmp_path, stops, **choices)


def assert_resumed_equals(straight, folder, stops, **choices):
    expected, _, expected_watch, _ = straight
    losses, validations, seen, ckpt = {}, {}, [], None
    for stop in [*stops, None]:
        at_step = {} if stop is None else {stop: send(signal.SIGTERM)}
        module, data, watch, trainer = run(folder, at_step, ckpt, **choices)
        ckpt = folder / "checkpoints" / "last.ckpt"
        assert module.stop_requested == (stop is not None)
        assert trainer.global_step == read_checkpoint(ckpt)["global_step"] == (stop or NUM_STEPS)
        assert not losses.keys() & watch.losses.keys() and not validations.keys() & watch.validations.keys()
        losses |= watch.losses
        validations |= watch.validations
        seen += [step for step in data.seen if step < trainer.global_step]  # one more was fetched at a stop
    assert seen == list(range(NUM_STEPS))
    assert losses == expected_watch.losses
    assert validations == expected_watch.validations
    assert_same_weights(weights(module), weights(expected))


def test_a_run_killed_at_any_moment_resumes_from_its_last_checkpoint(straight, tmp_path):
    def die():
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, {28: die})
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 20
    module, _, watch, _ = run(tmp_path, ckpt=tmp_path / "checkpoints" / "last.ckpt")
    assert list(watch.losses) == list(range(21, NUM_STEPS + 1)) and list(watch.validations) == [30, 40]
    assert_same_weights(weights(module), weights(straight[0]))


def test_the_best_checkpoint_is_saved_at_validation_end_and_resumes_too(straight, tmp_path):
    run(tmp_path, {25: send(signal.SIGINT)})
    best = tmp_path / "checkpoints" / "best.ckpt"
    assert read_checkpoint(best)["global_step"] == 20
    module, _, watch, _ = run(tmp_path, ckpt=best)
    assert list(watch.losses) == list(range(21, NUM_STEPS + 1)) and list(watch.validations) == [30, 40]
    assert_same_weights(weights(module), weights(straight[0]))


def test_resuming_a_finished_run_takes_no_step(tmp_path):
    module, *_ = run(tmp_path)
    again, data, watch, trainer = run(tmp_path, ckpt=tmp_path / "checkpoints" / "last.ckpt")
    assert not data.seen and not watch.losses and trainer.global_step == NUM_STEPS
    assert_same_weights(weights(again), weights(module))


def test_checkpoint_beyond_the_last_step_is_refused(tmp_path):
    run(tmp_path)
    module, trainer = make_module(30), make_trainer(tmp_path, 30)
    with pytest.raises(UserError, match="last.ckpt is at step 40, beyond the 30 steps of this run; start a new run$"):
        trainer.fit(module, datamodule=Steps(30), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")


def test_the_last_step_is_validated_and_saved_whatever_the_intervals(tmp_path):
    _, _, watch, _ = run(tmp_path, validate_every=15, checkpoint_every=1000)
    assert list(watch.validations) == [15, 30, 40]
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == NUM_STEPS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_handlers_are_given_back(tmp_path, number):
    before = signal.getsignal(number)
    run(tmp_path, {3: send(number)})
    assert signal.getsignal(number) == before


class At(Callback):
    """Does `action` in the hook of that name."""

    def __init__(self, hook, action):
        setattr(self, hook, lambda *_, **__: action())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed(straight, tmp_path, number, hook):
    before = signal.getsignal(number)
    ckpt = tmp_path / "checkpoints" / "last.ckpt"
    module, trainer = make_module(NUM_STEPS), make_trainer(tmp_path, NUM_STEPS)
    trainer.callbacks.append(At(hook, send(number)))
    trainer.fit(module, datamodule=Steps(NUM_STEPS))
    assert trainer.global_step == read_checkpoint(ckpt)["global_step"] == 0
    assert signal.getsignal(number) == before
    module, data, watch, _ = run(tmp_path, ckpt=ckpt)
    expected, expected_data, expected_watch, _ = straight
    assert data.seen == expected_data.seen
    assert watch.losses == expected_watch.losses and watch.validations == expected_watch.validations
    assert_same_weights(weights(module), weights(expected))


def test_handlers_are_given_back_when_setting_up_fails(tmp_path):
    def fail():
        raise ValueError("no data")

    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, NUM_STEPS)
    trainer.callbacks.append(At("on_train_start", fail))
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_interrupt_ends_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        run(tmp_path, {3: lambda: [send(signal.SIGINT)() for _ in range(2)]})
    assert not (tmp_path / "checkpoints").exists()
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def process():
    """process(*arguments of train_to_be_killed) -> a started process, forked from one that has all imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "flashtrain.training.module", "flashtrain.training.trainer"])

    def start(*arguments):
        started = context.Process(target=train_to_be_killed, args=arguments)
        started.start()
        return started

    return start


def noted(folder):
    """The step and the loss, in hexadecimal, of each whole line."""
    lines = (folder / "notes").read_text().splitlines(keepends=True) if (folder / "notes").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")]


KILLED_STEPS = 40


@pytest.fixture(scope="module")
def unkilled(process, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unkilled")
    whole = process(folder, KILLED_STEPS, None, 0)
    whole.join()
    assert whole.exitcode == 0
    return folder


def assert_whole_after_a_kill(folder, expected):
    """Every checkpoint can be read, the newest is of the last step noted or the one before, and losses are right."""
    steps = {path.name: read_checkpoint(path)["global_step"] for path in (folder / "checkpoints").glob("*.ckpt")}
    notes = noted(folder)
    if notes:
        done = notes[-1][0]
        assert max(steps.values(), default=0) in (done - 1, done)
    assert set(notes) <= set(expected)


def assert_ended_as(folder, unkilled):
    first, last = (read_checkpoint(path / "checkpoints" / "last.ckpt") for path in (unkilled, folder))
    assert last["global_step"] == first["global_step"]
    assert_same_weights(last["state_dict"], first["state_dict"])
    assert set(noted(folder)) == set(noted(unkilled))


def test_kill_9_within_a_save_loses_no_more_than_the_steps_since_the_one_before(process, unkilled, tmp_path):
    moments = {"torch.save": 4, "os.fsync": 6, "os.replace": 5, "os.link": 3, "os.unlink": 5}
    for function, calls in moments.items():
        killed = process(tmp_path, KILLED_STEPS, function, calls)
        killed.join()
        assert killed.exitcode == -signal.SIGKILL, function
        assert_whole_after_a_kill(tmp_path, noted(unkilled))
    process(tmp_path, KILLED_STEPS, None, 0).join()
    assert_ended_as(tmp_path, unkilled)


def test_kill_9_at_any_moment_leaves_a_run_that_resumes(process, unkilled, tmp_path):
    moments = random.Random(0)
    for _ in range(8):
        before = len(noted(tmp_path))
        killed = process(tmp_path, KILLED_STEPS, None, 0)
        while len(noted(tmp_path)) == before and killed.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        killed.kill()
        killed.join()
        assert_whole_after_a_kill(tmp_path, noted(unkilled))
    process(tmp_path, KILLED_STEPS, None, 0).join()
    assert_ended_as(tmp_path, unkilled)
