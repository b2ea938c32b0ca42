"""A run that is stopped, killed or in want of a disk goes on as if nothing had been, or says why it cannot."""

import errno
import multiprocessing
import os
import shutil

import pytest
import torch
from commands import run_command
from text_runs import at_step, sentence_of, train, train_until, weights_of

from flashtrain import fit, runs
from flashtrain.training.checkpoint import read_checkpoint
from flashtrain.training.loggers import CsvLogger


def test_stopped_and_resumed_is_bit_for_bit_the_same_run(tmp_path, monkeypatch, capsys):
    forty = ["train.steps=40", "train.log_every=20", "train.validate_every=15"]
    train("output=straight", *forty)

    train_until(monkeypatch, 20, "output=stopped", *forty)
    assert "stopped after step 20; continue with resume=stopped" in capsys.readouterr().out
    run_command("python train.py resume=stopped")

    straight, resumed = weights_of(tmp_path / "straight"), weights_of(tmp_path / "stopped")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_one_command_starts_continues_and_finishes_a_run(tmp_path, monkeypatch, capsys, caplog):
    same = ["output=run", "resume=auto", "train.log_every=2"]
    assert "resume=must, and run has no checkpoint; say resume=auto" in sentence_of(*same, "resume=must")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.config.yaml.1.partial").touch()  # killed at once
    train_until(monkeypatch, 2, *same)
    assert "start: a new run" in caplog.text and "continue with resume=run" in capsys.readouterr().out
    assert "resume=never, and run has last.ckpt; say resume=auto" in sentence_of(*same, "resume=never")
    (tmp_path / "run/checkpoints/.last.ckpt.partial").touch()
    train(*same, "trainer.micro_batch_tokens=64")
    assert "start: after step 2" in caplog.text and "bits per byte: " in capsys.readouterr().out
    train(*same, "resume=must")
    assert capsys.readouterr().out.endswith("run has taken all its steps; evaluate it with run=run\n")
    assert "has last.ckpt" in sentence_of(*same, "resume=never")
    assert not list((tmp_path / "run").rglob(".*"))
    rows = (tmp_path / "run/logs/val.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "4"]


def test_a_full_disk_ends_in_one_sentence_and_a_run_that_continues(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    same = ["output=run", "resume=auto", "train.log_every=1", "logger.tensorboard=false"]
    train_until(monkeypatch, 1, *same)
    no_room = {
        (os, "fsync"): "cannot write run/checkpoints/best.ckpt (No space left on device); the one before it is whole",
        (CsvLogger, "log_metrics"): "run cannot be written (No space left on device); mend that and say resume=run",
    }
    for (owner, name), sentence in no_room.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            assert sentence in sentence_of(*same)
        assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] == 1
        assert not list((tmp_path / "run").rglob(".*"))
    train(*same)
    assert "bits per byte: " in capsys.readouterr().out


def test_a_folder_of_logs_that_is_gone_ends_in_one_sentence(monkeypatch):
    at_step(monkeypatch, 2, lambda: shutil.rmtree("run/logs"))
    told = sentence_of("output=run", "train.log_every=1", "logger.tensorboard=false")
    assert told == "error: run cannot be written (No such file or directory); mend that and say resume=run"


def test_two_processes_do_not_train_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LOCK_SECONDS", 0)
    same = ["output=run", "train.log_every=1"]
    train_until(monkeypatch, 1, *same)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with runs.alone_in(tmp_path / "run"):
        for word in ("auto", "must"):
            assert "another process trains in run; wait for its end, or stop it" in sentence_of(*same, f"resume={word}")
        with pytest.raises(SystemExit, match="another process trains in run"):
            run_command("python train.py resume=run")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    train(*same, "resume=must")


@pytest.mark.parametrize(
    ("started", "words"),
    [(False, ["output=run", "resume=auto"]), (True, ["output=run", "resume=auto"]), (True, ["resume=run"])],
    ids=str,
)
def test_what_another_process_has_trained_meanwhile_is_not_trained_again(started, words, tmp_path, monkeypatch, capsys):
    """It ends between this one's choice of a checkpoint and its lock."""
    same, alone_in = ["train.log_every=1"], runs.alone_in
    if started:
        train_until(monkeypatch, 1, "output=run", *same)
        shutil.copytree("run", "others")
    train("output=others", "resume=auto", *same)

    def after_another(folder):
        shutil.copytree("others", folder, dirs_exist_ok=True)
        return alone_in(folder)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "alone_in", after_another)
        told = sentence_of(*words, *same)
    assert told == "error: another process has trained in run meanwhile; say the same again to go on with that"
    run, others = (tmp_path / name / runs.PROVENANCE_FILE for name in ("run", "others"))
    assert run.read_bytes() == others.read_bytes()
    train(*words, *same)
    assert "run has taken all its steps" in capsys.readouterr().out


def test_a_checkpoint_and_a_result_show_that_a_process_has_trained(tmp_path):
    words = [("run", "auto"), (None, "run"), (None, "run/checkpoints/step-4.ckpt")]
    assert runs.standing("run", "auto") == {}
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    seen = []
    for name in ("checkpoints/step-4.ckpt", "checkpoints/last.ckpt", "result.json"):
        (tmp_path / "run" / name).write_text("")
        every = [runs.standing(*output_and_resume) for output_and_resume in words]
        assert every[0] == every[1] == every[2] and every[0] not in seen
        seen.append(every[0])
    (tmp_path / "run/checkpoints/.last.ckpt.partial").write_text("")
    assert runs.standing("run", "auto") == seen[-1] and runs.standing("run", None) == {}


@pytest.mark.parametrize("stage", ["_sample", "_evaluate", "_report"])
def test_a_run_that_was_ended_in_its_report_is_not_finished(stage, tmp_path, monkeypatch, capsys):
    def killed(*_):
        raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(fit, stage, killed)
        with pytest.raises(SystemExit):
            train("output=run", "resume=auto")
    train("output=run", "resume=auto")
    assert "bits per byte: " in capsys.readouterr().out
    for name in ("result.json", "sample.txt", "evaluation/final/perplexity.json"):
        assert (tmp_path / "run" / name).exists()


@pytest.mark.parametrize("workers", [0, 2], ids="{}-workers".format)
def test_tokens_cut_short_under_a_run_end_it_in_one_sentence_that_names_them(tmp_path, monkeypatch, workers, capsys):
    def cut():
        [path] = (tmp_path / ".flashtrain").rglob("train.tokens")
        path.write_bytes(path.read_bytes()[:1001])

    settings = ["output=run", "train.steps=40", "train.log_every=1", "train.checkpoint_every=1"]
    with monkeypatch.context() as patch:
        at_step(patch, 2, cut)  # read a step late
        told = sentence_of(*settings, f"trainer.data_workers={workers}")
    folder = told.split("; delete ")[1].removesuffix(" to build it anew")
    assert told.startswith(f"error: {folder}/train.tokens is damaged (it ends after 500 of its ") and "\n" not in told
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["global_step"] >= 1
    shutil.rmtree(folder)
    capsys.readouterr()
    run_command("python train.py resume=run")
    assert "bits per byte: " in capsys.readouterr().out


def test_data_workers_that_are_killed_end_the_run_in_one_sentence(tmp_path, monkeypatch):
    # All: of one alone the signal may interrupt the loader while it ends the others, which end with the command then.
    def kill():
        for worker in multiprocessing.active_children():
            worker.kill()

    at_step(monkeypatch, 2, kill)
    told = sentence_of("output=run", "train.steps=400", "train.log_every=1", "trainer.data_workers=2")
    assert "a process that reads data ended (" in told and "; say resume=run, with fewer trainer.data_workers" in told
    assert "\n" not in told


def test_a_run_without_a_checkpoint_yet_starts_again(tmp_path, caplog):
    train("output=run")
    first = weights_of(tmp_path / "run")
    for word in ("auto", "never"):
        shutil.rmtree(tmp_path / "run/checkpoints")
        train("output=run", f"resume={word}")
        assert all(torch.equal(first[name], tensor) for name, tensor in weights_of(tmp_path / "run").items())
    assert "start: after" not in caplog.text
    assert "output=books exists and is not the folder of a run; name another" in sentence_of(
        "output=books", "resume=auto"
    )


def test_a_run_goes_back_to_one_of_its_checkpoints(tmp_path, capsys, caplog):
    train("output=run", "train.checkpoint_every=1", "train.keep_last=3")
    folder = tmp_path / "run/checkpoints"
    names = ["best.ckpt", "last.ckpt", "step-2.ckpt", "step-3.ckpt", "step-4.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    first = weights_of(tmp_path / "run")
    run_command("python train.py resume=run/checkpoints/step-2.ckpt trainer.micro_batch_tokens=128")
    assert "start: after step 2" in caplog.text and "bits per byte: " in capsys.readouterr().out
    assert all(torch.equal(first[name], tensor) for name, tensor in weights_of(tmp_path / "run").items())
    assert sorted(path.name for path in folder.iterdir()) == names


def test_milestones_are_named_by_their_step_to_other_commands(tmp_path, capsys):
    train("output=run", "train.milestone_every=2")
    generate = "python -m flashtrain.generate run=run checkpoint="
    texts = []
    for name in ("2", "4", "last"):
        run_command(f"{generate}{name}")
        texts.append(capsys.readouterr().out)
    assert texts[1] == texts[2] != texts[0]
    assert runs.checkpoint(tmp_path / "run", "2").name == "milestone-2.ckpt"
    with pytest.raises(SystemExit, match="run has no weights of step 3; say checkpoint= with one of last, best, 2, 4"):
        run_command(f"{generate}3")
    kept = (tmp_path / "run/result.json").read_text()
    with pytest.raises(SystemExit, match="milestone-2.ckpt has weights alone"):
        run_command("python train.py resume=run/checkpoints/milestone-2.ckpt")
    assert (tmp_path / "run/result.json").read_text() == kept


def test_a_finished_run_says_so_and_keeps_its_result(tmp_path, capsys):
    train("output=run")
    before = (tmp_path / "run/result.json").read_text()
    run_command("python train.py resume=run")
    assert capsys.readouterr().out.endswith("run has taken all its steps; evaluate it with run=run\n")
    assert (tmp_path / "run/result.json").read_text() == before


def test_a_run_that_ended_before_its_report_resumes_to_it(tmp_path, capsys):
    train("output=run")
    first = capsys.readouterr().out
    (tmp_path / "run/result.json").unlink()
    run_command("python train.py resume=run")
    again = capsys.readouterr().out
    for line in ("validation loss: ", "bits per byte: "):
        assert again.split(line)[1].split()[0] == first.split(line)[1].split()[0]


def test_resume_refuses_a_missing_or_broken_checkpoint_and_another_corpus(tmp_path, books):
    train("output=run")
    checkpoint = tmp_path / "run" / runs.CHECKPOINT_FOLDER / "last.ckpt"
    whole = checkpoint.read_bytes()
    (tmp_path / "run/result.json").unlink()  # as if it were not finished

    def resume():
        with pytest.raises(SystemExit) as stop:
            run_command("python train.py resume=run")
        return stop.value.code

    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert "last.ckpt is truncated or not a checkpoint" in resume()
    checkpoint.unlink()
    assert "there is no checkpoint run/checkpoints/last.ckpt" in resume()
    checkpoint.write_bytes(whole)
    (books / "0.txt").write_text("something else")
    assert "run was made with corpus" in resume()
    for facts in ("[]", '{"corpus":'):
        (tmp_path / "run/provenance.json").write_text(facts)
        assert "run/provenance.json is missing or damaged" in resume()


def test_a_run_goes_on_where_its_text_has_moved_to(tmp_path, monkeypatch, capsys, books):
    train_until(monkeypatch, 1, "output=run", "train.log_every=1")
    books.rename(tmp_path / "moved")
    moved = ["data=text", "data.path=moved", "data.cache_dir=cache"]
    (tmp_path / "moved/more.txt").write_text("and another document")
    with pytest.raises(SystemExit, match="run was made with corpus .*; bring the old files back"):
        run_command("python train.py resume=run", *moved)
    (tmp_path / "moved/more.txt").unlink()
    run_command("python train.py resume=run", *moved)
    with pytest.raises(SystemExit, match="books does not exist"):
        run_command("python -m flashtrain.evaluate run=run")
    run_command("python -m flashtrain.evaluate run=run", *moved)
    assert "Perplexity of the first L tokens" in capsys.readouterr().out
