"""A run from the command line to its folder: what it leaves and says, how mistakes end."""

import json
import math
import re

import pytest
import torch
from commands import run_command
from text_runs import sentence_of, train, weights_of

from flashtrain.training.replay import read_fault


def test_a_run_says_and_leaves_what_it_found(tmp_path, capsys):
    train("output=run")
    said = capsys.readouterr().out
    loss = float(said.split("validation loss: ")[1].split()[0])
    bits = float(said.split("bits per byte: ")[1].split()[0])
    assert bits == pytest.approx(loss / math.log(2), rel=0.02)  # one byte a token, prefix tokens apart
    assert "Perplexity of the first L tokens" in said and "Loss by position" in said
    for line in said.split("wrote:\n")[1].splitlines():
        assert (tmp_path / line.strip()).exists()
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "provenance.json", "result.json", "checkpoints", "logs", "evaluation", "sample.txt",
    }  # fmt: skip
    assert {path.suffix for path in (folder / "evaluation/final").iterdir()} == {".json", ".csv", ".png", ".parquet"}
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["packages"]["torch"] and facts["corpus"] and facts["attention"] == "sdpa_flash"


def test_documents_apart_and_windows_from_the_command_to_the_evaluation(tmp_path, caplog, capsys):
    (tmp_path / "notes").mkdir()
    for number in range(40):  # each a row or two
        (tmp_path / f"notes/{number}.txt").write_text(" ".join(f"{number} and {i}" for i in range(12)))
    windows = ["data.path=notes", "model.num_layers=2", "model.windows=[16,null]"]
    losses = set()
    for output, apart in (("apart", True), ("together", False)):
        train(f"output={output}", *windows, f"data.isolate_documents={apart}")
        losses.add(json.loads((tmp_path / output / "result.json").read_text())["validation_loss"])
    assert "2 rows of 64 with documents apart, " in caplog.text and "2 rows of 64, " in caplog.text
    assert len(losses) == 2
    capsys.readouterr()
    run_command("python -m flashtrain.evaluate run=apart")
    assert "Perplexity of the first L tokens" in capsys.readouterr().out


def test_each_precision_from_the_command_to_the_evaluation(tmp_path, caplog, capsys):
    said = {
        "bf16": "bfloat16 with float32 weights on cpu",
        "fp16": "float16 with float32 weights on cpu",
        "bf16-true": "bfloat16 on cpu",
    }
    predicted = {}
    for name, words in said.items():
        train(f"output={name}", f"trainer.precision={name}", "train.log_every=1")
        assert f"; {words}\n" in caplog.text
        assert torch.get_float32_matmul_precision() == "highest"
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert 4 < result["validation_loss"] < 6  # near ln 257: four steps
        predicted[name] = result["predicted_peak_memory_gib"]
        kept = {tensor.dtype for tensor in weights_of(tmp_path / name).values()}
        assert kept == {torch.bfloat16 if name == "bf16-true" else torch.float32}
    assert predicted["bf16-true"] < predicted["fp16"] and predicted["fp16"] == predicted["bf16"]
    columns = (tmp_path / "fp16/logs/train.csv").read_text().splitlines()[0].split(",")
    assert {"skipped_steps", "loss_scale"} <= set(columns)
    capsys.readouterr()
    run_command("python -m flashtrain.evaluate run=bf16-true")
    assert "bfloat16 on cpu" in " ".join(capsys.readouterr().out.split())


def test_one_text_file_is_enough(tmp_path, caplog):
    (tmp_path / "input.txt").write_text("".join(f"line {i} of the only file\n" for i in range(300)))
    train("data.path=input.txt", "output=run")
    assert "the only document is cut in two, at a line end" in caplog.text
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()


def test_runs_get_folders_of_their_own(tmp_path):
    train()
    train("attention=standard")
    names = sorted(path.name.split("_", 2)[2] for path in (tmp_path / "runs").iterdir())
    assert names == ["nano_sdpa_flash", "nano_standard"]


def test_documents_too_short_for_a_curve_are_trained_on_all_the_same(books, capsys, caplog):
    train("output=run", "eval.lengths=[100000]")
    assert "perplexity by context will not be measured: eval.lengths starts at 100000 tokens" in caplog.text
    assert "bits per byte: " in capsys.readouterr().out


def test_evaluate_scores_the_run_as_its_last_step_did(tmp_path):
    train("output=run")
    run_command("python -m flashtrain.evaluate run=run")
    reports = [json.loads(path.read_text()) for path in (tmp_path / "run/evaluation").glob("*/perplexity.json")]
    costs = [report.pop("cost") for report in reports]
    assert len(reports) == 2 and reports[0] == reports[1] and costs[0]["tokens"] == costs[1]["tokens"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.path=nowhere"], "data.path=nowhere does not exist"),
        (["data.path=empty"], "data.path=empty needs .txt, .jsonl or .parquet files"),
        (["train.sequence_length=65536", "train.tokens_per_step=65536"], "tokens together and a row takes 65537"),
        (["attention=sdpa_cudnn"], "sdpa_cudnn runs on cuda, not on cpu; standard, flash_v1, flash_v2, sdpa_math"),
        (["attention=sdpa_flash", "model.windows=[16]"], "sdpa_flash takes the full and the causal mask, not window"),
        (["attention=sdpa_flash", "data.isolate_documents=true"], "the causal mask, not documents, chunks or a prefix"),
        (["model.windows=[]"], "model.windows is empty; give at least one"),
        (["model.vocab_size=100"], "model.vocab_size is 100 and tokenizer bytes has 257 tokens"),
        (["data.tokenizer=none.json"], "data.tokenizer=none.json is no file"),
        (["output=books"], "output=books exists; name another"),
        (["output=books/0.txt/run"], "books/0.txt/run cannot be written (Not a directory)"),
        (["run=books"], "books is not the folder of a run"),
        (["checkpoint=best"], "checkpoint=best is not for this command, which takes output and resume"),
        (["checkpoint=first"], "checkpoint is first; allowed are last, best and the number of a step"),
        (["optimizer.learning_rate=nan"], "optimizer.learning_rate"),
        (["optimizer.skip_norm=0.5"], "optimizer.skip_norm=0.5 must be above optimizer.clip_norm=1.0, or nothing"),
        (["trainer.precision=int8"], "trainer.precision is int8; allowed are auto, fp32, tf32, bf16, bf16-true, fp16"),
        (["trainer.precision=tf32"], "trainer.precision is tf32, which takes a CUDA GPU of sm_80 or later; say fp32"),
        (["eval.lengths=512"], "eval.lengths takes a list, as in eval.lengths=[...]"),
        (["resume=books"], "books is not the folder of a run: it has no config.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_leaves_no_folder(tmp_path, overrides, sentence):
    (tmp_path / "empty").mkdir()
    assert sentence in sentence_of(*overrides)
    assert {path.name for path in tmp_path.iterdir()} <= {"books", "empty", ".flashtrain"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash_v2 runs here")
def test_flash_v2_on_a_cpu_wants_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "flash_v2 runs on cuda, or on cpu with TRITON_INTERPRET=1" in sentence_of("attention=flash_v2")


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_step(tmp_path, capsys):
    told = sentence_of("output=run", "optimizer.learning_rate=1e38", "optimizer.clip_norm=null", "train.steps=20")
    assert "error: step " in told and "the update was not applied" in told
    step, rows = re.match(r"error: step (\d+): .* in rows (.*) of the training tokens, so", told).groups()
    fault = f"run/faults/step-{step}.pt"
    assert f"its inputs are saved in {fault}, for `python -m flashtrain.replay`; " in told
    batch = read_fault(tmp_path / fault)["batch"]
    assert rows == ", ".join(map(str, batch["rows"].tolist()))
    capsys.readouterr()
    run_command("python -m flashtrain.replay run=run")
    said = capsys.readouterr().out
    assert said.startswith(f"step {step} of {fault} in float32 on cpu, attention sdpa_flash\n")
    for row in batch["rows"].tolist():
        assert f"row {row}: loss nan; first not finite after " in said
    assert said.endswith("0 of 2 rows are finite by themselves\n")


def test_replay_wants_a_run_that_found_a_fault(tmp_path):
    train("output=run")
    for setting, sentence in {
        "run=run": "run has found no NaN or Inf: there is nothing in faults to replay",
        "output=x": "output=x is not for this command, which takes run; leave it out",
        "seed=1": "which run is meant",
    }.items():
        with pytest.raises(SystemExit, match=sentence):
            run_command("python -m flashtrain.replay", setting)
    (tmp_path / "run/faults").mkdir()
    (tmp_path / "run/faults/step-3.pt").write_text("nothing")
    with pytest.raises(SystemExit, match="run/faults/step-3.pt is not a fault that a training run has saved"):
        run_command("python -m flashtrain.replay run=run")


def test_evaluate_refuses_another_corpus_or_tokenizer_and_writes_nothing(tmp_path, books, monkeypatch):
    train("output=run")
    before = sorted((tmp_path / "run").rglob("*"))

    def evaluate(*overrides):
        with pytest.raises(SystemExit) as stop:
            run_command("python -m flashtrain.evaluate run=run", *overrides)
        assert sorted((tmp_path / "run").rglob("*")) == before
        return stop.value.code

    assert "the longest validation document has" in evaluate("eval.lengths=[100000]")
    assert "output and run are set together; output makes a run" in evaluate("output=x")
    (books / "0.txt").write_text("something else")
    assert "run was made with corpus" in evaluate()
    facts = json.loads((tmp_path / "run/provenance.json").read_text())
    (tmp_path / "run/provenance.json").write_text(json.dumps(facts | {"tokenizer": "another"}))
    assert "run was made with tokenizer another and now there is" in evaluate()


def test_a_runs_folder_that_cannot_be_made_is_a_mistake(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    assert "runs cannot be written (File exists); say output=DIR" in sentence_of()


def test_an_interrupt_outside_training_is_said(monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("flashtrain.fit._report", interrupt)
    with pytest.raises(SystemExit, match="^interrupted$"):
        train("output=run")


def test_evaluate_wants_a_run():
    with pytest.raises(SystemExit) as stop:
        run_command("python -m flashtrain.evaluate")
    assert "which run is meant? Say run=DIR" in stop.value.code
