"""The commands as a person types them, in this process: `train.py`, `python -m flashtrain.X`."""

import shlex
import sys

import pytest

from flashtrain import bench, bench_training, check, convert, evaluate, explain, fit, generate, replay
from flashtrain.composition import RUN
from flashtrain.config import Config
from flashtrain.entry import main

# command -> the verb and the settings it takes
VERBS = {
    "train.py": (fit.run, RUN),
    "-m flashtrain.evaluate": (evaluate.run, RUN),
    "-m flashtrain.generate": (generate.run, generate.ROOT),
    "-m flashtrain.convert": (convert.run, convert.ROOT),
    "-m flashtrain.replay": (replay.run, RUN),
    "-m flashtrain.check": (check.run, check.ROOT),
    "-m flashtrain.bench": (bench.run, bench.ROOT),
    "-m flashtrain.bench_training": (bench_training.run, bench_training.ROOT),
    "-m flashtrain.explain": (explain.run, explain.ROOT),
}

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

SMALL_RECALL = [
    *(word for word in SMALL if not word.startswith("eval.")),
    "data.num_queries=4",
    "eval.lengths=[16,64]",
    "eval.max_documents=2",
    "generate.num_tokens=0",
]

SMALL_CHECK = [
    "device=cpu",
    "masks=[full,causal,documents]",
    "dtypes=[float32]",
    "lengths=[[9,9],[5,12]]",
    "heads=[[2,1]]",
    "head_dims=[16]",
    "v_head_dim=8",
]

SMALL_BENCH = [
    "device=cpu",
    "dtype=float32",
    "variants=[standard,sdpa_math,sdpa_flash]",
    "lengths=[64,128]",
    "tokens=256",
    "hidden_size=64",
    "head_dims=[16]",
    "window=10",
    "longest_document=40",
    "warmup=1",
    "rounds=3",
]

SMALL_BENCH_TRAINING = [
    "trainer=cpu",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=1",
    "model.vocab_size=257",
    "lengths=[32,64]",
    "variants=[sdpa_math,sdpa_cudnn]",
    "train.tokens_per_step=128",
    "warmup=1",
    "steps=2",
    "rounds=2",
]

SMALL_EXPLAIN = [
    "length=128",
    "lengths=[64,128,256]",
    "num_heads=2",
    "head_dim=16",
    "window=10",
    "longest_document=40",
]


def compose(*overrides: str) -> Config:
    """The settings that `python train.py` takes from these words, without running it."""
    received = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *overrides])
        main(received.append)
    (config,) = received
    return config


def run_command(line: str, *overrides: str) -> None:
    """Run `python train.py ...` or `python -m flashtrain.X ...`; raises SystemExit with the sentence of a mistake."""
    python, *words = shlex.split(line)
    assert python == "python"
    size = 2 if words[0] == "-m" else 1
    verb, root = VERBS[" ".join(words[:size])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [words[size - 1], *words[size:], *overrides])
        main(verb, root)
