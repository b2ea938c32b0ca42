import math

import pytest
import torch
from presets import preset

from flashtrain.model.gpt import GPT
from flashtrain.model.rope import inverse_frequencies, rope_table, rotate


def test_inverse_frequencies_match_the_published_values():
    frequencies = inverse_frequencies(128, 10000.0)[[0, 16, 32, 48, 63]]
    expected = torch.tensor([1, 0.1, 1e-2, 1e-3, 1.154782e-4], dtype=torch.float64)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("position", [0, 1, 255, 257, 16_384, 131_071, 1_000_003])
def test_table_is_exact_to_float32_rounding_at_any_position(position):
    cos, sin = rope_table(torch.tensor([position]), 64, 10000.0)
    assert cos.dtype == sin.dtype == torch.float32
    for i in range(32):
        angle = position * 10000.0 ** (-2 * i / 64)
        assert abs(cos[0, i].item() - math.cos(angle)) < 1e-7
        assert abs(sin[0, i].item() - math.sin(angle)) < 1e-7


def test_rotation_is_the_half_split_pairing_of_gpt_neox_and_llama():
    x_BSHD = torch.randn(2, 9, 3, 16, dtype=torch.float64)
    table = rope_table(torch.arange(9), 16, 10000.0)
    cos, sin = torch.cat((table, table), dim=-1)[:, None, :, None, :]
    swapped = torch.cat((-x_BSHD[..., 8:], x_BSHD[..., :8]), dim=-1)
    torch.testing.assert_close(rotate(x_BSHD, table), x_BSHD * cos + swapped * sin, rtol=0, atol=1e-14)


def test_gradient_is_rotated_back_and_rounded_once():
    x_BSHD = torch.randn(1, 100, 2, 64).bfloat16().requires_grad_()
    grad = torch.randn_like(x_BSHD)
    table = rope_table(torch.arange(100), 64, 10000.0)
    (actual,) = torch.autograd.grad(rotate(x_BSHD, table), x_BSHD, grad)
    backwards = rotate(grad.float(), table * torch.tensor([1, -1])[:, None, None])
    assert torch.equal(actual, backwards.bfloat16())


def test_rows_may_have_positions_of_their_own():
    x_BSHD = torch.randn(2, 5, 3, 16)
    positions_BS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    rotated = rotate(x_BSHD, rope_table(positions_BS, 16, 10000.0))
    for row in range(2):
        expected = rotate(x_BSHD[row, None], rope_table(positions_BS[row], 16, 10000.0))
        assert torch.equal(rotated[row, None], expected)


def test_scores_depend_on_the_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        tables = rope_table(torch.tensor([query_position, key_position]), 64, 10000.0)
        return (rotate(q, tables[:, :1]) * rotate(k, tables[:, 1:])).sum().item()

    assert score(1007, 1000) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(500_007, 500_000) == pytest.approx(score(7, 0), abs=1e-5)
    assert score(8, 0) != pytest.approx(score(7, 0), abs=1e-2)


def test_bfloat16_model_rotates_position_16384_as_precisely_as_bfloat16_allows():
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
        exact = rotate(heads[:, :1].double(), rope_table(torch.arange(16_385), 64, 10000.0))
        pairs = heads[0, 0, 0].double().view(2, 32).norm(dim=0).repeat(2)
        error = (heads.double() - exact).abs() / pairs
        assert error.max() <= torch.finfo(torch.bfloat16).eps


def test_table_is_a_well_formed_operator():
    for positions in (torch.arange(5), torch.arange(10).view(2, 5)):
        torch.library.opcheck(rope_table, (positions, 16, 10000.0))
