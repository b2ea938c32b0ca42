"""A sequence read in pieces, over the keys and values of what was read, has the hidden states of one forward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from live_memory import LiveMemory
from presets import preset

from flashtrain.kernels.attention import attention
from flashtrain.model.cache import KeyValueCache
from flashtrain.model.gpt import GPT
from flashtrain.model.rope_options import RopeOptions

OPTIONS = preset("nano", num_layers=2, hidden_size=64, num_heads=4, vocab_size=100)
DYNAMIC = RopeOptions(type="dynamic", theta=10000.0, factor=2.0, original_length=16).resolve()


def make_model(variant="standard", **changes):
    torch.manual_seed(0)
    model = GPT(replace(OPTIONS, **changes), partial(attention, variant=variant))
    for block in model.blocks:  # far from uniform attention, so that a wrong key shows
        torch.nn.init.normal_(block.attention.qkv.weight, std=0.3)
    return model


def make_tokens(length=48):
    return torch.randint(100, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def in_pieces(model, tokens, size, **arguments):
    cache = KeyValueCache(model.options.windows, tokens.shape[1])
    return torch.cat([model(piece, cache=cache, **arguments) for piece in tokens.split(size, dim=1)], dim=1)


@pytest.mark.parametrize("size", [1, 7, 16, 47, 48])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": [5]},
        {"windows": [1, None]},
        {"windows": [None, 20]},
        {"num_kv_heads": 2, "qk_norm": True},
        {"positions": "learned", "max_positions": 48},
    ],
    ids=str,
)
def test_pieces_have_the_hidden_states_of_one_forward(changes, size):
    model, tokens = make_model(**changes).double(), make_tokens()
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(model, tokens, size), model(tokens), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["sdpa_math", "flash_v2"])
def test_every_variant_that_takes_more_keys_than_queries_reads_pieces(variant):
    tokens = make_tokens()
    with torch.no_grad():
        expected = make_model()(tokens)
    torch.testing.assert_close(in_pieces(make_model(variant), tokens, 20), expected, rtol=1e-4, atol=1e-5)


def test_vllm_5093_dynamic_frequencies_are_those_of_the_whole_sequence():
    """Frequencies that grow with what is in the cache are of no length at all."""
    model, tokens = make_model().double(), make_tokens()
    with torch.no_grad():
        whole = model(tokens, rope=DYNAMIC)
        assert (whole[:, :16] - model(tokens[:, :16], rope=DYNAMIC)).abs().max() > 1e-3
    torch.testing.assert_close(in_pieces(model, tokens, 16, rope=DYNAMIC), whole, rtol=1e-10, atol=1e-12)


def test_transformers_25104_a_long_sequence_leaves_nothing_behind_for_a_short_one():
    model = make_model()
    with torch.no_grad():
        fresh = model(make_tokens(8), rope=DYNAMIC)
        in_pieces(model, make_tokens(48), 16, rope=DYNAMIC)
        assert torch.equal(model(make_tokens(8), rope=DYNAMIC), fresh)


def test_a_position_table_that_ends_within_the_sequence_is_refused_at_the_first_piece():
    model = make_model(positions="learned", max_positions=40)
    with pytest.raises(Exception, match="a sequence of 48 tokens exceeds the 40 learned positions"):
        in_pieces(model, make_tokens(), 8)


def test_memory_is_that_of_a_piece_and_the_keys_and_values():
    """Of a full layer the keys and values grow with the sequence, and beside them one piece's scores over all keys."""
    size, layers, width = 64, 2, OPTIONS.hidden_size

    def peak(length, windows):
        model, tokens = make_model("sdpa_math", windows=windows, num_heads=1), make_tokens(length)
        cache = KeyValueCache(model.options.windows, length)
        with LiveMemory() as memory, torch.no_grad():
            for piece in tokens.split(size, dim=1):
                model(piece, cache=cache)
        return memory.peak

    few, many = peak(256, None), peak(1024, None)
    kept = 2 * 2 * layers * width * 4  # bytes of a token: keys and values, two rows
    at_hand = 2 * 2 * width * 4 + 4 * 2 * size * 4  # of a layer, copied to be attended to, and of its scores four times
    assert kept <= (many - few) / (1024 - 256) <= kept + at_hand
    assert peak(1024, [32]) < 1.1 * peak(256, [32])
