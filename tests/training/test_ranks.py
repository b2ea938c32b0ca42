"""Several ranks are one run: the same steps, validation and folder as of one process, and one end for all."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SMALL
from several import (
    cannot_read,
    exchanges,
    fault_on_the_second,
    half_without_targets,
    killed,
    on_ranks,
    terminated,
    train,
    without_targets,
)
from tiny_training import ROWS, batch_of

from flashtrain.training.checkpoint import read_checkpoint
from flashtrain.training.replay import read_fault

ROOT = Path(__file__).parent.parent.parent
NUM_STEPS = 12
SETTINGS = [
    "data=text",
    "data.path=notes",
    "data.isolate_documents=true",  # so that some labels are not scored, more in one row than in another
    *SMALL,
    f"train.steps={NUM_STEPS}",
    "train.tokens_per_step=768",  # 12 rows
    "train.validation_tokens=320",  # 5 rows
    "train.validate_every=5",
    "train.log_every=1",
    "logger.tensorboard=false",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `notes`, 60 documents of a row or less."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes").mkdir()
    for number in range(60):
        (folder / f"notes/{number}.txt").write_text(" ".join(f"{number} and {i}" for i in range(1 + number % 13)))
    return folder


@pytest.fixture(scope="module")
def one(home):
    """The inputs of the steps of the run in `home`/one, of one process."""
    [ended] = on_ranks(1, home, train, *SETTINGS, "output=one")
    assert ended.exitcode == 0, ended.said
    return ended.result


def rows(path):
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    return {int(row["step"]): {name: float(value) for name, value in row.items() if value} for row in read}


def whole(ended):
    """The inputs of each step, the ranks' parts together."""
    parts = [rank.result for rank in ended]
    assert all(part.keys() == parts[0].keys() for part in parts)
    return {step: np.concatenate([part[step] for part in parts]) for step in parts[0]}


def assert_same_run(first, second):
    """Two folders have the same course; sums in another order differ by fp32's 6e-8, which the steps carry on."""
    for name, columns in {"train": ("loss", "grad_norm", "learning_rate"), "val": ("loss", "bits_per_byte")}.items():
        logs = [rows(folder / f"logs/{name}.csv") for folder in (first, second)]
        assert logs[0].keys() == logs[1].keys()
        for step, row in logs[0].items():
            for column in columns:
                assert logs[1][step][column] == pytest.approx(row[column], rel=2e-5), (step, column)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_the_steps_of_one_process(home, one, world_size):
    output = f"of-{world_size}"
    ended = on_ranks(world_size, home, train, *SETTINGS, f"output={output}", "trainer.micro_batch_tokens=128")
    assert [rank.exitcode for rank in ended] == [0] * world_size, ended
    parts = whole(ended)
    assert parts.keys() == one.keys()
    assert all(np.array_equal(parts[step], inputs) for step, inputs in one.items())
    assert_same_run(home / "one", home / output)


def test_a_rank_without_a_target_counts_for_nothing(home):
    few = ["train.steps=3", "train.validate_every=3"]
    on_ranks(1, home, train, *SETTINGS, *few, "output=half", at_step=1, happens=half_without_targets)
    fault = {"at_step": 1, "on_rank": 1, "happens": without_targets}
    on_ranks(2, home, train, *SETTINGS, *few, "output=other", **fault)
    assert_same_run(home / "half", home / "other")


def test_one_two_and_one_process_resume_one_run(home, one):
    """One rank alone is asked to stop: all end behind the step after the one under way, with one checkpoint."""
    stop = {"at_step": 4, "on_rank": 0, "happens": terminated}
    legs = [whole(on_ranks(1, home, train, *SETTINGS, "output=legs", **stop))]
    stop = {"at_step": 7, "on_rank": 1, "happens": terminated}
    ended = on_ranks(2, home, train, "resume=legs", **stop)
    assert "stopped after step 8; continue with resume=legs" in ended[0].said and not ended[1].said
    assert read_checkpoint(home / "legs/checkpoints/last.ckpt")["global_step"] == 8
    legs.append(whole(ended))
    legs.append(whole(on_ranks(1, home, train, "resume=legs")))
    assert [list(leg) for leg in legs] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert all(np.array_equal(inputs, one[step]) for leg in legs for step, inputs in leg.items())
    assert_same_run(home / "one", home / "legs")
    assert [entry["ranks"] for entry in json.loads((home / "legs/provenance.json").read_text())["resumed"]] == [2, 1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_validate_and_report_what_one_process_does(home, one, world_size):
    """The same weights, after the last step: 5 rows, which no two ranks share evenly, and the perplexity's windows."""
    first, again = home / "one", home / f"validated-by-{world_size}"
    shutil.copytree(first, again)
    (again / "result.json").unlink()
    ended = on_ranks(world_size, home, train, f"resume={again.name}", f"trainer.devices={world_size}")
    assert [rank.exitcode for rank in ended] == [0] * world_size, ended
    assert [rank.result for rank in ended] == [{}] * world_size
    for name in ("result.json", "evaluation/final/perplexity.json"):
        expected, found = (json.loads((folder / name).read_text()) for folder in (first, again))
        for report in (expected, found):
            report.pop("predicted_peak_memory_gib", None)
            if "cost" in report:
                report["cost"].pop("seconds")
        assert found == (pytest.approx(expected, rel=1e-7) if name == "result.json" else expected)


def test_there_is_one_folder_one_voice_and_one_kind_of_checkpoint(home, one):
    before = set(home.rglob("*"))
    kept = ["train.keep_last=2", "train.checkpoint_every=3", "train.milestone_every=8"]
    ended = on_ranks(2, home, train, *SETTINGS, *kept)
    assert [rank.exitcode for rank in ended] == [0, 0], ended
    [folder] = (home / "runs").iterdir()
    assert {path for path in set(home.rglob("*")) - before if folder not in (path, *path.parents)} == {home / "runs"}
    assert ended[1].said == ""
    for line in ("step 3/12  loss ", "validation loss: ", "2 ranks; 12 steps", "memory: predicted peak "):
        assert ended[0].said.count(line) == 1, line
    assert len(rows(folder / "logs/train.csv")) == NUM_STEPS
    names = [path.name for path in sorted((folder / "checkpoints").iterdir())]
    assert names == ["best.ckpt", "last.ckpt", "milestone-8.ckpt", "step-12.ckpt", "step-9.ckpt"]
    alone, of_two = (read_checkpoint(path / "checkpoints/last.ckpt") for path in (home / "one", folder))
    assert alone.keys() == of_two.keys() and alone["state_dict"].keys() == of_two["state_dict"].keys()
    for part in ("state_dict", "optimizer_states"):
        for name, tensor in tensors(alone[part]).items():
            torch.testing.assert_close(tensors(of_two[part])[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def tensors(tree, path=""):
    """Path -> tensor of everything in nested dictionaries and lists."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}/{key}").items()}


@pytest.mark.parametrize(
    ("on_rank", "happens", "sentence"),
    [
        (None, without_targets, "error: step 3: the loss or the gradient is NaN or Inf in rows "),
        (0, cannot_read, "error: rank 0 cannot read its data; mend it"),
        (1, cannot_read, "error: rank 1 cannot read its data; mend it"),
        (1, killed, "error: another rank has ended without a word"),
    ],
    ids=["all-alike", "first-alone", "other-alone", "other-killed"],
)
def test_a_rank_that_fails_ends_all_in_one_sentence(home, on_rank, happens, sentence):
    fault = {"at_step": 3, "on_rank": on_rank, "happens": happens}
    ended = on_ranks(2, home, train, *SETTINGS, f"output=failed-{on_rank}-{happens.__name__}", **fault)
    assert all(rank.exitcode for rank in ended)
    said = [line for rank in ended for line in rank.said.splitlines()]
    assert [line for line in said if "rror" in line] == [line for line in said if line.startswith(sentence)] != []


def test_the_rows_of_a_fault_are_found_on_whichever_rank_they_are(tmp_path):
    ended = on_ranks(2, tmp_path, fault_on_the_second)
    sentences = {rank.result for rank in ended}
    assert len(sentences) == 1, ended
    assert "step 3: the loss or the gradient is NaN or Inf in rows 6, 7 of the training tokens, so" in sentences.pop()
    fault = read_fault(tmp_path / "faults/step-3.pt")
    assert fault["batch"]["rows"].tolist() == list(range(ROWS))
    assert torch.equal(fault["batch"]["inputs"], batch_of(2)["inputs"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["output=notes"], "output=notes exists; name another"),
        (["train.tokens_per_step=704"], "704, 11 rows of train.sequence_length, which 2 ranks cannot share evenly;"),
        (["train.validation_tokens=64"], "validation has 1 rows of 64 tokens for 2 ranks; raise train.validation"),
        (["trainer.devices=3"], "trainer.devices is 3 and torchrun has started 2 processes on this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_said_once(home, one, overrides, sentence):
    before = set(home.iterdir())
    ended = on_ranks(2, home, train, *SETTINGS, *overrides)
    assert sentence in ended[0].said and not ended[1].said
    assert all(rank.exitcode for rank in ended) and set(home.iterdir()) == before


def test_a_sweep_is_not_for_torchrun(home):
    first, other = on_ranks(2, home, train, *SETTINGS, "seed=1,2", "--multirun")
    assert "error: a sweep cannot be started with torchrun; say python train.py --multirun" in first.said
    assert first.exitcode and not other.said


def test_lightning_and_torchrun_start_the_same_run(home, one):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", str(ROOT / "train.py")]
    starts = {"lightning": [str(ROOT / "train.py"), "trainer.devices=2"], "torchrun": torchrun}
    processes = {}
    for name, words in starts.items():
        (home / name).mkdir()
        command = [sys.executable, *words, *SETTINGS, f"data.path={home / 'notes'}", "eval.lengths=[100000]"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes[name] = subprocess.Popen(
            command, cwd=home / name, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    for name, process in processes.items():
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert said.count("validation loss: ") == said.count("2 ranks; 12 steps") == 1, said
        [folder] = (home / name / "runs").iterdir()
        assert_same_run(home / "one", folder)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_the_steps_of_one_and_no_step_waits(home):
    words = [*SETTINGS, "trainer.device=cuda", "trainer.precision=fp32", "trainer.micro_batch_tokens=128"]
    for world_size in (1, 2):
        ended = on_ranks(world_size, home, train, *words, f"output=on-{world_size}-gpus", never_waits=True)
        assert [rank.exitcode for rank in ended] == [0] * world_size, ended
    logs = [rows(home / f"on-{world_size}-gpus/logs/train.csv") for world_size in (1, 2)]
    for step, row in logs[0].items():
        assert logs[1][step]["loss"] == pytest.approx(row["loss"], rel=1e-3)


def test_gradients_are_exchanged_once_a_step_and_kept_once(home):
    """In one place, DDP's bucket, which small as the model is has them all."""
    whole_step, by_row = (on_ranks(2, home, exchanges, rows)[0].result for rows in (ROWS // 2, 1))
    assert whole_step == by_row and by_row[0] > 0 and by_row[1] == 1
