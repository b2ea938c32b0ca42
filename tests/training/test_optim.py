import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
from presets import preset
from tiny_training import ADAMW, MUON, TinyModel, assert_same_weights
from torch.optim import AdamW, Muon

from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.training.optim import build_optimizer, hidden_matrices


def names_of(parameters, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


def test_matrices_decay_and_vectors_do_not():
    model = TinyModel()
    decayed, kept = build_optimizer(model, ADAMW).param_groups
    assert decayed["weight_decay"] == ADAMW.weight_decay and kept["weight_decay"] == 0
    assert names_of(decayed["params"], model) == {"embedding.weight", "mix.weight"}
    assert names_of(kept["params"], model) == {"mix.bias", "norm.weight", "norm.bias"}
    assert decayed["fused"] and decayed["betas"] == (ADAMW.beta1, ADAMW.beta2) and decayed["eps"] == ADAMW.eps


def test_a_model_without_vectors_has_one_group():
    (group,) = build_optimizer(torch.nn.Linear(4, 4, bias=False), ADAMW).param_groups
    assert group["weight_decay"] == ADAMW.weight_decay


# Muon


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = TinyModel()
    hidden, decayed, kept = build_optimizer(model, MUON).param_groups
    assert names_of(hidden["params"], model) == {"mix.weight"}
    assert names_of(decayed["params"], model) == {"embedding.weight"}
    assert names_of(kept["params"], model) == {"mix.bias", "norm.weight", "norm.bias"}
    assert hidden["lr"] == hidden["initial_lr"] == MUON.matrix_learning_rate
    assert decayed["lr"] == kept["lr"] == kept["initial_lr"] == MUON.learning_rate
    assert hidden["weight_decay"] == decayed["weight_decay"] == MUON.weight_decay and kept["weight_decay"] == 0
    assert hidden["momentum"] == MUON.momentum and hidden["adjust_lr_fn"] == MUON.adjust_lr_fn


@pytest.mark.parametrize("name", ["gpt2", "nano"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_hidden_matrices_are_those_of_the_blocks(name, tied):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 64}
    model = GPT(preset(name, **sizes, tie_embeddings=tied), partial(attention, variant="standard"))
    expected = {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
    assert len(expected) == 8
    assert names_of(hidden_matrices(model), model) == expected


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    for key in first:
        assert_same_weights(first[key], second[key])


def test_one_optimizer_does_what_torchs_two_do():
    model = TinyModel()
    other = copy.deepcopy(model)
    optimizer = build_optimizer(model, MUON)
    optimizer.found_inf = torch.zeros(())
    muon = Muon(
        [other.mix.weight],
        lr=MUON.matrix_learning_rate,
        weight_decay=MUON.weight_decay,
        momentum=MUON.momentum,
        adjust_lr_fn=MUON.adjust_lr_fn,
    )
    betas = (MUON.beta1, MUON.beta2)
    adamw = AdamW([other.embedding.weight], MUON.learning_rate, betas, MUON.eps, MUON.weight_decay, fused=True)
    vectors = [other.mix.bias, other.norm.weight, other.norm.bias]
    adamw.add_param_group({"params": vectors, "weight_decay": 0.0})
    for step in range(3):
        set_gradients(model, step)
        set_gradients(other, step)
        optimizer.step()
        muon.step()
        adamw.step()
        assert_same_weights(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("good_steps", [0, 3])
def test_a_marked_step_leaves_weights_and_moments(good_steps, value):
    model = TinyModel()
    optimizer = build_optimizer(model, MUON)
    optimizer.found_inf = torch.zeros(())
    for step in range(good_steps):
        set_gradients(model, step)
        optimizer.step()
    before, moments = copy.deepcopy(model.state_dict()), state_of(optimizer)
    optimizer.found_inf.fill_(1.0)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    assert_same_weights(model.state_dict(), before)
    if good_steps:
        assert_same_state(state_of(optimizer), moments)
    # And the next good step is what it would have been.
    optimizer.found_inf.zero_()
    set_gradients(model, 9)
    optimizer.step()
    other = TinyModel()
    other.load_state_dict(before)
    untouched = build_optimizer(other, MUON)
    if good_steps:
        untouched.load_state_dict({"state": moments, "param_groups": untouched.state_dict()["param_groups"]})
    set_gradients(other, 9)
    untouched.step()
    assert_same_weights(model.state_dict(), other.state_dict())


def test_a_loaded_state_is_what_the_next_step_uses():
    model = TinyModel()
    optimizer = build_optimizer(model, MUON)
    set_gradients(model, 0)
    optimizer.step()
    other = copy.deepcopy(model)
    loaded = build_optimizer(other, MUON)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (1, 2):
        for each, its in ((model, optimizer), (other, loaded)):
            for group in its.param_groups:
                group["lr"] = 0.5 * group["initial_lr"]
            set_gradients(each, step)
            its.step()
    assert_same_weights(model.state_dict(), other.state_dict())
    assert_same_state(state_of(optimizer), state_of(loaded))


def test_the_closure_is_called_once_before_gradients_and_the_mark_are_read():
    model, calls = TinyModel(), []
    optimizer = build_optimizer(model, MUON)

    def closure():
        calls.append(torch.is_grad_enabled())
        set_gradients(model, 0)
        optimizer.found_inf = torch.ones(())
        return 3.0

    before = copy.deepcopy(model.state_dict())
    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert_same_weights(model.state_dict(), before)


def test_a_matrix_without_gradient_is_left():
    model = TinyModel()
    optimizer = build_optimizer(model, MUON)
    optimizer.found_inf = torch.zeros(())
    set_gradients(model, 0)
    model.mix.weight.grad = None
    before = model.mix.weight.clone()
    optimizer.step()
    assert torch.equal(model.mix.weight, before)


# Options


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=lambda options: options.name)
def test_good_options_have_no_problem(options):
    assert options.validate() == []
    assert dataclasses.replace(options, clip_norm=None, weight_decay=0.0).validate() == []


@pytest.mark.parametrize("bad", ["out-of-range", math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", 0.0, "above 0 and finite"),
        ("eps", 0.0, "above 0 and finite"),
        ("weight_decay", -0.1, "0 or more and finite"),
        ("clip_norm", 0.0, "above 0 and finite"),
        ("beta1", 1.0, "at least 0 and below 1"),
        ("beta2", -0.1, "at least 0 and below 1"),
        ("matrix_learning_rate", 0.0, "above 0 and finite"),
        ("momentum", 1.0, "at least 0 and below 1"),
    ],
)
def test_bad_option_is_named_with_what_is_allowed(name, value, allowed, bad):
    value = value if bad == "out-of-range" else bad
    (problem,) = dataclasses.replace(MUON, **{name: value}).validate()
    assert problem.startswith(f"optimizer.{name}={value} must be {allowed}")


def test_a_scale_of_updates_has_its_learning_rate():
    assert dataclasses.replace(MUON, adjust_lr_fn="sqrt").validate() == [
        "optimizer.adjust_lr_fn=sqrt is not one of match_rms_adamw, original"
    ]
    original = dataclasses.replace(MUON, adjust_lr_fn="original", matrix_learning_rate=None).resolve(768)
    assert original.validate() == ["optimizer.adjust_lr_fn=original needs optimizer.matrix_learning_rate, often 0.02"]


def test_a_learning_rate_of_null_comes_from_the_width():
    null = dataclasses.replace(ADAMW, learning_rate=None)
    assert null.resolve(768).learning_rate == pytest.approx(6.5e-4, rel=0.01)
    assert ADAMW.resolve(768) is ADAMW


def test_a_matrix_learning_rate_of_null_is_the_learning_rate():
    null = dataclasses.replace(MUON, matrix_learning_rate=None)
    assert null.resolve(768).matrix_learning_rate == MUON.learning_rate
    both = dataclasses.replace(null, learning_rate=None).resolve(768)
    assert both.matrix_learning_rate == both.learning_rate == pytest.approx(6.5e-4, rel=0.01)
    assert MUON.resolve(768) is MUON
