"""A run of data=recall from the command line to its evaluation, resumed, sampled from, and the mistakes about it."""

import errno
import json
import signal

import pytest
import torch
from commands import compose, run_command

from flashtrain.evaluation import recall_report
from flashtrain.evaluation.table import RecallTable, read_table
from flashtrain.training.callbacks import Reporter

TINY = (
    "data=recall data.num_keys=40 data.num_values=8 data.num_queries=4 train.sequence_length=32 "
    "train.tokens_per_step=128 train.steps=6 train.log_every=1 train.validation_tokens=128 eval.max_documents=3 "
    "model.num_layers=1 model.hidden_size=32 model.num_heads=1 generate.num_tokens=0 trainer=cpu logger=none"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `run`."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_command(f"python train.py {TINY} output=run")
    return home


@pytest.fixture(autouse=True)
def in_home(home, monkeypatch):
    monkeypatch.chdir(home)


def weights_of(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def test_a_run_reports_recall_and_nothing_of_text(home):
    result = json.loads((home / "run/result.json").read_text())
    assert result["validation_loss"] > 0 and "bits_per_byte" not in result
    assert not (home / "run/sample.txt").exists()
    final = home / "run/evaluation/final"
    assert {path.name for path in final.iterdir()} == {"recall.json", "recall.csv", "recall.png", "targets.parquet"}
    report = json.loads((final / "recall.json").read_text())
    assert [row["length"] for row in report["recall_at_length"]] == [16, 32, 64]
    assert {row["targets"] for row in report["recall_at_length"]} == {3 * 4}
    assert report["chance"] == 1 / 8 and report["conditions"]["training_length"] == 32


def test_stopped_and_resumed_is_bit_for_bit_the_same_run(home, monkeypatch):
    report = Reporter._report

    def report_and_stop(self, trainer, step, outputs):
        report(self, trainer, step, outputs)
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "_report", report_and_stop)
        run_command(f"python train.py {TINY} output=stopped")
    run_command("python train.py resume=stopped")
    straight, resumed = weights_of(home / "run"), weights_of(home / "stopped")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_evaluate_scores_the_run_again_and_at_other_lengths(home, capsys):
    before = set(home.glob("run/evaluation/*/"))
    run_command("python -m flashtrain.evaluate run=run eval.lengths=[32,80] eval.prefill_tokens=24 attention=standard")
    assert "Recall by depth and length" in capsys.readouterr().out
    (folder,) = set(home.glob("run/evaluation/*/")) - before
    tables = [read_table(path / "targets.parquet", RecallTable)[0] for path in (folder, home / "run/evaluation/final")]
    assert tables[0].lengths("recall") == [32, 80]
    again, first = (table.of("recall", 32) for table in tables)
    assert (again.depth == first.depth).all() and (again.position == first.position).all()
    assert again.nll == pytest.approx(first.nll, rel=1e-4)


@pytest.mark.parametrize(
    "command", ["-m flashtrain.evaluate run=run", f"train.py {TINY} train.steps=1 output=full"], ids=lambda c: c[:20]
)
def test_a_full_disk_ends_the_reports_in_one_sentence(command, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recall_report, "save_heat_map", refuse)
    with pytest.raises(SystemExit, match=r"evaluation/\S+ cannot be written \(No space left on device\); make room"):
        run_command(f"python {command}")


def test_a_sample_answers_in_words(capsys):
    run_command("python -m flashtrain.generate run=run generate.num_tokens=1 generate.prompt='k1 v2 k3 v4 k1'")
    prompt, _, answer = capsys.readouterr().out.strip().rpartition(" ")
    assert prompt.endswith("k1 v2 k3 v4 k1") and answer[0] in "kv" and answer[1:].isdecimal()


def test_a_prompt_of_other_words_is_refused_before_the_first_step(home):
    with pytest.raises(SystemExit, match="hello is no word of data=recall"):
        run_command(f"python train.py {TINY} output=unsaid generate.num_tokens=1 generate.prompt=hello")
    assert not (home / "unsaid").exists()


def test_an_export_has_no_tokenizer(home, capsys):
    run_command("python -m flashtrain.convert run=run output=exported")
    assert "no tokenizer.json: the tokenizer is recall, and 48 stands before a document" in capsys.readouterr().out
    assert not (home / "exported/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ("data.num_queries=4 train.sequence_length=32 train.tokens_per_step=64", [16, 32, 64]),
        ("data.num_queries=2 train.sequence_length=30 train.tokens_per_step=30", [30, 60]),
        ("data.num_keys=60 train.sequence_length=160 train.tokens_per_step=160", [160]),
    ],
    ids=["enough-tokens", "pairs", "enough-keys"],
)
def test_default_lengths_are_those_that_rows_may_have(words, lengths):
    assert compose("data=recall", *words.split()).eval.lengths == lengths


@pytest.mark.gpu
def test_the_experiment_learns_to_recall_within_its_length(home):
    run_command("python train.py experiment=recall output=learned logger=none")
    report = json.loads((home / "learned/evaluation/final/recall.json").read_text())
    accuracy = {row["length"]: row["accuracy"] for row in report["recall_at_length"]}
    assert min(accuracy[length] for length in (128, 256, 512)) > 0.95


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"train.py {TINY} train.sequence_length=33 train.tokens_per_step=33", "length says 33 tokens and rows of"),
        (f"train.py {TINY} data.num_queries=9", "train.sequence_length says 32 tokens and data.num_queries=9 with as"),
        (f"train.py {TINY} eval.lengths=[16,200]", "eval.lengths says 200 tokens, which takes 96 different keys, and"),
        (f"train.py {TINY} eval.max_documents=null", "eval.max_documents is null and rows of data=recall have no end"),
        (f"train.py {TINY} data.num_values=1", "data.num_values is 1; it must be at least 2"),
        (f"train.py {TINY} data.tokenizer=bytes", "there is no setting data.tokenizer"),
        (f"train.py {TINY} data.isolate_documents=true", "there is no setting data.isolate_documents"),
        (f"train.py {TINY} eval.window=16 eval.prefix=none", "eval.prefix, eval.window is of perplexity and data"),
        ("-m flashtrain.evaluate run=run eval.key_tokens=self", "eval.key_tokens is of perplexity and data=recall is"),
        ("-m flashtrain.evaluate run=run data=recall data.seed=1", "data.seed is 0 there and 1 here"),
        ("-m flashtrain.evaluate runs=[run]", "run has an evaluation of recall, and comparisons are of perplexity"),
        ("-m flashtrain.generate run=run generate.prompt=hello", "hello is no word of data=recall; those are k0 to"),
        ("-m flashtrain.convert source=run data=recall", "data=recall has a vocabulary of its own and run another"),
    ],
    ids=lambda value: value.removeprefix(f"train.py {TINY} "),
)
def test_a_mistake_ends_in_one_sentence(command, sentence):
    with pytest.raises(SystemExit) as stop:
        run_command(f"python {command}")
    assert sentence in stop.value.code and "\n" not in stop.value.code
