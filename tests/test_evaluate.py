"""A finished run, evaluated: with other rotary positions than it was trained with, in windows, in pieces, resumed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from commands import SMALL, run_command

ROOT = Path(__file__).parent.parent
LENGTHS = "eval.lengths=[32,64,128] eval.targets_per_anchor=16"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `run`, trained on rows of 64 tokens."""
    home = tmp_path_factory.mktemp("home")
    (home / "books").mkdir()
    for number in range(8):
        (home / f"books/{number}.txt").write_text(" ".join(f"{number} times {i} is {number * i}." for i in range(50)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_command("python train.py data=text data.path=books output=run", *SMALL)
    return home


@pytest.fixture
def evaluate(home, monkeypatch):
    """evaluate("key=value", ...) -> the report of `run`."""
    monkeypatch.chdir(home)

    def report(*overrides):
        before = set(home.glob("run/evaluation/*/"))
        run_command(f"python -m flashtrain.evaluate run=run {LENGTHS}", *overrides)
        (folder,) = set(home.glob("run/evaluation/*/")) - before
        return json.loads((folder / "perplexity.json").read_text())

    return report


def losses(report):
    return {row["length"]: row["loss"] for row in report["ppl_at_length"]}


def test_soup_793_scaling_is_named_said_and_changes_what_it_should(evaluate, capsys):
    plain = evaluate()
    assert plain["conditions"]["positions"] == "default RoPE (theta 10000.0)"
    assert "in place of" not in capsys.readouterr().out
    scaled = evaluate("eval.rope.type=yarn", "eval.rope.factor=4")
    assert scaled["conditions"]["positions"] == (
        "yarn RoPE (theta 10000.0, factor 4.0, original_length 64, beta_fast 32.0, beta_slow 1.0, truncate True, "
        "attention_factor 1.138629436111989)"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "attention_factor 1.138629436111989) in place of default RoPE (theta 10000.0)" in said
    assert all(losses(scaled)[length] != losses(plain)[length] for length in (32, 64, 128))


def test_a_model_may_be_scaled_from_the_start(home, monkeypatch):
    monkeypatch.chdir(home)
    scaled = "model.rope.type=dynamic model.rope.factor=2 model.rope.original_length=32 data.isolate_documents=true"
    run_command(f"python train.py data=text data.path=books output=scaled {scaled}", *SMALL)
    report = json.loads((home / "scaled/evaluation/final/perplexity.json").read_text())
    assert report["conditions"]["positions"] == "dynamic RoPE (theta 10000.0, factor 2.0, original_length 32)"
    with pytest.raises(SystemExit, match="model.rope.type=yarn needs model.rope.original_length, the tokens in a row"):
        run_command("python train.py model.rope.type=yarn model.rope.factor=2")


def test_dynamic_scaling_changes_nothing_up_to_the_trained_length(evaluate):
    """One forward of 128 tokens for all lengths would change the first 32 and 64, too."""
    plain, dynamic = losses(evaluate()), losses(evaluate("eval.rope.type=dynamic", "eval.rope.factor=2"))
    assert dynamic[32] == pytest.approx(plain[32], rel=1e-6)
    assert dynamic[64] == pytest.approx(plain[64], rel=1e-6)
    assert abs(dynamic[128] - plain[128]) > 1e-5


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["eval.rope.factor=4"], "eval.rope has values and no type; say eval.rope.type=..., one of default, linear,"),
        (["eval.rope.type=yarn"], "eval.rope.type=yarn needs eval.rope.factor"),
        (["eval.rope.type=linear", "eval.rope.factor=2", "eval.rope.original_length=9"], "leave it out"),
        (["eval.rope.type=longrope"], "eval.rope.type=longrope is not one of default, linear"),
        (["eval.rope.typ=yarn"], "there is no setting eval.rope.typ; did you mean eval.rope.type?"),
        (["model.rope.type=yarn"], "run was made with other settings: model.rope.type is default there and yarn here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence(evaluate, overrides, sentence):
    with pytest.raises(SystemExit) as stop:
        evaluate(*overrides)
    assert sentence in stop.value.code


def test_learned_positions_cannot_be_scaled(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="eval.rope.type=ntk is of rotary positions and the model has learned ones"):
        run_command("python train.py model=gpt2 eval.rope.type=ntk eval.rope.factor=2")


def test_windows_key_tokens_and_lm_evals_figures(home, evaluate):
    report = evaluate("eval.window=60", "eval.stride=20", "eval.key_tokens=self", "eval.max_documents=1")
    (row,) = report["ppl_strided"]
    (document,) = pq.read_table(max(home.glob("run/evaluation/*/targets.parquet")))["document"].unique().to_pylist()
    texts = [path.read_text() for path in sorted(home.glob("books/*.txt"))]
    (text,) = [text for text in texts if len(text) == row["bytes"]]
    assert row["words"] == len(re.split(r"\s+", text))
    assert row["targets"] == len(text) and document == 0
    assert report["key_ppl"][0]["evaluator"].startswith("nano at step 4 (")
    given = max(home.glob("run/evaluation/*/key_tokens.parquet"))
    again = evaluate(f"eval.key_tokens={given}", "eval.max_documents=1")
    assert again["key_ppl"] == report["key_ppl"]


def test_pieces_over_a_cache_give_the_figures_of_one_forward(evaluate):
    whole = evaluate("attention=standard", "eval.window=100")
    pieces = evaluate("attention=standard", "eval.window=100", "eval.prefill_tokens=48")
    for metric in ("ppl_at_length", "ppl_vs_context", "loss_by_position", "ppl_strided"):
        for row, other in zip(whole[metric], pieces[metric], strict=True):
            assert other["loss"] == pytest.approx(row["loss"], rel=1e-6)
            assert other["targets"] == row["targets"]


def test_a_killed_evaluation_goes_on_where_it_was(home, evaluate, capsys):
    """kill -9 as soon as something is kept: the same command scores the rest, to the same numbers."""
    overrides = ["eval.window=60", "eval.stride=1", "eval.batch_tokens=1"]
    expected = evaluate(*overrides)
    assert not list(home.glob("run/evaluation/unfinished-*")), "removed once the reports are written"
    command = [sys.executable, "-m", "flashtrain.evaluate", "run=run", *LENGTHS.split(), *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not any(path.stat().st_size for path in home.glob("run/evaluation/unfinished-*")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    (journal,) = home.glob("run/evaluation/unfinished-*")
    assert journal.stat().st_size > 0
    again = evaluate(*overrides)
    assert re.search(r"going on after [1-9][\d,]* targets that are scored already", capsys.readouterr().out)
    assert again.pop("cost")["tokens"] < expected.pop("cost")["tokens"]
    assert again == expected
    assert not journal.exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["eval.stride=4"], "eval.stride=4 is of eval.window, which is null; say eval.window=..., too"),
        (["eval.prefix=bos"], "eval.prefix=bos is not one of document, window, none"),
        (["eval.key_tokens=none.parquet"], "eval.key_tokens=none.parquet is no file of key tokens (there is no such"),
        (
            ["attention=sdpa_flash", "eval.prefill_tokens=48"],
            "sdpa_flash takes the causal mask where there are as many queries as keys, not 48 and 64; standard,",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_about_windows_ends_in_one_sentence(evaluate, overrides, sentence):
    with pytest.raises(SystemExit) as stop:
        evaluate(*overrides)
    assert sentence in stop.value.code


def test_key_tokens_that_cannot_be_read_are_refused_before_training(home, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises(SystemExit, match="eval.key_tokens=none.parquet is no file of key tokens"):
        run_command("python train.py data=text data.path=books output=never eval.key_tokens=none.parquet", *SMALL)
    assert not (home / "never").exists()


def test_evaluations_are_compared(home, evaluate, capsys):
    made = [evaluate("attention=sdpa_math"), evaluate("attention=standard")]
    (first,) = sorted(home.glob("run/evaluation/*sdpa_math"))[-1:]
    capsys.readouterr()
    run_command(f"python -m flashtrain.evaluate runs=[{first.relative_to(home)},run] output=compared")
    assert "attention: sdpa_math in" in " ".join(capsys.readouterr().out.split())
    report = json.loads((home / "compared/comparison.json").read_text())
    assert [one["ppl_at_length"] for one in report["evaluations"]] == [one["ppl_at_length"] for one in made]
    assert (home / "compared/comparison.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("runs=[run,run]", "runs has run more than once; name each once"),
        ("runs=[]", "runs is empty; give at least one"),
        ("runs=[run] eval.window=9", "eval.window cannot go with runs, which compares evaluations as they were made"),
        ("runs=[run] run=run", "run cannot go with runs"),
        ("runs=[books]", "books is no evaluation and no run with one"),
        ("runs=[run] output=books", "output=books exists"),
    ],
)
def test_a_mistake_about_comparisons_ends_in_one_sentence(home, evaluate, overrides, sentence):
    with pytest.raises(SystemExit) as stop:
        run_command(f"python -m flashtrain.evaluate {overrides}")
    assert sentence in stop.value.code
    with pytest.raises(SystemExit, match="runs=.* is not for this command, which takes output and resume"):
        run_command("python train.py runs=[run]")
