"""Each layer sees its own window of keys, and nothing beyond it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from presets import preset

from flashtrain.kernels.attention import Intervals, attention
from flashtrain.model.attention import causal_window
from flashtrain.model.gpt import GPT

OPTIONS = preset("nano", num_layers=2, hidden_size=64, num_heads=4, vocab_size=100)


def make_model(attend, **changes):
    torch.manual_seed(0)
    return GPT(replace(OPTIONS, **changes), attend)


def make_tokens():
    return torch.randint(100, (2, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("windows", "reach"), [([4, 7], 9), ([4], 6), ([1], 0), ([None, 1], 27)], ids=str)
def test_a_token_is_felt_as_far_as_the_windows_reach_and_no_farther(windows, reach):
    """A layer of W keys reaches W - 1 tokens on."""
    model, tokens = make_model(partial(attention, variant="standard"), windows=windows), make_tokens()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 100
    differs = (model(tokens) != model(changed)).any(dim=-1).any(dim=0)
    assert differs.nonzero().flatten().tolist() == list(range(20, 21 + reach))


def test_layers_take_the_windows_in_turn_and_share_what_is_made_of_them():
    seen = []

    def recording(q, k, v, intervals):
        seen.append(intervals)
        return v

    model = make_model(recording, num_layers=5, windows=[4, None, 4])
    model(make_tokens())
    assert seen == [Intervals.window(left, 0) for left in (3, None, 3, 3, None)]

    seen.clear()
    documents = torch.arange(2 * 48).view(2, 48) // 10
    model(make_tokens(), documents)
    for intervals, left in zip(seen, (3, None, 3, 3, None), strict=True):
        expected = Intervals.window(left, 0).in_documents(documents).bounds
        assert torch.equal(intervals.bounds.keys, expected.keys)
        assert torch.equal(intervals.bounds.queries, expected.queries)
    assert len({id(intervals.bounds) for intervals in seen}) == 2


def test_a_window_counts_the_querys_own_key():
    assert causal_window(1) == Intervals.window(0, 0)
    assert causal_window(None) == Intervals.causal()
