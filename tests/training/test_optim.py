import dataclasses
import math

import pytest
import torch
from tiny_training import ADAMW, TinyModel

from flashtrain.training.optim import build_optimizer


def test_matrices_decay_and_vectors_do_not():
    model = TinyModel()
    decayed, kept = build_optimizer(model, ADAMW).param_groups
    assert decayed["weight_decay"] == ADAMW.weight_decay and kept["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {"embedding.weight", "mix.weight"}
    assert {names[id(p)] for p in kept["params"]} == {"mix.bias", "norm.weight", "norm.bias"}
    assert decayed["fused"] and decayed["betas"] == (ADAMW.beta1, ADAMW.beta2) and decayed["eps"] == ADAMW.eps


def test_a_model_without_vectors_has_one_group():
    (group,) = build_optimizer(torch.nn.Linear(4, 4, bias=False), ADAMW).param_groups
    assert group["weight_decay"] == ADAMW.weight_decay


def test_good_options_have_no_problem():
    assert ADAMW.validate() == []
    assert dataclasses.replace(ADAMW, clip_norm=None, weight_decay=0.0).validate() == []


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
    ],
)
def test_bad_option_is_named_with_what_is_allowed(name, value, allowed, bad):
    value = value if bad == "out-of-range" else bad
    (problem,) = dataclasses.replace(ADAMW, **{name: value}).validate()
    assert problem.startswith(f"optimizer.{name}={value} must be {allowed}")


def test_a_learning_rate_of_null_comes_from_the_width():
    null = dataclasses.replace(ADAMW, learning_rate=None)
    assert null.resolve(768).learning_rate == pytest.approx(6.5e-4, rel=0.01)
    assert ADAMW.resolve(768) is ADAMW
