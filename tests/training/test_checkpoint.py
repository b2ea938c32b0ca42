"""A checkpoint is whole or absent, reading one runs no code, and each bad file has its sentence."""

import errno
import os
import pickle
import resource

import pytest
import torch
from tiny_training import Steps, TinyModel, assert_same_weights, make_module, make_trainer, weights

from flashtrain.errors import UserError
from flashtrain.training.checkpoint import (
    AtomicCheckpointIO,
    load_weights,
    milestones,
    newest_checkpoint,
    read_checkpoint,
    step_to_resume,
)
from flashtrain.training.meter import SpeedMeter

NUM_STEPS = 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    module = make_module(NUM_STEPS)
    make_trainer(folder, NUM_STEPS).fit(module, datamodule=Steps(NUM_STEPS))
    return module, folder / "checkpoints" / "last.ckpt"


def test_last_and_best_are_all_that_a_run_leaves(trained):
    _, path = trained
    assert sorted(file.name for file in path.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_weights_load_into_a_bare_model(trained):
    module, path = trained
    torch.manual_seed(1)
    model = TinyModel()
    assert load_weights(model, path) == NUM_STEPS
    assert_same_weights(dict(model.state_dict()), weights(module))


def resume(path, width=16):
    module = make_module(NUM_STEPS, width=width)
    make_trainer(path.parent, NUM_STEPS).fit(module, datamodule=Steps(NUM_STEPS), ckpt_path=path)


@pytest.mark.parametrize("read", [read_checkpoint, resume], ids=["read", "resume"])
def test_missing_file(tmp_path, read):
    with pytest.raises(UserError, match="there is no checkpoint .*gone.ckpt"):
        read(tmp_path / "gone.ckpt")


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


def cut(trained_path, path):
    path.write_bytes(trained_path.read_bytes()[:-1000])


def empty(trained_path, path):
    path.touch()


def text(trained_path, path):
    path.write_text("not a checkpoint")


def folder(trained_path, path):
    path.mkdir()


def code(trained_path, path):
    path.write_bytes(pickle.dumps(Code()))


def other_content(trained_path, path):
    torch.save({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("read", [read_checkpoint, resume], ids=["read", "resume"])
@pytest.mark.parametrize("spoil", [cut, empty, text, folder, code, other_content], ids=lambda f: f.__name__)
def test_file_that_is_no_checkpoint(trained, tmp_path, monkeypatch, spoil, read):
    monkeypatch.chdir(tmp_path)
    spoil(trained[1], tmp_path / "bad.ckpt")
    with pytest.raises(UserError, match=r"bad.ckpt is truncated or not a checkpoint of a training run; "):
        read(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_checkpoint_of_another_model(trained):
    _, path = trained
    sentence = r"last.ckpt is of another model: embedding.weight is \(32, 16\) there and \(32, 24\) here; "
    with pytest.raises(UserError, match=sentence):
        resume(path, width=24)
    with pytest.raises(UserError, match=sentence):
        load_weights(TinyModel(24), path)
    model = TinyModel()
    model.mix.bias = None
    with pytest.raises(UserError, match=r"mix.bias is \(16,\) there and missing here"):
        load_weights(model, path)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path, io = tmp_path / "last.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*last.ckpt \(.+\); the one before it is whole"):
            io.save_checkpoint({"step": 2, "weights": torch.zeros(1_000_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_ends_training_in_one_sentence(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = rf"\(No space left on device\); make room and start again there, with output={tmp_path} resume=auto"
    with pytest.raises(UserError, match=said):
        make_trainer(tmp_path, NUM_STEPS).fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_checkpoints_take_of_the_disk_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="flashtrain")
    make_trainer(tmp_path, NUM_STEPS, checkpoint_every=2, keep_last=3).fit(make_module(NUM_STEPS), Steps(NUM_STEPS))
    size = (tmp_path / "checkpoints" / "last.ckpt").stat().st_size / 2**20
    assert caplog.messages == [f"checkpoints: {size:.1f} MiB each, at most 5"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 5


def names_and_steps(folder):
    return {path.name: read_checkpoint(path)["global_step"] for path in folder.iterdir()}


def train_keeping(folder, count, num_steps=NUM_STEPS, ckpt=None):
    trainer = make_trainer(folder, num_steps, checkpoint_every=2, keep_last=count, validate_every=100)
    trainer.fit(make_module(num_steps), datamodule=Steps(num_steps), ckpt_path=ckpt)
    return folder / "checkpoints"


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "copied"])
def test_the_last_states_are_kept_by_step(tmp_path, monkeypatch, linked):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as exFAT does

    if not linked:
        monkeypatch.setattr(os, "link", refuse)
    folder = train_keeping(tmp_path, 3)
    expected = {"step-6.ckpt": 6, "step-8.ckpt": 8, "step-10.ckpt": 10, "last.ckpt": 10, "best.ckpt": 10}
    assert names_and_steps(folder) == expected
    assert (folder / "last.ckpt").samefile(folder / "step-10.ckpt") == linked


def test_to_go_back_leaves_the_steps_beyond(tmp_path):
    folder = train_keeping(tmp_path, 5)
    train_keeping(tmp_path, 2, num_steps=5, ckpt=folder / "step-4.ckpt")
    assert names_and_steps(folder) == {"step-4.ckpt": 4, "step-5.ckpt": 5, "last.ckpt": 5, "best.ckpt": 5}


def test_an_older_state_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    replace = os.replace

    def full_at_step_6(partial, path):
        if path.name == "step-6.ckpt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(partial, path)

    monkeypatch.setattr(os, "replace", full_at_step_6)
    with pytest.raises(UserError, match=r"cannot write .*step-6.ckpt \(No space left on device\); the one before it"):
        train_keeping(tmp_path, 1)
    assert names_and_steps(tmp_path / "checkpoints") == {"step-4.ckpt": 4, "last.ckpt": 6}


def train_with_milestones(folder, **changes):
    settings = {"checkpoint_every": 3, "keep_last": 5, "validate_every": 100, "milestone_every": 3} | changes
    make_trainer(folder, 9, **settings).fit(make_module(9), datamodule=Steps(9))
    return folder / "checkpoints"


def test_milestones_have_the_weights_of_their_steps_and_nothing_to_resume(tmp_path):
    folder = train_with_milestones(tmp_path)
    kept = milestones(folder)
    assert list(kept) == [3, 6, 9]
    for step, path in kept.items():
        whole, weights_alone = read_checkpoint(folder / f"step-{step}.ckpt"), read_checkpoint(path)
        assert not {"optimizer_states", "callbacks"} & weights_alone.keys()
        assert path.stat().st_size < 0.6 * (folder / f"step-{step}.ckpt").stat().st_size
        assert weights_alone["global_step"] == step == load_weights(TinyModel(), path)
        assert_same_weights(weights_alone["state_dict"], whole["state_dict"])
        assert step_to_resume(folder / f"step-{step}.ckpt") == step
        with pytest.raises(UserError, match=rf"milestone-{step}.ckpt has weights alone, .*; resume the folder"):
            step_to_resume(path)


def test_milestones_stay_and_say_once_what_they_take(tmp_path, caplog):
    caplog.set_level("INFO", logger="flashtrain")
    folder = train_with_milestones(tmp_path, keep_last=0)
    assert names_and_steps(folder) == {
        "milestone-3.ckpt": 3, "milestone-6.ckpt": 6, "milestone-9.ckpt": 9, "last.ckpt": 9, "best.ckpt": 9,
    }  # fmt: skip
    size = (folder / "milestone-9.ckpt").stat().st_size / 2**20
    assert [line for line in caplog.messages if line.startswith("milestones")] == [
        f"milestones: {size:.1f} MiB each, one every 3 steps"
    ]


def test_to_go_back_leaves_the_milestones_beyond(tmp_path):
    folder = train_with_milestones(tmp_path)
    trainer = make_trainer(tmp_path, 5, checkpoint_every=5, keep_last=0, validate_every=100)
    trainer.fit(make_module(5), datamodule=Steps(5), ckpt_path=folder / "step-3.ckpt")
    assert names_and_steps(folder) == {
        "milestone-3.ckpt": 3, "step-3.ckpt": 3, "last.ckpt": 5, "best.ckpt": 5,
    }  # fmt: skip


def test_a_milestone_is_whole_or_absent(tmp_path, monkeypatch):
    replace = os.replace

    def full_at_step_6(partial, path):
        if path.name == "milestone-6.ckpt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(partial, path)

    monkeypatch.setattr(os, "replace", full_at_step_6)
    with pytest.raises(UserError, match=r"cannot write .*milestone-6.ckpt \(No space left on device\)"):
        train_with_milestones(tmp_path, keep_last=0)
    assert names_and_steps(tmp_path / "checkpoints") == {"milestone-3.ckpt": 3, "last.ckpt": 3}


def test_the_newest_is_the_last_or_the_highest_step_or_the_best(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "milestone-11.ckpt").touch()
    assert newest_checkpoint(tmp_path) is None
    for name in ("best.ckpt", "step-9.ckpt", "step-10.ckpt", "last.ckpt"):
        (tmp_path / name).touch()
        assert newest_checkpoint(tmp_path) == tmp_path / name


def test_the_average_speed_is_of_the_steps_before_a_resume_too(tmp_path):
    totals = []
    for num_steps, ckpt in ((10, None), (20, tmp_path / "checkpoints" / "last.ckpt")):
        meter = SpeedMeter(1)
        trainer = make_trainer(tmp_path, num_steps, meter=meter, log_every=1)
        trainer.fit(make_module(num_steps), datamodule=Steps(num_steps), ckpt_path=ckpt)
        totals.append(meter.state_dict())
    # Laps begin after the first two steps of a process.
    assert [total["steps"] for total in totals] == [8, 16] and totals[0]["seconds"] < totals[1]["seconds"]


def test_best_is_the_lowest_validation_loss_across_a_resume(tmp_path):
    class Losses(type(make_module(1))):
        """Validation losses by step: 5 is the best, and 10 must not replace it after a resume."""

        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.validation_metrics["val/loss"] = {5: 1.0, 10: 2.0, 15: 3.0}[self.global_step]

    last, best = (tmp_path / "checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    for num_steps, ckpt in ((10, None), (15, last)):
        module = make_module(num_steps)
        module.__class__ = Losses
        trainer = make_trainer(tmp_path, num_steps, validate_every=5)
        trainer.fit(module, datamodule=Steps(num_steps), ckpt_path=ckpt)
        assert read_checkpoint(best)["global_step"] == 5
    assert read_checkpoint(last)["global_step"] == 15
