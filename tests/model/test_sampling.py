from functools import partial

import pytest
import torch
from presets import preset
from torch._dynamo.testing import CompileCounter

from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.model.head import next_logits
from flashtrain.model.rope_options import RopeOptions
from flashtrain.model.sampling import generate

PROMPT = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture
def model():
    torch.manual_seed(0)
    options = preset("nano", num_layers=1, hidden_size=64, num_heads=2, vocab_size=100)
    model = GPT(options, partial(attention, variant="sdpa_math"))
    # Freshly drawn, the tied head mostly repeats its input.
    torch.nn.init.normal_(model.blocks[0].mlp.down.weight, std=1.0)
    return model


def sample(model, num_tokens=20, temperature=1.0, top_k=None, seed=0, context_length=64):
    generator = torch.Generator().manual_seed(seed)
    return generate(model, PROMPT, num_tokens, temperature, top_k, generator, context_length)


def test_greedy_takes_the_likeliest_token_of_the_whole_forward(model):
    tokens = torch.cat((PROMPT, sample(model, temperature=0)))
    with torch.no_grad():
        logits = next_logits(model(tokens[None])[0], model.head_weight, 100)
    assert torch.equal(tokens[5:], logits.argmax(-1)[4:-1])
    assert len(tokens[5:].unique()) > 3


def test_one_candidate_is_greedy(model):
    assert torch.equal(sample(model, top_k=1), sample(model, temperature=0))


def test_a_seed_decides_the_sample(model):
    assert torch.equal(sample(model, seed=1), sample(model, seed=1))
    assert not torch.equal(sample(model, seed=1), sample(model, seed=2))


def test_padding_tokens_are_never_drawn(model):
    with torch.no_grad():
        model.head_weight[100:] = 10.0
    assert sample(model, num_tokens=100, temperature=10.0).max() < 100


@pytest.mark.parametrize(("context_length", "fed"), [(7, 7), (64, 64), (100, 64)])
def test_the_model_is_fed_a_round_length_or_the_context(model, context_length, fed):
    lengths = []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    sample(model, num_tokens=5, context_length=context_length)
    assert lengths == [fed] * 5


def test_tokens_before_the_context_change_nothing(model):
    long = torch.cat((PROMPT.flip(0), PROMPT))
    continuations = [
        generate(model, prompt, 1, 0, None, torch.Generator(), context_length=5) for prompt in (long, PROMPT)
    ]
    assert torch.equal(*continuations)


def test_compiled_model_is_sampled_without_compiling_for_each_length(model):
    counter = CompileCounter()
    model.compile(backend=counter)
    expected = sample(model)
    assert counter.frame_count == 0
    assert len(expected) == 20


def test_dynamic_positions_are_of_the_tokens_there_are(model):
    model.options.rope = RopeOptions("dynamic", 1e4, 4.0, 8)
    tokens = PROMPT
    with torch.no_grad():
        for _ in range(20):
            logits = next_logits(model(tokens[None])[0, -1:], model.head_weight, 100)
            tokens = torch.cat((tokens, logits.argmax(-1)))
    assert torch.equal(sample(model, temperature=0), tokens[5:])
