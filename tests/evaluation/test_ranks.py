"""Several ranks make one evaluation: the table, the folder and the words of one process, and one end for all."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import SMALL, SMALL_RECALL
from several import cannot_read, count_batches, killed, on_ranks, score_tables, train

from flashtrain.evaluation.table import RecallTable, read_table

ROOT = Path(__file__).parent.parent.parent
EVALUATE = "python -m flashtrain.evaluate"
# windows of every purpose: 3 batches of openings, 6 of anchors, and those of whole documents
EVALUATED = [
    "run=run",
    "eval.lengths=[32,64]",
    "eval.targets_per_anchor=16",
    "eval.max_documents=null",
    "eval.max_anchors=11",
    "eval.window=50",
    "eval.stride=30",
    "eval.key_tokens=self",
    "eval.batch_tokens=256",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `run`, of which eleven documents are for validation."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes").mkdir()
    for number in range(22):
        text = " ".join(f"{number} times {i} is {number * i}." for i in range(2 + number % 5))
        (folder / f"notes/{number}.txt").write_text(text)
    settings = ["data=text", "data.path=notes", "data.validation_fraction=0.5", *SMALL, "eval.lengths=[65]"]
    [ended] = on_ranks(1, folder, train, *settings, "output=run")
    assert ended.exitcode == 0, ended.said
    return folder


def evaluations(home):
    """The folders of the evaluations of `run`, and the journals of unfinished ones."""
    return set(home.glob("run/evaluation/*"))


def evaluate(world_size, home, *words):
    """The folder of a new evaluation by so many ranks, and how many batches each scored."""
    before = evaluations(home)
    ended = on_ranks(world_size, home, count_batches, EVALUATE, *EVALUATED, *words)
    assert [rank.exitcode for rank in ended] == [0] * world_size, ended
    [folder] = evaluations(home) - before
    assert ended[0].said.count("wrote ") == len(list(folder.iterdir())) and not any(rank.said for rank in ended[1:])
    return folder, [rank.result for rank in ended]


@pytest.fixture(scope="module")
def alone(home):
    """What `evaluate` returns for one rank, which scores all batches."""
    return evaluate(1, home)


def report_and_cost(folder):
    report = json.loads((folder / "perplexity.json").read_text())
    return report, report.pop("cost")


def assert_same_evaluation(folder, other):
    assert report_and_cost(other)[0] == report_and_cost(folder)[0]
    assert (other / "perplexity.csv").read_text() == (folder / "perplexity.csv").read_text()
    (table, facts), (same_table, same_facts) = (read_table(path / "targets.parquet") for path in (folder, other))
    assert same_facts == facts
    for name, column in vars(table).items():
        assert np.array_equal(vars(same_table)[name], column), name


# variant, tokens of each document, window, stride, prefix, batch_tokens, chunk, piece
MANY, FEW = (45, 60, 2, 31, 9, 60, 33), (70, 20)
CASES = [
    ("standard", MANY, 16, 10, "document", 64, 4096, None),
    ("standard", MANY, 16, 10, "document", 1, 7, None),
    ("sdpa_math", MANY, 16, 10, "document", 33, 50, 5),
    ("sdpa_flash", MANY, 16, 10, "document", 4096, 16, None),
    ("flash_v2", MANY, 16, 10, "document", 160, 4096, 8),
    ("standard", FEW, 100, 100, "window", 1, 4096, None),
    ("sdpa_math", FEW, 100, 1, "window", 4096, 9, 30),
    ("standard", (90,), 100, 40, "none", 100, 4096, None),
    ("sdpa_flash", (90,), 100, 90, "none", 1, 11, None),
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """World size -> the table of each of CASES."""
    ended = {size: on_ranks(size, tmp_path_factory.mktemp("ranks"), score_tables, CASES) for size in (1, 2, 3)}
    assert not any(rank.exitcode for ranks in ended.values() for rank in ranks), ended
    return {size: [rank.result for rank in ranks] for size, ranks in ended.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_tables_are_those_of_one_rank_for_any_documents_batch_chunk_and_variant(tables, world_size):
    [expected] = tables[1]
    for of_rank in tables[world_size]:
        for case, table, same in zip(CASES, expected, of_rank, strict=True):
            assert len(table["nll"]) == sum(size - 1 - (case[4] == "none") for size in case[1])
            for name, column in table.items():
                assert np.array_equal(same[name], column), (case, name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_the_same_for_any_batch_chunk_piece_and_variant(tables, world_size):
    first, *others = (table for case, table in zip(CASES, tables[world_size][0], strict=True) if case[1] == MANY)
    assert first["nll"].mean() > 1 and len(others) == 4
    for table in others:
        assert table["nll"].sum(dtype=np.float64) == pytest.approx(first["nll"].sum(dtype=np.float64), rel=1e-6)
        for name in ("document", "position", "context", "bytes"):
            assert np.array_equal(table[name], first[name])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_one_evaluation(home, alone, world_size):
    folder, [num_batches] = alone
    shared, batches = evaluate(world_size, home)
    assert sum(batches) == num_batches and max(batches) - min(batches) <= 1
    assert_same_evaluation(folder, shared)
    (_, cost), (_, of_all) = report_and_cost(folder), report_and_cost(shared)
    assert of_all["tokens"] == cost["tokens"] > 0 and of_all["seconds"] > 0


def test_an_evaluation_goes_on_with_any_number_of_ranks(home, alone):
    """Killed at the fourth batch of one rank, then at the third of the second of two: three score what is left."""
    for left in home.glob("run/evaluation/unfinished-*"):
        left.unlink()
    folder, [num_batches] = alone
    for world_size, at_batch in ((1, 4), (2, 3)):
        fault = {"at_batch": at_batch, "on_rank": world_size - 1, "happens": killed}
        ended = on_ranks(world_size, home, count_batches, EVALUATE, *EVALUATED, **fault)
        assert all(rank.exitcode for rank in ended)
    [journal] = home.glob("run/evaluation/unfinished-*")
    again, batches = evaluate(3, home)
    assert not journal.exists()
    assert sum(batches) == num_batches - 3 - 2 * 2
    assert_same_evaluation(folder, again)


def test_the_evaluation_at_the_end_of_training_is_shared(home):
    finals, scored = [], []
    for world_size in (1, 2):
        run = home / f"finished-by-{world_size}"
        shutil.copytree(home / "run", run)
        (run / "result.json").unlink()
        shutil.rmtree(run / "evaluation")
        words = [f"resume={run.name}", *EVALUATED[1:]]
        ended = on_ranks(world_size, home, count_batches, "python train.py", *words)
        assert [rank.exitcode for rank in ended] == [0] * world_size, ended
        assert not any(rank.said for rank in ended[1:])
        finals.append(run / "evaluation/final")
        scored.append([rank.result for rank in ended])
    assert_same_evaluation(*finals)
    assert [sum(scored[0])] == scored[0] == [sum(scored[1])] and min(scored[1]) > 0


def test_recall_is_shared_as_well(home):
    """Three documents of 16 tokens in one batch, and of 64 in one each."""
    finals = {}
    for world_size in (1, 2):
        words = ["data=recall", *SMALL_RECALL, "eval.max_documents=3", "eval.batch_tokens=64"]
        output = f"output=recalled-by-{world_size}"
        ended = on_ranks(world_size, home, count_batches, "python train.py", *words, output)
        assert [rank.exitcode for rank in ended] == [0] * world_size, ended
        assert [rank.result for rank in ended] == [4 // world_size] * world_size
        finals[world_size] = home / f"recalled-by-{world_size}/evaluation/final"
    tables = {size: read_table(final / "targets.parquet", RecallTable)[0] for size, final in finals.items()}
    assert len(tables[1]) == 2 * 3 * 4
    for name, column in vars(tables[1]).items():
        if name != "nll":  # weights differ in their last bits
            assert np.array_equal(vars(tables[2])[name], column), name
    assert tables[2].nll == pytest.approx(tables[1].nll, rel=1e-4)


@pytest.mark.parametrize(
    ("on_rank", "happens", "sentence"),
    [
        (0, cannot_read, "error: rank 0 cannot read its data; mend it"),
        (1, cannot_read, "error: rank 1 cannot read its data; mend it"),
        (1, killed, "error: another rank has ended without a word"),
    ],
    ids=["first", "other", "other-killed"],
)
def test_a_rank_that_fails_ends_all_in_one_sentence(home, on_rank, happens, sentence):
    fault = {"at_batch": 2, "on_rank": on_rank, "happens": happens}
    ended = on_ranks(2, home, count_batches, EVALUATE, *EVALUATED, **fault)
    assert all(rank.exitcode for rank in ended)
    said = [line for rank in ended for line in rank.said.splitlines()]
    assert [line for line in said if "rror" in line] == [line for line in said if line.startswith(sentence)] != []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["eval.lengths=[5000]"], "eval.lengths starts at 5000 tokens and the longest validation document has"),
        (["eval.key_tokens=none.parquet"], "eval.key_tokens=none.parquet is no file of key tokens"),
        (["trainer.devices=3"], "trainer.devices is 3 and torchrun has started 2 processes on this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_said_once(home, overrides, sentence):
    before = set(home.rglob("*"))
    ended = on_ranks(2, home, count_batches, EVALUATE, *EVALUATED, *overrides)
    assert f"error: {sentence}" in ended[0].said and not ended[1].said
    assert all(rank.exitcode for rank in ended) and set(home.rglob("*")) == before


def test_a_sample_is_of_one_process(home):
    first, other = on_ranks(2, home, count_batches, "python -m flashtrain.generate", "run=run")
    assert first.said.startswith("error: a sample cannot be started with torchrun; say python -m flashtrain.generate")
    [alone] = on_ranks(1, home, count_batches, "python -m flashtrain.generate", "run=run", "trainer.devices=2")
    assert alone.said.startswith("error: trainer.devices is for an evaluation and changes no sample; leave it out")
    assert first.exitcode and alone.exitcode and not other.said


def test_lightning_and_torchrun_start_the_same_evaluation(home, alone):
    folder, _ = alone
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "flashtrain.evaluate"]
    starts = {"lightning": ["-m", "flashtrain.evaluate", "trainer.devices=2"], "torchrun": torchrun}
    processes = {}
    for name, words in starts.items():
        (home / name).mkdir()
        for part in ("run", "notes", ".flashtrain"):
            shutil.copytree(home / part, home / name / part)
        before = evaluations(home / name)
        command = [sys.executable, *words, *EVALUATED]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=home / name, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        processes[name] = process, before
    for name, (process, before) in processes.items():
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        assert said.count("Perplexity of the first L tokens") == said.count("wrote run/evaluation") / 5 == 1, said
        [shared] = evaluations(home / name) - before
        assert_same_evaluation(folder, shared)


def test_a_full_disk_ends_the_ranks_that_lightning_started_in_one_sentence(home):
    room = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))}
    command = [sys.executable, "-m", "flashtrain.evaluate", "trainer.devices=2", *EVALUATED, "eval.batch_tokens=255"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=home, env=environment, text=True, capture_output=True, timeout=300, **room)
    assert ended.returncode == 1
    [sentence] = [line for line in ended.stderr.splitlines() if not line.startswith("attention: auto chose ")]
    assert re.fullmatch(r"error: run/evaluation/unfinished-\w+\.f32 cannot be written \(File too large\); .+", sentence)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_score_what_one_does(home):
    words = ["trainer.device=cuda", "trainer.precision=fp32"]
    reports = [json.loads((evaluate(size, home, *words)[0] / "perplexity.json").read_text()) for size in (1, 2)]
    assert reports[0].keys() == reports[1].keys()
    for row, same in zip(reports[0]["ppl_at_length"], reports[1]["ppl_at_length"], strict=True):
        assert same["targets"] == row["targets"] and same["loss"] == pytest.approx(row["loss"], rel=1e-6)
