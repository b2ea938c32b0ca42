import math

import pytest
from presets import NAMES, preset

from flashtrain.model.rope_options import RopeOptions


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_consistent(name):
    assert preset(name).validate() == []


def test_nulls_are_written_out():
    options = preset("gpt2").resolve()
    assert (options.num_kv_heads, options.head_dim, options.mlp_hidden_size) == (12, 64, 3072)
    assert options.resolve() == options


@pytest.mark.parametrize(
    ("windows", "written_out"),
    [
        (None, [None, None, None, None]),
        ([8], [8, 8, 8, 8]),
        ([8, 8, None], [8, 8, None, 8]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_windows_are_repeated_over_the_layers(windows, written_out):
    assert preset("nano", windows=windows).resolve().windows == written_out


@pytest.mark.parametrize(("hidden_size", "mlp_hidden_size"), [(192, 512), (768, 2048), (4096, 10944)])
def test_swiglu_width_is_eight_thirds_rounded_up(hidden_size, mlp_hidden_size):
    options = preset("nano", hidden_size=hidden_size)
    assert options.resolve().mlp_hidden_size == mlp_hidden_size


def test_gpt2_takes_rope_by_one_key_and_the_unused_table_is_gone_from_the_resolved_options():
    options = preset("gpt2", positions="rope")
    assert options.validate() == []
    assert options.resolve().max_positions is None
    assert options.resolve().rope == RopeOptions("default", 10000.0)
    assert preset("gpt2").resolve().rope == RopeOptions()


@pytest.mark.parametrize(("vocab_size", "padded"), [(257, 320), (50257, 50304), (32000, 32000), (1, 64)])
def test_vocabulary_is_padded_to_a_multiple_of_64(vocab_size, padded):
    assert preset("nano", vocab_size=vocab_size).padded_vocab_size == padded


CONTRADICTIONS = {
    "norm": ({"norm": "rms"}, "model.norm=rms is not one of layernorm, rmsnorm"),
    "positions": ({"positions": "alibi"}, "model.positions=alibi is not one of learned, rope"),
    "mlp": ({"mlp": "relu"}, "model.mlp=relu is not one of gelu, swiglu"),
    "layers": ({"num_layers": 0}, "model.num_layers=0 must be above zero"),
    "eps": ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be above zero and finite"),
    "infinite eps": ({"norm_eps": math.inf}, "model.norm_eps=inf must be above zero and finite"),
    "vocabulary": ({"vocab_size": -1}, "model.vocab_size=-1 must be above zero"),
    "heads": ({"num_heads": 5}, "model.hidden_size=192 is not divisible by model.num_heads=5"),
    "kv-heads": ({"num_kv_heads": 4}, "model.num_heads=6 is not a multiple of model.num_kv_heads=4"),
    "learned-without-length": ({"positions": "learned"}, "model.positions=learned needs model.max_positions"),
    "rope-without-theta": ({"rope": RopeOptions("default")}, "model.rope.theta has no value; it is 10000 in"),
    "rope-of-learned-positions": (
        {"positions": "learned", "max_positions": 8, "rope": RopeOptions("linear", 1e4, 2.0)},
        "model.rope.type=linear is of rotary positions and model.positions=learned",
    ),
    "no-windows": ({"windows": []}, "model.windows is empty; give at least one"),
    "window-of-nothing": ({"windows": [0, None]}, "model.windows=[0, None] must hold numbers of keys from 1"),
    "softcap": ({"attention_softcap": 0.0}, "model.attention_softcap=0.0 must be above zero"),
    "rope-of-odd-heads": ({"head_dim": 33}, "model.positions=rope needs an even head dimension"),
}


@pytest.mark.parametrize(("changes", "problem"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_each_contradiction_is_one_sentence_that_names_the_key(changes, problem):
    problems = preset("nano", **changes).validate()
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_all_problems_are_gathered():
    assert len(preset("nano", norm="rms", num_layers=0).validate()) == 2
    assert len(preset("nano", num_heads=5, num_kv_heads=2, positions="learned").validate()) == 3
