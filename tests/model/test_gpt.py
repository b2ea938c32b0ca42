import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from presets import preset
from torch._dynamo.testing import CompileCounterWithBackend

from flashtrain.errors import UserError
from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.model.head import summed_cross_entropy

STANDARD = partial(attention, variant="standard")
SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 100}
FAMILIES = {
    "gpt2": preset("gpt2", max_positions=64, **SMALL),
    "gpt2-rope": preset("gpt2", positions="rope", **SMALL),
    "llama": preset("llama_1b", **SMALL | {"num_kv_heads": 2, "head_dim": 32, "mlp_hidden_size": 96}),
    "nano": preset("nano", **SMALL),
}
each_family = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)


def make_model(options, attention=STANDARD, dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(options, attention).to(dtype)


def make_tokens(rows=2, length=48):
    return torch.randint(100, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("llama_160m", 162_417_408),
        ("llama_1b", 1_235_814_400),
    ],
)
def test_parameter_counts_are_the_published_ones(name, parameters):
    with torch.device("meta"):
        model = GPT(preset(name), STANDARD)
    assert model.num_parameters() == parameters


@each_family
def test_hidden_states_do_not_depend_on_later_tokens(options):
    model, tokens = make_model(options), make_tokens()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 100
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(dim=-1).all()


def test_grouped_heads_equal_repeated_heads():
    grouped = make_model(FAMILIES["llama"], dtype=torch.float64)
    repeated = make_model(replace(FAMILIES["llama"], num_kv_heads=4), dtype=torch.float64)
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, k, v = state[name].unflatten(0, (-1, 32)).split((4, 2, 2))
        state[name] = torch.cat((q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0))).flatten(0, 1)
    repeated.load_state_dict(state)
    torch.testing.assert_close(grouped(make_tokens()), repeated(make_tokens()), rtol=0, atol=1e-12)


@each_family
def test_autocast_runs_residual_stream_and_attention_in_bfloat16(options):
    seen = []

    def recording(q, k, v, intervals):
        seen.append((q, k, v))
        return STANDARD(q, k, v, intervals)

    model, tokens = make_model(options, recording), make_tokens()
    full = model(tokens)
    assert full.dtype == torch.float32
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(tokens)
    assert hidden.dtype == torch.bfloat16
    assert (hidden - full).norm() < 0.02 * full.norm()
    resolved = options.resolve()
    for q, k, v in seen:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.shape == (2, 48, resolved.num_heads, resolved.head_dim)
        assert k.shape == v.shape == (2, 48, resolved.num_kv_heads, resolved.head_dim)


def test_queries_keys_and_values_are_views_of_one_projection():
    storages = []

    def recording(q, k, v, intervals):
        storages.append({x.untyped_storage().data_ptr() for x in (q, k, v)})
        return STANDARD(q, k, v, intervals)

    make_model(FAMILIES["gpt2"], recording)(make_tokens())
    assert [len(each) for each in storages] == [1, 1]


def test_qk_norm_gives_heads_unit_mean_square():
    def recording(q, k, v, intervals):
        for heads in (q, k):
            mean_square = heads.square().mean(-1)
            torch.testing.assert_close(mean_square, torch.ones_like(mean_square), rtol=1e-3, atol=0)
        return STANDARD(q, k, v, intervals)

    options = preset("nano", **SMALL)
    model = make_model(options, recording)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.qkv.weight)
    model(make_tokens())


def test_weights_start_as_in_gpt2():
    model = make_model(preset("gpt2", num_layers=2, hidden_size=384))
    residual = 0.02 / math.sqrt(4)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert torch.all(parameter == (1 if name.endswith("norm.weight") else 0)), name
        else:
            std = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.01), name


def test_fresh_model_predicts_uniformly():
    options = FAMILIES["gpt2"]
    model, tokens = make_model(options), make_tokens(rows=8)
    targets = (tokens.flatten() + 1) % 100
    loss = summed_cross_entropy(model(tokens).flatten(0, 1), model.head_weight, targets, 100, chunk_size=64)
    assert loss.item() / targets.numel() == pytest.approx(math.log(100), rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "nano"])
def test_compiles_into_one_graph_once_and_trains_like_eager(name):
    """The head stays outside of the compiled model, as the trainer calls it."""
    options = replace(FAMILIES[name], num_layers=1)
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = make_model(options), make_model(options)
    compiled.compile(backend=counter, fullgraph=True)
    for model in (eager, compiled):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model(make_tokens())
                loss = summed_cross_entropy(
                    hidden.flatten(0, 1), model.head_weight, make_tokens().flatten(), 100, chunk_size=32
                )
            (loss / 96).backward()
    assert counter.frame_count == 1
    for (name, expected), actual in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.isfinite(actual.grad).all(), name
        error = (actual.grad - expected.grad).norm()
        assert error <= 0.02 * expected.grad.norm(), name


def test_inductor_compiles_the_default_model():
    options = preset("nano", **SMALL | {"num_layers": 1})
    model, tokens = make_model(options, attention), make_tokens()
    expected = model(tokens)
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(tokens), expected)
    assert not any("_orig_mod" in name for name in model.state_dict())


def test_contradictory_options_are_refused_together():
    with pytest.raises(UserError, match="model.norm=rms .*; model.mlp=relu "):
        GPT(preset("nano", norm="rms", mlp="relu", vocab_size=100), STANDARD)


def test_sequence_beyond_learned_positions_is_refused():
    with pytest.raises(UserError, match="a sequence of 65 tokens exceeds the 64 learned positions"):
        make_model(FAMILIES["gpt2"])(make_tokens(length=65))


def test_untied_head_is_a_table_of_its_own():
    model = make_model(preset("llama_160m", **SMALL))
    assert model.head_weight is not model.token_embedding.weight
    assert model.head_weight.shape == (128, 64)
    hidden = model(make_tokens())
    F.linear(hidden, model.head_weight).sum().backward()
    assert model.head_weight.grad is not None
