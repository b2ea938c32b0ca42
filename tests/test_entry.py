"""From the command line to a Config: what is composed, and the sentence that each mistake ends in."""

import shutil
import sys
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf

from flashtrain import runs
from flashtrain.composition import Root
from flashtrain.config import Config
from flashtrain.entry import CONF, main
from flashtrain.saved_settings import to_yaml


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """settings("key=value", ...) -> the Config that a verb gets; SystemExit on a mistake. In an empty folder."""
    monkeypatch.chdir(tmp_path)

    def compose(*overrides: str) -> Config:
        monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
        received = []
        main(received.append)
        (config,) = received
        return config

    return compose


@pytest.fixture
def mistake(settings, tmp_path):
    """mistake("key=value", ...) -> the sentence on the terminal; nothing may have been written."""

    def sentence(*overrides: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            settings(*overrides)
        assert sorted(tmp_path.rglob("*")) == before
        assert stop.value.code.startswith("error: ")
        return stop.value.code.removeprefix("error: ")

    return sentence


def test_defaults_are_one_run(settings):
    config = settings()
    assert config.model.name == "nano"
    assert config.eval.lengths == [128, 256, 512]
    assert config.train.tokens_per_step % config.train.sequence_length == 0


def test_learned_positions_end_the_lengths_to_evaluate(settings):
    assert settings("model=gpt2", "train.sequence_length=1024").eval.lengths[-1] == 1024


def test_every_choice_of_every_group_composes(settings):
    choices = [f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml")]
    assert len(choices) > 20
    for choice in choices:
        alone = "train.init_from=null"  # or a run
        needed = {
            "data=text": ["data.path=books"],
            "experiment=extend": [alone, "model.rope.original_length=2048"],
            "experiment=extend_theta": [alone],
        }
        settings(choice, *needed.get(choice, []))


GROUPS = ["model", "attention", "data", "optimizer", "schedule", "trainer", "train", "eval", "generate", "logger"]


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_key_is_answered_with_the_nearest(mistake, settings, group):
    name = list(vars(getattr(settings(), group)))[-1]
    typo = f"{group}.{name}x=1"
    expected = f"there is no setting {group}.{name}x; did you mean {group}.{name}?"
    assert mistake(typo) == expected
    assert mistake(f"+{typo}") == expected


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sed=1"], "there is no setting sed; did you mean seed?"),
        (["modle=nano"], "there is no setting modle; did you mean model?"),
        (["compile=true"], "there is no setting compile; did you mean trainer.compile?"),
        (["+rope=1"], "there is no setting rope; did you mean model.rope or eval.rope?"),
        (["+bogus=1"], "there is no setting bogus; allowed are model, attention,"),
        (["model=gpt3"], "there is no model=gpt3; did you mean model=gpt2? allowed are gpt2,"),
        (["attention=flash_v3"], "there is no attention=flash_v3; did you mean attention=flash_v2?"),
        (["train.steps=many"], "train.steps: Value 'many' of type 'str' could not be converted to Integer"),
        (["train.steps=0"], "train.steps is 0; it must be at least 1"),
        (["data=text"], "data.path has no value; say data.path=..."),
        (["data.path=x"], "there is no setting data.path; allowed are data.source,"),
        (["model.hidden_size=0"], "model.hidden_size=0 must be above zero"),
        (["generate.temperature=nan"], "generate.temperature is nan; it must be 0 or more and finite"),
        (["optimizer.learning_rate=inf"], "optimizer.learning_rate=inf must be above 0 and finite"),
        (["data.source=text"], "data.source is text, which chooses nothing; say data=stdlib or text"),
        (["optimizer.name=muon"], "optimizer.name is muon, which chooses nothing; say optimizer=adamw or muon"),
        (["optimizer.momentum=0.9"], "there is no setting optimizer.momentum; allowed are optimizer.name,"),
        (["schedule=constant", "schedule.final_fraction=0.1"], "there is no setting schedule.final_fraction;"),
        (["schedule=wsd", "schedule.warmup_fraction=0.9"], "schedule.warmup_fraction=0.9 and schedule.decay_fraction="),
        (["seed=-1"], "seed is -1; it must be at least 0 and below 4294967296"),
        (
            ["train.tokens_per_step=1000"],
            "train.tokens_per_step is 1000 and no multiple of train.sequence_length 256; the next that is: "
            "train.tokens_per_step=1024",
        ),
        (
            ["model=gpt2", "train.sequence_length=2048"],
            "train.sequence_length is 2048 and the model's learned positions end at 1024; lower it, or say "
            "model.positions=rope",
        ),
        (["run="], "run= names nothing, as an unset variable does; say run=DIR, or leave it out"),
        (["output=", "resume=auto"], "output= names nothing"),
        (["resume="], "resume= names nothing"),
        (["resume=a", "run=b"], "resume and run are set together;"),
        (["output=a", "resume=b"], "output and resume are set together;"),
        (["output=a", "resume=./auto"], "output and resume are set together;"),
        (["output=a", "run=b", "resume=auto"], "output and run are set together;"),
        (["resume=auto"], "resume=auto is for a run whose folder is given: say output=DIR too; a folder of that name"),
        (["resume=a/checkpoints/last.ckpt"], "a is not the folder of a run: it has no config.yaml"),
        (["train.keep_last=-1"], "train.keep_last is -1; it must be at least 0"),
        (["train.milestone_every=0"], "train.milestone_every is 0; it must be at least 1"),
        (["run=nowhere"], "nowhere is not the folder of a run: it has no config.yaml"),
        (["train.steps=[1"], "train.steps=[1 cannot be read ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_ends_in_one_sentence(mistake, overrides, sentence):
    assert mistake(*overrides).startswith(sentence)


def test_contradictions_are_told_together(mistake):
    told = mistake("train.tokens_per_step=1000", "optimizer.beta1=2", "model.num_heads=5", "generate.top_k=0")
    for key in ("train.tokens_per_step", "optimizer.beta1", "model.num_heads", "generate.top_k"):
        assert key in told


def test_unknown_key_in_a_group_file_names_the_file(tmp_path, mistake, monkeypatch):
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "model" / "nano.yaml").write_text((conf / "model" / "nano.yaml").read_text() + "num_layerz: 3\n")
    (conf / "experiment" / "typo.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    monkeypatch.setattr("flashtrain.entry.CONF", conf)
    assert mistake() == "conf/model/nano.yaml: there is no setting model.num_layerz; did you mean model.num_layers?"
    told = mistake("model=gpt2", "experiment=typo")
    assert told == "conf/experiment/typo.yaml: there is no setting train.stepz; did you mean train.steps?"


@pytest.fixture
def saved_run(settings, tmp_path):
    """The folder of a run made with settings other than the defaults."""
    folder = tmp_path / "saved"
    folder.mkdir()
    made = settings("model.num_layers=2", "attention=standard", "train.steps=7", "data=text", "data.path=books")
    (folder / runs.CONFIG_FILE).write_text(to_yaml(made))
    return folder


def test_a_saved_run_brings_its_settings(settings, saved_run):
    for key in ("run", "resume"):
        config = settings(f"{key}={saved_run}", "attention=sdpa_math", "eval.max_documents=3", "train.steps=7")
        assert (config.model.num_layers, config.train.steps, config.data.path) == (2, 7, "books")
        assert (config.attention.variant, config.eval.max_documents) == ("sdpa_math", 3)
        assert getattr(config, key) == str(saved_run)


def test_a_saved_run_brings_its_optimizer_and_schedule(settings, mistake, tmp_path):
    made = settings("optimizer=muon", "optimizer.momentum=0.9", "schedule=wsd")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / runs.CONFIG_FILE).write_text(to_yaml(made))
    config = settings("resume=saved")
    assert config.optimizer == made.optimizer and config.schedule == made.schedule
    assert config.optimizer.matrix_learning_rate == config.optimizer.learning_rate
    assert "schedule.name is wsd there and constant here" in mistake("resume=saved", "schedule=constant")


def test_a_saved_run_refuses_other_settings_and_lists_them(mistake, saved_run):
    told = mistake(f"resume={saved_run}", "model.num_layers=3", "train.steps=8", "optimizer.beta1=0.9")
    assert "model.num_layers is 2 there and 3 here; train.steps is 7 there and 8 here; leave them out" in told
    assert "model.hidden_size is 192 there and 768 here" in mistake(f"run={saved_run}", "model=gpt2")
    assert mistake(f"resume={saved_run}", "experiment=gpt2_long").startswith("experiment=... makes a new run;")


def test_what_a_saved_run_reads_may_have_moved(settings, mistake, saved_run):
    places = {"data.path": "elsewhere", "data.tokenizer": "tokenizer.json", "data.cache_dir": "/scratch"}
    same = [f"resume={saved_run}", "data=text"]
    config = settings(*same, *(f"{key}={place}" for key, place in places.items()))
    assert (config.data.path, config.data.tokenizer, config.data.cache_dir) == tuple(places.values())
    config = settings(*same, "data={path: elsewhere}", "data.cache_dir=/scratch")
    assert (config.data.path, config.data.tokenizer, config.data.cache_dir) == ("elsewhere", "bytes", "/scratch")
    assert settings(*same).data.path == "books"
    told = mistake(*same, "data.path=elsewhere", "data.column=body")
    assert "data.column is None there and body here; leave them out" in told and told.count("data.path") == 1
    assert "data.source is text there and stdlib here" in mistake(f"resume={saved_run}", "data=stdlib")
    same = ["model.num_layers=2", "train.steps=7", "data=text"]
    told = mistake(*same, f"output={saved_run}", "resume=auto", "data.path=x")
    assert "data.path is books there and x here; give those that are there" in told


def test_a_word_takes_the_settings_of_the_command_line_which_are_those_of_the_run(settings, mistake, saved_run):
    same = ["model.num_layers=2", "train.steps=7", "data=text", "data.path=books", f"output={saved_run}", "resume=auto"]
    config = settings(*same, "attention=sdpa_math", "eval.max_documents=3")
    assert (config.attention.variant, config.eval.max_documents, config.output) == ("sdpa_math", 3, str(saved_run))
    for word in ("auto", "must", "never"):
        told = mistake(*same, "train.steps=8", "optimizer=muon", "data.column=body", f"resume={word}")
        assert told.startswith(f"{saved_run} was made with other settings: ")
        assert "data.column is None there and body here; " in told and "train.steps is 7 there and 8 here; " in told
        assert "optimizer.name is adamw there and muon here; " in told and "or another output, " in told
    assert settings(f"output={saved_run}/other", "resume=auto").train.steps != 7


def test_a_damaged_config_of_a_run_is_a_mistake(mistake, saved_run):
    path = saved_run / runs.CONFIG_FILE
    values = OmegaConf.load(path)
    values.train.stepz = 3
    OmegaConf.save(values, path)
    assert "does not fit the settings of this version: Key 'stepz' not in 'TrainConfig'" in mistake(f"run={saved_run}")
    del values.train.stepz, values.model.windows, values.train.steps
    OmegaConf.save(values, path)
    assert "the settings of this version: give it model.windows, train.steps" in mistake(f"run={saved_run}")


def test_sweep_settles_each_job(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--multirun", "attention=standard,sdpa_math", "seed=1,2"])
    received = []
    main(received.append)
    assert [(c.attention.variant, c.seed) for c in received] == [
        ("standard", 1), ("standard", 2), ("sdpa_math", 1), ("sdpa_math", 2),
    ]  # fmt: skip


def test_jobs_of_a_sweep_do_not_share_an_output(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shared = ["train.py", "--multirun", "seed=1,2", "output=runs/a", "resume=auto"]
    monkeypatch.setattr(sys, "argv", shared)
    received = []
    with pytest.raises(SystemExit, match="output=runs/a has another job of this sweep; sweep output too"):
        main(received.append)
    assert len(received) == 1


def test_a_bug_keeps_its_trace(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def verb(config):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(verb)


@dataclass
class TeaConfig:
    leaves: list[str]
    minutes: int

    def validate(self) -> list[str]:
        return [] if self.minutes > 0 else [f"minutes is {self.minutes}; it must be at least 1"]


@pytest.fixture
def tea(monkeypatch, tmp_path):
    """tea("key=value", ...) -> what the verb of a command with a root of its own gets, a sweep's jobs too."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "tea.yaml").write_text("defaults: [schema, quiet, _self_]\nleaves: [green]\nminutes: 3\n")
    monkeypatch.setattr("flashtrain.entry.CONF", conf)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def compose(*overrides: str) -> list[TeaConfig]:
        monkeypatch.setattr(sys, "argv", ["tea", *overrides])
        received = []
        main(received.append, Root("tea", TeaConfig))
        return received

    return compose


def test_a_command_may_have_settings_of_its_own(tea, tmp_path, capsys):
    assert tea("leaves=[black,oolong]") == [TeaConfig(["black", "oolong"], 3)]
    assert not list((tmp_path / "empty").iterdir())
    assert [config.minutes for config in tea("--multirun", "minutes=1,2")] == [1, 2]
    with pytest.raises(SystemExit) as stop:
        tea("--help")
    assert not stop.value.code
    assert "minutes: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("minute=4", "there is no setting minute; did you mean minutes?"),
        ("+minute=4", "there is no setting minute; did you mean minutes?"),
        ("model=nano", "there is no setting model; allowed are leaves, minutes"),
        ("train.steps=2", "there is no setting train; allowed are leaves, minutes"),
        ("minutes=0", "minutes is 0; it must be at least 1"),
        ("minutes=many", "minutes: Value 'many' of type 'str' could not be converted to Integer"),
        ("leaves=green", "leaves takes a list, as in leaves=[...]"),
    ],
)
def test_a_command_refuses_the_settings_of_another(tea, override, sentence):
    with pytest.raises(SystemExit) as stop:
        tea(override)
    assert stop.value.code == f"error: {sentence}"
