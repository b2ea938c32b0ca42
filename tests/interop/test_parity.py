"""Models of random weights compute the same logits here and in transformers, whichever way they went."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from presets import preset
from safetensors.torch import load_file, save_file
from tiny_checkpoint import load_checkpoint

from flashtrain.interop.folder import write_checkpoint
from flashtrain.interop.settings import write_settings
from flashtrain.interop.tensors import export_weights
from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.model.head import next_logits
from flashtrain.model.rope_options import RopeOptions

STANDARD = partial(attention, variant="standard")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}
TOKENS = torch.randint(100, (2, 96), generator=torch.Generator().manual_seed(0))


def rope(kind, theta=10000.0, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


LENGTH = {"original_max_position_embeddings": 32}
CONFIGS = {
    "gpt2": transformers.GPT2Config(**GPT2_SIZES),
    "gpt2-untied": transformers.GPT2Config(**GPT2_SIZES, tie_word_embeddings=False, n_inner=80),
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-tied-grouped": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama-whole-heads": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4, "head_dim": 16}),
    "llama-bias": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "llama-theta": transformers.LlamaConfig(**SIZES, **rope("default", 500.0)),
    "llama-linear": transformers.LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama-dynamic": transformers.LlamaConfig(**SIZES, **rope("dynamic", factor=2.0)),
    "llama-yarn": transformers.LlamaConfig(**SIZES, **rope("yarn", factor=4.0, **LENGTH)),
    "llama-yarn-mscale": transformers.LlamaConfig(
        **SIZES, **rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5, truncate=False, beta_fast=8, **LENGTH)
    ),
    "llama-llama3": transformers.LlamaConfig(
        **SIZES, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **LENGTH)
    ),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=7),
    "mistral-all-keys": transformers.MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-windows": transformers.Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3-layer-types": transformers.Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def their_model(config):
    """Every parameter drawn, norms and biases too, so that none can go wrong unseen."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or ".ln_" in name else 0.0, std=0.3)
    return model.eval()


@torch.no_grad()
def our_logits(model, tokens=TOKENS):
    hidden = model(tokens)
    return next_logits(hidden.flatten(0, 1), model.head_weight, model.options.vocab_size).view(*tokens.shape, -1)


@torch.no_grad()
def their_logits(model, tokens=TOKENS):
    return model(tokens, use_cache=False).logits


def is_llama_by_another_name(config):
    return config.model_type == "mistral" and config.sliding_window is None


def export(model, folder, training_length=64):
    family, settings = write_settings(model.options, training_length, prefix_id=0)
    folder.mkdir()
    write_checkpoint(folder, settings, export_weights(family, model.options, model.state_dict()))


@each_config
def test_an_imported_model_has_the_logits_of_transformers_and_goes_back_unchanged(config, tmp_path):
    theirs = their_model(config)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_checkpoint(tmp_path / "in", STANDARD)
    expected = their_logits(theirs)
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(ours), expected, rtol=0, atol=1e-4)

    export(ours, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert back.config.model_type == ("llama" if is_llama_by_another_name(config) else config.model_type)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    torch.testing.assert_close(their_logits(back), expected, rtol=0, atol=1e-5)


def test_gpt2_as_its_authors_published_it(tmp_path):
    """Names without a prefix, and causal masks among the tensors."""
    theirs = their_model(CONFIGS["gpt2"])
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 96, 96).tril() for layer in range(3)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    torch.testing.assert_close(our_logits(load_checkpoint(tmp_path, STANDARD)), their_logits(theirs), rtol=0, atol=1e-4)


EXPORTED = {
    "nano": (preset("nano"), "qwen3"),
    "nano-windows": (preset("nano", windows=[8, None]), "qwen3"),
    "gpt2": (preset("gpt2", max_positions=96), "gpt2"),
    "llama": (preset("llama_160m"), "llama"),
    "one-window": (preset("llama_160m", windows=[8]), "mistral"),
    "uneven-heads": (preset("llama_160m", num_heads=3, head_dim=8), "mistral"),
    "ntk": (preset("llama_160m", rope=RopeOptions("ntk", 1e4, 4.0)), "llama"),
    "dynamic": (preset("llama_160m", rope=RopeOptions("dynamic", 1e4, 4.0, 40)), "llama"),
    "yarn": (preset("llama_160m", rope=RopeOptions("yarn", 1e4, 4.0, 40, attention_factor=1.5)), "llama"),
}


@pytest.mark.parametrize(("options", "model_type"), EXPORTED.values(), ids=EXPORTED)
def test_an_exported_model_has_the_same_logits_in_transformers(options, model_type, tmp_path):
    torch.manual_seed(0)
    small = {"num_layers": 2, "hidden_size": 32, "num_heads": options.num_heads if options.head_dim else 4}
    ours = GPT(replace(options, **small, mlp_hidden_size=None, vocab_size=100), STANDARD)
    for name, parameter in ours.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.3)
    export(ours, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert theirs.config.model_type == model_type
    torch.testing.assert_close(their_logits(theirs), our_logits(ours), rtol=0, atol=1e-4)
    assert torch.equal(our_logits(load_checkpoint(tmp_path / "out", STANDARD)), our_logits(ours))
