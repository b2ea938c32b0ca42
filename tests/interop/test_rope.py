"""Rotary settings of Hugging Face, old and new: what is read, what comes back, and what transformers makes of it."""

import math

import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashtrain.errors import UserError
from flashtrain.interop.fields import Fields
from flashtrain.interop.rope import read_rope, rope_parameters
from flashtrain.model.rope import inverse_frequencies
from flashtrain.model.rope_options import RopeOptions

SCALINGS = {
    "default": RopeOptions("default", 5e5),
    "linear": RopeOptions("linear", 1e4, 8.0),
    "ntk": RopeOptions("ntk", 1e4, 8.0),
    "dynamic": RopeOptions("dynamic", 1e4, 2.0, 4096),
    "yarn": RopeOptions("yarn", 1e4, 16.0, 2048),
    "yarn-otherwise": RopeOptions(
        "yarn", 1e6, 4.0, 1000, beta_fast=20.0, beta_slow=2.0, truncate=False, attention_factor=1.3
    ),
    "yarn-short": RopeOptions("yarn", 1e4, 2.0, 3),
    "llama3": RopeOptions("llama3", 5e5, 8.0, 2048, low_freq_factor=2.0, high_freq_factor=6.0),
}


def read(max_positions=4096, **settings):
    fields = Fields(settings, "config.json")
    rope = read_rope(fields, max_positions)
    fields.refuse_others()
    return rope


@pytest.mark.parametrize("length", [100, 4096, 20_000])
@pytest.mark.parametrize("rope", SCALINGS.values(), ids=SCALINGS)
def test_transformers_computes_the_same_from_what_is_written(rope, length):
    rope = rope.resolve()
    config = transformers.LlamaConfig(
        num_attention_heads=1,
        hidden_size=96,
        max_position_embeddings=4096,
        rope_parameters=rope_parameters(rope, head_dim=96),
    )
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, attention_factor = compute(config, device="cpu", seq_len=length)
    actual = inverse_frequencies(rope, 96, length)
    assert actual.tolist() == pytest.approx(expected.tolist(), rel=2e-6)
    assert attention_factor == pytest.approx(rope.attention_factor or 1.0, rel=1e-12)


@pytest.mark.parametrize("rope", [rope for rope in SCALINGS.values() if rope.type != "ntk"], ids=lambda rope: rope.type)
def test_what_is_written_is_read_again(rope):
    rope = rope.resolve()
    assert read(rope_parameters=rope_parameters(rope, 96)) == rope


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({}, RopeOptions("default", 1e4)),
        ({"rope_theta": 500000, "rope_scaling": None}, RopeOptions("default", 5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeOptions("llama3", 5e5, 8.0, 2048, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeOptions("linear", 1e4, 2.0)),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}}, RopeOptions("yarn", 1e4, 4.0, 1024)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeOptions("dynamic", 1e4, 2.0, 4096)),
        (
            {"rope_scaling": {"type": "yarn", "truncate": None, **YARN}},
            RopeOptions("yarn", 1e4, 4.0, 1024, truncate=False),
        ),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": {"type": "yarn", **YARN}},
            RopeOptions("yarn", 1e4, 4.0, 512),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "mscale": 0.7, "mscale_all_dim": 0.4, **YARN}},
            RopeOptions(
                "yarn", 1e6, 4.0, 1024,
                attention_factor=(0.07 * math.log(4) + 1) / (0.04 * math.log(4) + 1),
            ),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 7.0}}},
            RopeOptions("default", 7.0),
        ),
    ],
    ids=["absent", "theta", "llama3", "type", "both-names", "dynamic", "null", "length-outside", "mscale", "by-layer"],
)  # fmt: skip
def test_sglang_26187_both_layouts_are_read(settings, rope):
    assert read(**settings) == rope


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "config.json: rope_scaling is of type longrope; allowed are default,"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "config.json: rope_parameters is of type ntk; allowed are default"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "has no original_max_position_embeddings, the tokens in"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor, which tells what the model is; add it"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "not known here .*: beta_fast=3;"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, **YARN}}, "original_max_position_embeddings=1024, which"),
        ({"rope_scaling": "linear"}, "config.json has rope_scaling='linear', which is not a group of settings"),
        ({"rope_theta": "x"}, "config.json has rope_theta='x', which is not a number; correct it"),
        ({"partial_rotary_factor": 0.5}, "config.json has partial_rotary_factor=0.5, which no model here can do"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "config.json: rope_parameters has partial_rotary_factor"),
        ({"rope_interleaved": True}, "config.json has rope_interleaved=True"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 8.0}}},
            "rope_parameters are not the same for full_attention, sliding_attention",
        ),
    ],
    ids=str,
)
def test_what_would_compute_something_else_is_refused_by_name(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        read(**settings)
