"""The commands as a person types them, in this process: `train.py`, `flashtrain.evaluate`, `flashtrain.generate`."""

import shlex
import sys

import pytest

from flashtrain import evaluate, fit, generate
from flashtrain.entry import main

VERBS = {"train.py": fit.run, "-m flashtrain.evaluate": evaluate.run, "-m flashtrain.generate": generate.run}

SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=1",
    "train.sequence_length=64",
    "train.tokens_per_step=128",
    "train.steps=4",
    "train.validation_tokens=256",
    "eval.lengths=[65,80]",
    "eval.targets_per_anchor=64",
    "eval.max_documents=2",
    "eval.max_anchors=2",
    "generate.num_tokens=4",
    "trainer=cpu",
]


def run_command(line: str, *overrides: str) -> None:
    """Run `python train.py ...` or `python -m flashtrain.X ...`; raises SystemExit with the sentence of a mistake."""
    python, *words = shlex.split(line)
    assert python == "python"
    size = 2 if words[0] == "-m" else 1
    verb = VERBS[" ".join(words[:size])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [words[size - 1], *words[size:], *overrides])
        main(verb)
