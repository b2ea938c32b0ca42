"""Checkpoints whose files or tensors are not those of the model that their config.json tells of."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import load_checkpoint, save_checkpoint

from flashtrain.errors import UserError

FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "hub")
    return tmp_path / "hub"


def weights_of(folder):
    return load_checkpoint(folder, attention=None).state_dict()


def change(folder: Path, edit):
    """Edit the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_padding_of_the_vocabulary_is_zeros(folder):
    weights = weights_of(folder)
    for name in ("token_embedding.weight", "head.weight"):
        assert weights[name].shape == (320, 32)
        assert (weights[name][300:] == 0).all() and (weights[name][:300] != 0).all()


def test_a_single_file_counts_before_an_index(folder):
    expected = weights_of(folder)
    save_file({"other": torch.zeros(1)}, folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"other": "part.safetensors"}}')
    found = weights_of(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_sixteen_bit_tensors_become_float32(folder):
    exact = weights_of(folder)
    change(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    for name, tensor in weights_of(folder).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, exact[name].bfloat16().float())


def test_buffers_of_older_checkpoints_and_names_without_a_prefix_change_nothing(folder):
    expected = weights_of(folder)

    def as_before(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    change(folder, as_before)
    found = weights_of(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(folder, without_prefix)
    found = weights_of(folder)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def edited(tensors, name, tensor):
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        (FIRST, None, f"hub lacks tensors of the model in its config.json: {FIRST}"),
        ("score.weight", torch.ones(2), "hub has tensors that the model in its config.json has not: score.weight"),
        (FIRST, torch.ones(32, 16), f"{FIRST} is (32, 16) and (32, 32) by its config.json; one of them is wrong"),
        (FIRST, torch.ones(32, 32, dtype=torch.int8), f"{FIRST} is of torch.int8, as in quantized checkpoints"),
    ],
    ids=["missing", "other", "shape", "quantized"],
)
def test_other_tensors_than_the_models_are_refused(folder, name, tensor, sentence):
    change(folder, lambda tensors: edited(tensors, name, tensor))
    with pytest.raises(UserError) as refused:
        weights_of(folder)
    assert sentence in str(refused.value)


def test_a_tied_head_is_the_embedding_or_refused(folder):
    set_config(folder, tie_word_embeddings=True)
    with pytest.raises(UserError, match="hub has a lm_head.weight of its own and tie_word_embeddings in its config"):
        weights_of(folder)
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in weights_of(folder)


def test_pickles_are_not_read(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="neither model.safetensors nor .*pickled ones .* are not read"):
        weights_of(folder)


def test_files_that_are_missing_damaged_or_elsewhere_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {FIRST: "part.safetensors", "lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(UserError, match="gone.safetensors is missing or damaged .*; fetch it again"):
        weights_of(folder)
    index.write_text(json.dumps({"weight_map": {FIRST: "../part.safetensors"}}))
    with pytest.raises(UserError, match="names ../part.safetensors, which is not in .*hub; move it there"):
        weights_of(folder)
    for places in ([], {FIRST: 3}):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(UserError, match="index.json does not say in which file each tensor is; fetch it again"):
            weights_of(folder)
    index.write_text("{")
    with pytest.raises(UserError, match="index.json is no JSON"):
        weights_of(folder)
    index.unlink()
    whole = (folder / "part.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match="model.safetensors is missing or damaged"):
        weights_of(folder)
