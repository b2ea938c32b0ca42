from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from eval_options import OPTIONS

from flashtrain.evaluation.options import EvalOptions

CONF = Path(__file__).parents[2] / "conf" / "eval"


def test_good_options_have_no_problem():
    assert OPTIONS.validate(max_positions=None) == []
    assert OPTIONS.validate(max_positions=256) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lengths": []}, "eval.lengths is empty"),
        ({"lengths": [256, 128]}, "must increase"),
        ({"lengths": [128, 128]}, "must increase"),
        ({"lengths": [64, 128]}, "leaves no context at the shortest of eval.lengths, 64"),
        ({"lengths": [-2, 128]}, "eval.lengths has -2, and the least is 2"),
        ({"lengths": [1, 128], "max_anchors": 0}, "eval.lengths has 1, and the least is 2"),
        ({"lengths": [128, 512]}, "learned positions end at 256"),
        ({"targets_per_anchor": 0}, "eval.targets_per_anchor=0 must be at least 1"),
        ({"max_documents": 0}, "eval.max_documents=0 must be at least 1"),
        ({"max_anchors": -1}, "eval.max_anchors=-1 must be at least 0"),
        ({"batch_tokens": 0}, "eval.batch_tokens=0 must be at least 1"),
        ({"prefill_tokens": 0}, "eval.prefill_tokens=0 must be at least 1"),
        ({"window": 0}, "eval.window=0 must be at least 1"),
        ({"window": 64, "stride": 0}, "eval.stride=0 must be at least 1"),
        ({"window": 64, "stride": 65}, "eval.stride=65 would pass over tokens between windows of eval.window=64"),
        ({"stride": 64}, "eval.stride=64 is of eval.window, which is null; say eval.window=..., too"),
        ({"window": 257, "stride": 9}, "eval.window=257 is beyond the model's learned positions, which end at 256"),
        ({"prefix": "row"}, "eval.prefix=row is not one of document, window, none"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_named(changes, sentence):
    problems = replace(OPTIONS, **changes).validate(max_positions=256)
    assert len(problems) == 1
    assert sentence in problems[0]


def test_without_anchors_a_length_may_be_below_the_targets_of_one():
    assert not replace(OPTIONS, lengths=[2], max_anchors=0).validate(max_positions=256)


def test_a_stride_of_null_is_the_window():
    assert replace(OPTIONS, window=100).resolve(256, None).stride == 100
    assert replace(OPTIONS, window=100, stride=25).resolve(256, None).stride == 25


def test_windows_may_be_of_these_lengths():
    assert OPTIONS.fed_lengths() == [128, 256]
    assert replace(OPTIONS, window=100).fed_lengths() == [128, 256, 1, 100], "a document may have but two tokens"
    assert replace(OPTIONS, key_tokens="self").fed_lengths() == [128, 256, 16 + 4, 32 + 8]


def test_all_mistakes_are_named_at_once():
    problems = replace(OPTIONS, lengths=[512, 32], batch_tokens=0).validate(max_positions=256)
    assert len(problems) == 4


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_choice_in_conf_is_complete_and_good(path):
    values = yaml.safe_load(path.read_text())
    assert values.pop("rope") == {"type": None}, "that of the run"
    assert set(values) == {field.name for field in fields(EvalOptions)}
    assert EvalOptions(**values).resolve(32768, None).validate(max_positions=None) == []


@pytest.mark.parametrize(
    ("training_length", "max_positions", "lengths"),
    [(256, None, [128, 256, 512]), (1024, 1024, [128, 256, 512, 1024]), (32, None, [64])],
    ids=["twice-the-training-length", "learned-positions-end", "shorter-than-the-targets"],
)
def test_lengths_of_null_are_halvings(training_length, max_positions, lengths):
    options = replace(OPTIONS, lengths=None)
    assert options.resolve(training_length, max_positions).lengths == lengths


def test_default_lengths_are_eight_at_most():
    assert replace(OPTIONS, lengths=None).resolve(1 << 20, None).lengths == [1 << power for power in range(14, 22)]
