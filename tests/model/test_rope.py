import math

import pytest
import torch
from presets import preset

from flashtrain.model.gpt import GPT
from flashtrain.model.rope import inverse_frequencies, rope_table, rotate
from flashtrain.model.rope_options import RopeOptions

DEFAULT = RopeOptions("default", 10000.0)


def table_of(positions, head_dim):
    return rope_table(positions, inverse_frequencies(DEFAULT, head_dim, length=0), 1.0)


# options -> frequencies [0, 16, 32, 48, 63] of 64 at 8,192 tokens, and the factor of cosines and sines
PUBLISHED = {
    "default": (DEFAULT, [1, 0.1, 1e-2, 1e-3, 1.154782e-4], None),
    "linear": (RopeOptions("linear", 1e4, 8.0), [0.125, 0.0125, 1.25e-3, 1.25e-4, 1.443477e-5], None),
    "ntk": (RopeOptions("ntk", 1e4, 8.0), [1, 5.897173e-2, 3.477664e-3, 2.050838e-4, 1.443477e-5], None),
    "dynamic": (
        RopeOptions("dynamic", 1e4, 2.0, 4096),
        [1, 7.565303e-2, 5.723382e-3, 4.329912e-4, 3.849273e-5],
        None,
    ),
    "yarn": (RopeOptions("yarn", 1e4, 16.0, 4096), [1, 0.1, 5.673077e-3, 6.25e-5, 7.217387e-6], 1.2772589),
    "yarn-not-truncated": (
        RopeOptions("yarn", 1e4, 16.0, 4096, truncate=False),
        [1, 0.1, 5.696214e-3, 6.25e-5, 7.217387e-6],
        1.2772589,
    ),
    "llama3": (
        RopeOptions("llama3", 5e5, 8.0, 8192),
        [1, 3.760603e-2, 5.248460e-4, 6.647870e-6, 3.068926e-7],
        None,
    ),
}


@pytest.mark.parametrize(("rope", "frequencies", "attention_factor"), PUBLISHED.values(), ids=PUBLISHED)
def test_vllm_46280_every_scaling_has_the_published_frequencies_and_factor(rope, frequencies, attention_factor):
    assert rope.validate("rope", 128) == []
    resolved = rope.resolve()
    actual = inverse_frequencies(resolved, 128, length=8192)[[0, 16, 32, 48, 63]]
    torch.testing.assert_close(actual, torch.tensor(frequencies, dtype=torch.float64), rtol=5e-7, atol=0)
    assert resolved.attention_factor == (attention_factor and pytest.approx(attention_factor, rel=1e-7))


def test_dynamic_scaling_begins_after_the_original_length_and_remembers_nothing():
    rope = RopeOptions("dynamic", 1e4, 2.0, 4096)
    plain = inverse_frequencies(DEFAULT, 64, 1)
    assert torch.equal(inverse_frequencies(rope, 64, 4096), plain)
    assert (inverse_frequencies(rope, 64, 4097)[1:] < plain[1:]).all()
    assert torch.equal(inverse_frequencies(rope, 64, 100), plain)
    lengths = torch.tensor([[100, 4096], [4097, 9000]])
    each = inverse_frequencies(rope, 64, lengths)
    for place, length in zip(each.flatten(0, 1), lengths.flatten().tolist(), strict=True):
        torch.testing.assert_close(place, inverse_frequencies(rope, 64, length), rtol=1e-14, atol=0)


def test_attention_factor_multiplies_cosines_and_sines():
    frequencies = inverse_frequencies(DEFAULT, 16, 1)
    scaled = rope_table(torch.arange(50), frequencies, 1.25)
    torch.testing.assert_close(scaled, 1.25 * rope_table(torch.arange(50), frequencies, 1.0))


CONTRADICTIONS = {
    "type": (RopeOptions("ya rn", 1e4), "rope.type=ya rn is not one of default, linear, ntk, dynamic, yarn, llama3"),
    "theta": (RopeOptions("default", 1.0), "rope.theta=1.0 must be above 1 and finite"),
    "no-factor": (RopeOptions("linear", 1e4), "rope.type=linear needs rope.factor, how many times longer"),
    "no-length": (RopeOptions("yarn", 1e4, 2.0), "rope.type=yarn needs rope.original_length, the tokens in a row"),
    "unused": (RopeOptions("linear", 1e4, 2.0, beta_fast=3.0), "rope.beta_fast=3.0 is nothing that rope.type=linear"),
    "shorter": (RopeOptions("ntk", 1e4, 0.5), "rope.factor=0.5 must be at least 1"),
    "infinite": (RopeOptions("ntk", 1e4, math.inf), "rope.factor=inf must be above 0 and finite"),
    "ramp": (
        RopeOptions("yarn", 1e4, 2.0, 64, beta_slow=40.0),
        "rope.beta_slow=40.0 must be below rope.beta_fast=32.0",
    ),
    "waves": (
        RopeOptions("llama3", 1e4, 2.0, 64, low_freq_factor=4.0),
        "rope.low_freq_factor=4.0 must be below rope.high_freq_factor=4.0",
    ),
}


@pytest.mark.parametrize(("rope", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_each_contradiction_is_one_sentence(rope, sentence):
    (problem,) = rope.validate("rope", 64)
    assert problem.startswith(sentence)
    assert RopeOptions("ntk", 1e4, 2.0).validate("rope", 2) != []


def test_options_in_place_of_a_models_take_what_they_lack_from_it():
    scaled = RopeOptions("yarn", 5e5, 4.0, 2048)
    assert RopeOptions().in_place_of(scaled, 512) == scaled
    assert RopeOptions("dynamic", factor=2.0).in_place_of(DEFAULT, 512) == RopeOptions("dynamic", 1e4, 2.0, 512)
    assert RopeOptions("dynamic", factor=2.0).in_place_of(scaled, 8192) == RopeOptions("dynamic", 5e5, 2.0, 2048)
    assert RopeOptions("linear", 1e6, 2.0).in_place_of(scaled, 8192) == RopeOptions("linear", 1e6, 2.0)


@pytest.mark.parametrize("position", [0, 1, 255, 257, 16_384, 131_071, 1_000_003])
def test_table_is_exact_to_float32_rounding_at_any_position(position):
    cos, sin = table_of(torch.tensor([position]), 64)
    assert cos.dtype == sin.dtype == torch.float32
    for i in range(32):
        angle = position * 10000.0 ** (-2 * i / 64)
        assert abs(cos[0, i].item() - math.cos(angle)) < 1e-7
        assert abs(sin[0, i].item() - math.sin(angle)) < 1e-7


def test_rotation_is_the_half_split_pairing_of_gpt_neox_and_llama():
    x_BSHD = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    table = table_of(torch.arange(9), 16)
    cos, sin = torch.cat((table, table), dim=-1)[:, None, :, None, :]
    swapped = torch.cat((-x_BSHD[..., 8:], x_BSHD[..., :8]), dim=-1)
    torch.testing.assert_close(rotate(x_BSHD, table), x_BSHD * cos + swapped * sin, rtol=0, atol=1e-14)


def test_gradient_is_rotated_back_and_rounded_once():
    x_BSHD = torch.randn(1, 100, 2, 64).bfloat16().requires_grad_()
    grad = torch.randn_like(x_BSHD)
    table = table_of(torch.arange(100), 64)
    (actual,) = torch.autograd.grad(rotate(x_BSHD, table), x_BSHD, grad)
    backwards = rotate(grad.float(), table * torch.tensor([1, -1])[:, None, None])
    assert torch.equal(actual, backwards.bfloat16())


def test_rows_may_have_positions_of_their_own():
    x_BSHD = torch.randn(2, 5, 3, 16)
    positions_BS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    rotated = rotate(x_BSHD, table_of(positions_BS, 16))
    for row in range(2):
        expected = rotate(x_BSHD[row, None], table_of(positions_BS[row], 16))
        assert torch.equal(rotated[row, None], expected)


def test_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        tables = table_of(torch.tensor([query_position, key_position]), 64)
        return (rotate(q, tables[:, :1]) * rotate(k, tables[:, 1:])).sum().item()

    assert score(1007, 1000) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(500_007, 500_000) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(8, 0) != pytest.approx(score(7, 0), abs=1e-2)


def test_transformers_25681_a_bfloat16_model_rotates_position_16384_as_precisely_as_bfloat16_allows():
    """One token repeated gives one query at every position, so each must be the first one, rotated."""
    options = preset("nano", num_layers=1, hidden_size=64, num_heads=1, vocab_size=64)
    seen = {}

    def attention(q, k, v, intervals):
        seen.update(q=q, k=k)
        return v

    model = GPT(options, attention).bfloat16()
    model(torch.zeros(1, 16_385, dtype=torch.int64))
    for heads in seen.values():
        assert heads.dtype == torch.bfloat16
        exact = rotate(heads[:, :1].double(), table_of(torch.arange(16_385), 64))
        pairs = heads[0, 0, 0].double().view(2, 32).norm(dim=0).repeat(2)
        error = (heads.double() - exact).abs() / pairs
        assert error.max() <= torch.finfo(torch.bfloat16).eps


def test_table_is_a_well_formed_operator():
    frequencies = torch.rand(8, dtype=torch.float64)
    for positions in (torch.arange(5), torch.arange(10).view(2, 5)):
        torch.library.opcheck(rope_table, (positions, frequencies, 1.5))
        torch.library.opcheck(rope_table, (positions, frequencies.expand(*positions.shape, 8).clone(), 1.5))
