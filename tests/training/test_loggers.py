"""Weights & Biases: the real package, offline, and how a missing one or a refusal is said."""

import importlib.metadata
import json

import pytest
from commands import SMALL, run_command
from tiny_training import Steps, StopAt, make_module, make_trainer

from flashtrain.errors import UserError
from flashtrain.training.loggers import build_loggers

NUM_STEPS = 20


@pytest.fixture
def wandb(monkeypatch):
    """The package, offline and silent."""
    package = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    return package


def wandb_loggers(folder):
    chosen = {"csv": False, "tensorboard": False, "wandb": True}
    return build_loggers(folder / "logs", **chosen, run_name=folder.name, settings={"train": {"steps": NUM_STEPS}})


def run(folder, stop_at=None, ckpt=None):
    trainer = make_trainer(folder, NUM_STEPS, loggers=wandb_loggers(folder), callbacks=[StopAt(stop_at)])
    trainer.fit(make_module(NUM_STEPS), datamodule=Steps(NUM_STEPS), ckpt_path=ckpt)


def records(path):
    """The records of a .wandb file of one block: 7 bytes, then for each 4 of checksum, 2 of length, 1 of type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place = path.read_bytes(), 7
    while place < len(data):
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        yield Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length


def recorded(folder):
    """For each file of W&B's in the folder of a run: what it says of the run, and its rows by step."""
    found = []
    for path in sorted((folder / "logs/wandb").glob("offline-run-*/*.wandb")):
        rows = {}
        for record in records(path):
            if record.HasField("run"):
                said = record.run
            if record.HasField("history"):
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.setdefault(int(row["step"]), {}).update(row)
        found.append((said, rows))
    return found


def test_wandb_offline_goes_on_when_resumed_and_keeps_the_runs_of_a_sweep_apart(tmp_path, wandb):
    run(tmp_path / "first", stop_at=10)
    run(tmp_path / "second")
    wandb.teardown()  # as the end of the process
    run(tmp_path / "first", ckpt=tmp_path / "first/checkpoints/last.ckpt")
    wandb.teardown()
    (first, begun), (again, ended) = recorded(tmp_path / "first")
    ((second, whole),) = recorded(tmp_path / "second")
    assert first.run_id == again.run_id != second.run_id
    assert (first.display_name, second.display_name, first.project) == ("first", "second", "flashtrain")
    settings = {item.key: item.value_json for item in first.config.update}
    assert json.loads(settings["train"]) == {"steps": NUM_STEPS}
    assert (list(begun), list(ended), list(whole)) == ([5, 10], [15, 20], [5, 10, 15, 20])
    for metric in ("train/loss", "train/grad_norm", "train/learning_rate", "val/loss", "val/bits_per_byte"):
        assert whole[20][metric] == ended[20][metric]


def test_a_refusal_of_wandb_is_one_sentence(tmp_path, wandb, monkeypatch):
    def init(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"^W&B refuses to start \(No API key configured\.\); say `wandb login`, "):
        wandb_loggers(tmp_path)


def test_without_wandb_the_choice_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"line {i} of the only file\n" for i in range(300)))
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as stop:
        run_command("python train.py data=text data.path=book.txt output=run logger=wandb", *SMALL)
    assert stop.value.code.startswith("error: logger.wandb=true needs the package wandb, which is not here; pip")
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]
