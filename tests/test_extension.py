"""A run that starts from the weights of another, at another length and with other rotary positions."""

import json

import pytest
import torch
from commands import SMALL, run_command
from omegaconf import OmegaConf
from tiny_checkpoint import tokenizer

YARN = "model.rope.type=yarn model.rope.factor=4"
LONGER = "train.sequence_length=256 train.tokens_per_step=256 train.steps=1 optimizer.learning_rate=1e-12"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with `books` and `short`, a run trained on rows of 64 tokens of them."""
    home = tmp_path_factory.mktemp("home")
    (home / "books").mkdir()
    for number in range(8):
        (home / f"books/{number}.txt").write_text(" ".join(f"{number} times {i} is {number * i}." for i in range(99)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train("output=short")
    return home


@pytest.fixture(autouse=True)
def in_home(home, monkeypatch):
    monkeypatch.chdir(home)


def train(*words):
    """Later words win."""
    given = [word for line in words for word in line.split()]
    keys = {word.split("=")[0] for word in given}
    small = [word for word in SMALL if word.split("=")[0] not in keys]
    run_command("python train.py data=text data.path=books logger=none", *small, *given)


def weights_of(folder, name="last"):
    return torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"]


def report_of(folder):
    return json.loads((folder / "evaluation/final/perplexity.json").read_text())


def test_training_goes_on_at_another_length_with_other_positions(home, caplog):
    train(f"output=longer train.init_from=short {LONGER} {YARN} eval.lengths=[65,256]")
    assert "start: a new run, from the weights of short after step 4" in caplog.text
    before, after = weights_of(home / "short"), weights_of(home / "longer")
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-9)
    saved = OmegaConf.load(home / "longer/config.yaml")
    assert (saved.train.init_from, saved.train.pretrained_length) == ("short", 64)
    assert saved.model.rope.original_length == 64, "the other run's length"
    assert json.loads((home / "longer/provenance.json").read_text())["initial_weights"]
    conditions = report_of(home / "longer")["conditions"]
    assert conditions["training_length"] == 256
    assert conditions["positions"].startswith("yarn RoPE (theta 10000.0, factor 4.0, original_length 64,")
    run_command("python -m flashtrain.evaluate run=short eval.lengths=[65,256]")
    run_command("python -m flashtrain.evaluate runs=[short,longer] output=compared")
    assert (home / "compared/comparison.png").exists()


def test_the_first_step_has_the_loss_that_the_other_run_ends_with(home):
    """Not that of drawn weights, ln 257 = 5.5; the step's own loss is of the weights before it."""
    train(f"output=same train.init_from=short {LONGER} train.sequence_length=64 train.tokens_per_step=128")
    ended = json.loads((home / "short/result.json").read_text())["validation_loss"]
    began = json.loads((home / "same/result.json").read_text())["validation_loss"]
    assert began == pytest.approx(ended, abs=1e-6)


def test_one_of_its_checkpoints_may_be_named(home, caplog):
    train("output=kept train.checkpoint_every=1 train.keep_last=4")
    train(f"output=from_two train.init_from=kept/checkpoints/step-2.ckpt {LONGER}")
    assert "from the weights of kept/checkpoints/step-2.ckpt after step 2" in caplog.text
    began, expected = weights_of(home / "from_two"), weights_of(home / "kept", "step-2")
    name = "model.blocks.0.mlp.down.weight"
    torch.testing.assert_close(began[name], expected[name], rtol=0, atol=1e-9)
    assert (weights_of(home / "kept")[name] - expected[name]).abs().max() > 1e-6


def test_the_extended_run_is_resumed_without_the_first(home, capsys):
    (home / "short").rename(home / "moved")
    try:
        train("output=twice train.init_from=moved")
        (home / "moved").rename(home / "short")
        (home / "twice/result.json").unlink()
        run_command("python train.py resume=twice")
        assert "validation loss: " in capsys.readouterr().out
        (home / "twice/result.json").unlink()
        train("output=twice resume=auto train.init_from=moved")
        assert "validation loss: " in capsys.readouterr().out
        with pytest.raises(SystemExit, match="twice was made with other settings: train.init_from is moved there"):
            train("output=twice resume=auto train.init_from=elsewhere")
    finally:
        if (home / "moved").exists():
            (home / "moved").rename(home / "short")


def test_an_extension_is_continued_and_extended_from_the_length_before_any_scaling():
    train(f"output=scaled train.init_from=short {LONGER} {YARN} eval.lengths=[65,256]")
    train(f"output=scaled train.init_from=short {LONGER} {YARN} eval.lengths=[65,256] resume=auto")
    train(f"output=further train.init_from=scaled {LONGER} {YARN} model.rope.factor=8 eval.lengths=[65,256]")
    rope = OmegaConf.load("further/config.yaml").model.rope
    assert (rope.type, rope.factor, rope.original_length) == ("yarn", 8.0, 64)


def test_the_longest_training_counts(home):
    train(f"output=shorter train.init_from=short {LONGER} train.sequence_length=32 train.tokens_per_step=64")
    assert report_of(home / "shorter")["conditions"]["training_length"] == 64


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train.init_from=", "train.init_from= has no weights to start from: . is not the folder of a run"),
        ("train.init_from=nowhere", "init_from=nowhere has no weights to start from: nowhere is not the folder of a"),
        ("train.init_from=short/checkpoints/step-9.ckpt", "there is no checkpoint short/checkpoints/step-9.ckpt"),
        (
            "train.init_from=short model.num_layers=2 model.qk_norm=false",
            "train.init_from=short is of another model: model.num_layers is 1 there and 2 here; model.qk_norm is True "
            "there and False here; give the settings that it was trained with",
        ),
        ("train.init_from=short model.num_heads=2", "model.num_heads is 1 there and 2 here"),
        ("train.init_from=short model=gpt2", "model.positions is rope there and learned here"),
        ("train.init_from=short model.vocab_size=300", "model.vocab_size is 257 there and 300 here"),
        ("train.init_from=short data.tokenizer=other.json", "short was trained with another tokenizer than other.json"),
        ("train.init_from=short train.pretrained_length=9", "train.pretrained_length is not to be chosen"),
        ("train.pretrained_length=9", "train.pretrained_length is not to be chosen, it is that of train.init_from"),
    ],
    ids=lambda value: value if "=" in value and " is " not in value else "",
)
def test_a_mistake_ends_in_one_sentence(home, words, sentence):
    tokenizer().save("other.json")
    with pytest.raises(SystemExit) as stop:
        train(f"output=never {words}")
    assert sentence in stop.value.code
    assert not (home / "never").exists()


def test_the_experiment_wants_the_run():
    with pytest.raises(SystemExit, match="train.init_from=runs/short has no weights to start from: runs/short is not"):
        run_command("python train.py experiment=extend")


def test_an_import_has_its_own_weights():
    with pytest.raises(SystemExit, match="train.init_from is not to be chosen: the model is that of hub"):
        run_command("python -m flashtrain.convert source=hub train.init_from=short")
