"""A checkpoint in Hugging Face's format becomes a run that every command takes, and a run becomes a checkpoint."""

import json
import math
import re
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import SMALL, run_command
from omegaconf import OmegaConf
from tiny_checkpoint import save_checkpoint

TRAINING = "train.tokens_per_step=128 train.steps=2 train.validation_tokens=64 optimizer.learning_rate=1e-12"
IMPORTED = ["source=hub", "data=text", "data.path=books", "trainer=cpu"]
EVALUATED = "eval.lengths=[32,64] eval.targets_per_anchor=16 eval.max_documents=null generate.num_tokens=4"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty working folder but for `books`, eight documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for number in range(8):
        (tmp_path / f"books/{number}.txt").write_text(" the ".join(f"{number} times {i}." for i in range(40)))
    return tmp_path


def convert(*overrides):
    run_command("python -m flashtrain.convert", *overrides)


def sentence_of(*overrides):
    with pytest.raises(SystemExit) as stop:
        convert(*overrides)
    assert stop.value.code.startswith("error: ")
    return stop.value.code.removeprefix("error: ")


def import_books(*overrides):
    convert(*IMPORTED, "output=run", *overrides)


def weights_of(run):
    return torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)["state_dict"]


@torch.no_grad()
def their_losses(model, length):
    """(documents, length - 1) losses in nats, by transformers, of the first tokens of the validation documents."""
    (folder,) = (path for path in Path(".flashtrain/corpora").iterdir() if path.is_dir())
    tokens, offsets = np.fromfile(folder / "validation.tokens", np.uint16), np.load(folder / "validation.offsets.npy")
    documents = [tokens[start : start + length].astype(np.int64) for start in offsets[:-1]]
    tokens = torch.from_numpy(np.stack(documents))
    logits = model(tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")


def test_an_imported_run_is_evaluated_as_transformers_would(home, capsys):
    model = save_checkpoint(home / "hub")
    import_books(*EVALUATED.split(), "data.validation_fraction=0.3")
    said = capsys.readouterr().out
    assert "wrote run: a run with the weights of hub, LlamaForCausalLM, before its first step" in said
    run_command("python -m flashtrain.evaluate run=run")
    (path,) = home.glob("run/evaluation/*/perplexity.json")
    report = json.loads(path.read_text())
    assert report["conditions"]["tokenizer"] == "run/tokenizer.json"
    assert report["conditions"]["model"] == "hub" and report["conditions"]["training_length"] == 64
    for row in report["ppl_at_length"]:
        losses = their_losses(model, row["length"])
        assert row["targets"] == losses.numel()
        assert row["loss"] == pytest.approx(losses.double().mean().item(), rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    run_command("python -m flashtrain.generate run=run generate.prompt=the")
    assert capsys.readouterr().out.splitlines()[-1].startswith("the")
    with pytest.raises(SystemExit, match="eval.rope.type is for an evaluation and changes no sample; leave it out"):
        run_command("python -m flashtrain.generate run=run eval.rope.type=linear")


def test_an_imported_run_is_trained_on_from_its_weights_and_exported(home, capsys):
    model = save_checkpoint(home / "hub", tie_word_embeddings=True)
    import_books(*TRAINING.split(), *EVALUATED.split())
    imported = weights_of("run")
    run_command("python train.py resume=run")
    said = capsys.readouterr().out
    assert "bits per byte: " in said
    trained = weights_of("run")
    assert imported.keys() == trained.keys()
    for name in imported:
        torch.testing.assert_close(trained[name], imported[name], rtol=0, atol=1e-6)
    run_command("python train.py resume=run")
    assert "run has taken all its steps" in capsys.readouterr().out

    convert("run=run", "output=exported", "checkpoint=best")
    assert "wrote exported: LlamaForCausalLM with the weights of run" in capsys.readouterr().out
    back = transformers.AutoModelForCausalLM.from_pretrained("exported", attn_implementation="eager")
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained("exported").encode("the") == [258]


def test_the_length_of_a_checkpoint_outlives_another_of_the_run(home, capsys):
    save_checkpoint(home / "hub")
    import_books(*EVALUATED.split(), *TRAINING.split(), "train.sequence_length=32", "data.validation_fraction=0.3")
    run_command("python -m flashtrain.evaluate run=run eval.rope.type=dynamic eval.rope.factor=2")
    assert "dynamic RoPE (theta 10000.0, factor 2.0, original_length 64)" in " ".join(capsys.readouterr().out.split())
    (path,) = home.glob("run/evaluation/*/perplexity.json")
    assert json.loads(path.read_text())["conditions"]["training_length"] == 64
    convert("run=run", "output=exported")
    assert json.loads((home / "exported/config.json").read_text())["max_position_embeddings"] == 64


def test_settings_in_a_dictionary_are_given_too(home):
    save_checkpoint(home / "hub")
    import_books(*EVALUATED.split(), "train={sequence_length:32,steps:3}")
    saved = OmegaConf.load("run/config.yaml").train
    assert (saved.sequence_length, saved.steps, saved.pretrained_length) == (32, 3, 64)


def test_a_checkpoint_trained_on_longer_rows_is_exported_with_their_length(home):
    save_checkpoint(home / "hub")
    import_books(*EVALUATED.split(), *TRAINING.split(), "train.sequence_length=128", "train.validation_tokens=128")
    convert("run=run", "output=before")
    run_command("python train.py resume=run")
    convert("run=run", "output=after")
    lengths = [
        json.loads((home / name / "config.json").read_text())["max_position_embeddings"] for name in ("before", "after")
    ]
    assert lengths == [64, 128]


def test_shards_are_read_as_one_file(home):
    model = save_checkpoint(home / "hub")
    import_books()
    (home / "hub/model.safetensors").unlink()
    model.save_pretrained(home / "hub", max_shard_size="20KB")
    assert len(list(home.glob("hub/*.safetensors"))) > 2
    import_books("output=sharded")
    whole, sharded = weights_of("run"), weights_of("sharded")
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_run_on_bytes_is_exported_without_a_tokenizer(home, capsys):
    run_command("python train.py data=text data.path=books output=run", *SMALL)
    convert("run=run", "output=exported")
    assert "no tokenizer.json: the tokenizer is bytes, and 256 stands before a document" in capsys.readouterr().out
    assert sorted(path.name for path in (home / "exported").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((home / "exported/config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["bos_token_id"]) == ("qwen3", 257, 256)
    assert transformers.AutoModelForCausalLM.from_pretrained("exported").config.max_position_embeddings == 64


def test_what_no_family_expresses_is_refused_with_the_settings(home):
    run_command("python train.py data=text data.path=books output=run model.attention_softcap=5.0", *SMALL)
    told = sentence_of("run=run", "output=exported")
    assert told.startswith("no family of transformers can express this model: gpt2 has no model.norm=rmsnorm, ")
    assert "; llama has no model.attention_softcap=5.0, model.qk_norm=True; mistral has no" in told
    assert told.endswith("; qwen3 has no model.attention_softcap=5.0")
    assert not (home / "exported").exists()


@pytest.mark.parametrize(
    ("room", "sentence", "words"),
    [
        (4096, r"again/tokenizer.json cannot be written \(.+\); say output=DIR with another place", IMPORTED),
        (50_000, r"cannot write again/checkpoints/last.ckpt \(.+\); make room and start again", IMPORTED),
        (4096, r"again cannot be written \(.+\); make room or say output=DIR with another place", ["run=run"]),
    ],
    ids=["import", "import-weights", "export"],
)
def test_where_the_disk_refuses_nothing_is_left(home, room, sentence, words):
    save_checkpoint(home / "hub")
    import_books()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        told = sentence_of("output=again", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.fullmatch(sentence, told)
    assert not (home / "again").exists()


def test_torchrun_is_refused(home, monkeypatch):
    save_checkpoint(home / "hub")
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert sentence_of("source=hub").startswith("a conversion cannot be started with torchrun; say python -m flashtr")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "what is meant? Say source=CHECKPOINT"),
        (["source=hub", "run=hub"], "what is meant? Say source=CHECKPOINT"),
        (["source=books"], "books is not a checkpoint in Hugging Face's format: it has no config.json"),
        (["run=books"], "books is not the folder of a run"),
        (["source=hub", "model.num_layers=3"], "model.num_layers is not to be chosen: the model is that of hub"),
        (["source=hub", "model=gpt2"], "model is not to be chosen: the model is that of hub"),
        (["source=hub", "train.pretrained_length=9"], "train.pretrained_length is not to be chosen: the model is that"),
        (["source=hub", "experiment=gpt2_long"], "experiment=... brings a model of its own, and this one is that"),
        (["run=books", "eval.rope.type=dynamic", "seed=2"], "eval.rope.type, seed is not for an export, which takes"),
        (["source=hub", "train.sequence_length=0"], "train.sequence_length is 0; it must be at least 1"),
        (["source=hub", "sorce=x"], "there is no setting sorce; did you mean source?"),
        (["source=hub", "output=books", "data=text", "data.path=books"], "output=books exists; name another"),
        (["source=hub", "resume=books", "output=x"], "output and resume are set together"),
        (["source=hub", "checkpoint=best"], "checkpoint=best is not for this command, which takes source and output"),
        (["source=hub", "data.tokenizer=none"], "data.tokenizer=none is no file to be read"),
        (["source=hub", "train.steps=0"], "train.steps is 0; it must be at least 1"),
        (["source=small"], "tokenizer small/tokenizer.json has 259 tokens and the model of small knows 200; name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_leaves_no_folder(home, overrides, sentence):
    save_checkpoint(home / "hub")
    save_checkpoint(home / "small", vocab_size=200)
    assert sentence in sentence_of(*overrides)
    assert {path.name for path in home.iterdir()} <= {"books", "hub", "small", ".flashtrain"}
