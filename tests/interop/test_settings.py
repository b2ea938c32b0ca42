"""What of a config.json is taken, what it means where it is absent, and what is refused by its name."""

import pytest
import transformers
from presets import NAMES, preset

from flashtrain.errors import UserError
from flashtrain.interop.settings import read_settings, write_settings
from flashtrain.model.rope_options import RopeOptions

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}


def read(**settings):
    _, options, length = read_settings(settings, "config.json", "imported")
    return options.resolve(), length


def test_what_is_absent_is_as_transformers_has_it():
    configs = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen3": transformers.Qwen3Config,
    }
    for family, config in configs.items():
        settings = LLAMA | {"model_type": family, "num_attention_heads": 32}
        theirs, (options, length) = config(**settings), read(**settings)
        assert length == 64
        assert options.num_kv_heads == theirs.num_key_value_heads
        assert options.head_dim == theirs.head_dim
        assert options.norm_eps == theirs.rms_norm_eps
        assert options.tie_embeddings == theirs.tie_word_embeddings
        assert options.rope == RopeOptions("default", theirs.rope_parameters["rope_theta"])
        assert options.windows == 3 * [getattr(theirs, "sliding_window", None)]
    theirs = transformers.GPT2Config(**GPT2)
    options, length = read(**GPT2)
    assert (options.norm_eps, options.tie_embeddings) == (theirs.layer_norm_epsilon, theirs.tie_word_embeddings)
    assert (length, options.max_positions, options.mlp_hidden_size) == (96, 96, 128)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.MistralConfig(),
        transformers.Qwen3Config(),
        transformers.GPT2Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_nothing_that_transformers_writes_is_unknown(config):
    read(**config.to_dict())


def test_settings_of_a_published_file_are_read():
    """SmolLM2-135M's, as its authors wrote them."""
    options, length = read(
        **LLAMA
        | {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
            "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.041666666666666664,
            "is_llama_config": True, "num_key_value_heads": 1, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        }
    )  # fmt: skip
    assert (options.num_kv_heads, options.tie_embeddings, options.norm_eps, length) == (1, True, 1e-5, 64)
    assert options.rope == RopeOptions("default", 1e5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (LLAMA | {"model_type": "gemma3"}, "config.json is of model_type gemma3; allowed are gpt2, llama, mistral, q"),
        ({**LLAMA, "model_type": None}, "config.json has no model_type, which tells what the model is; add it"),
        ({**LLAMA, "hidden_size": None}, "config.json has no hidden_size, which tells what the model is; add it"),
        ({**LLAMA, "model_type": ["llama"]}, "config.json has model_type=['llama'], which is not text; correct it"),
        (LLAMA | {"model_type": "qwen3", "num_hidden_layers": "x"}, "num_hidden_layers='x', which is not a whole num"),
        (LLAMA | {"max_position_embeddings": 0}, "config.json says that the model takes 0 tokens in a row; correct it"),
        (LLAMA | {"tie_word_embeddings": 1}, "config.json has tie_word_embeddings=1, which is not true or false;"),
        (LLAMA | {"hidden_act": "gelu"}, "config.json has hidden_act=gelu, which no model here can do; allowed is"),
        (LLAMA | {"attention_bias": True}, "attention_bias=True and mlp_bias=False; a model here has both or neither"),
        (LLAMA | {"sliding_window": 5}, "may change what the model computes: sliding_window=5; remove them"),
        (LLAMA | {"auto_map": {"AutoModel": "a.B"}}, "may change what the model computes: auto_map={'AutoModel': 'a"),
        (LLAMA | {"quantization_config": {"bits": 4}, "mup": 2}, "computes: mup=2, quantization_config={'bits': 4};"),
        (LLAMA | {"model_type": "qwen3", "attention_bias": True}, "has attention_bias=True, which no model here can"),
        (LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"]}, "allowed are 3 of full_attention with"),
        (
            LLAMA | {"model_type": "qwen3", "layer_types": 3 * ["sliding_attention"]},
            "layer_types=['sliding_attention', 'sliding_attention', 'sliding_attention']; allowed are 3 of full_att",
        ),
        (GPT2 | {"activation_function": "relu"}, "has activation_function=relu, which no model here can do; allowed"),
        (GPT2 | {"scale_attn_weights": False}, "config.json has scale_attn_weights=False, which no model here can do"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "config.json has scale_attn_by_inverse_layer_idx=True"),
        (GPT2 | {"add_cross_attention": True}, "config.json has add_cross_attention=True, which no model here can do"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_compute_something_else_is_refused_by_name(settings, sentence):
    with pytest.raises(UserError) as refused:
        read(**settings)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_can_be_exported(name):
    _, settings = write_settings(preset(name, vocab_size=50257).resolve(), 1024, prefix_id=0)
    _, options, length = read_settings(settings, "config.json", name)
    assert options.resolve() == preset(name, vocab_size=50257).resolve()
    assert length == 1024


@pytest.mark.parametrize(
    ("options", "against"),
    [
        (preset("llama_160m", windows=[8, None]), "llama has no model.windows=["),
        (preset("nano", windows=[8, 16, None]), "qwen3 has no model.windows=["),
        (preset("gpt2", num_kv_heads=3), "gpt2 has no model.num_kv_heads=3; llama has no model.norm=layernorm,"),
        (preset("gpt2", head_dim=32), "gpt2 has no model.head_dim=32;"),
        (preset("gpt2", windows=[8]), "gpt2 has no model.windows=["),
        (preset("gpt2", positions="rope"), "gpt2 has no model.positions=rope; llama has no model.norm=layernorm,"),
        (preset("llama_160m", bias=True, qk_norm=True), "qwen3 has no model.bias=True"),
        (preset("llama_160m", bias=True, num_heads=7, head_dim=64), "model.hidden_size=768 with model.num_heads=7;"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_family_expresses_is_refused_with_what_stands_against_each(options, against):
    with pytest.raises(UserError) as refused:
        write_settings(options.resolve(), 64, prefix_id=0)
    assert against in str(refused.value)
