"""Runs of a small model on the text in `books`, as a person types them, and how they end."""

import gc
import multiprocessing
import signal

import pytest
import torch
from commands import SMALL, run_command

from flashtrain.training.callbacks import Reporter


def train(*overrides):
    run_command("python train.py data=text data.path=books", *SMALL, *overrides)


def sentence_of(*overrides):
    """The sentence that training ends in; the exit code of a string is 1."""
    with pytest.raises(SystemExit) as stop:
        train(*overrides)
    told = stop.value.code
    assert told.startswith("error: ")
    del stop
    gc.collect()  # what the exception held: a process that ended here would not have
    assert not multiprocessing.active_children()
    return told


def weights_of(folder):
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def at_step(monkeypatch, step, action):
    """Do `action` when step `step` is reported."""
    report = Reporter._report

    def report_and_act(self, trainer, reported, outputs):
        report(self, trainer, reported, outputs)
        if reported == step:
            action()

    monkeypatch.setattr(Reporter, "_report", report_and_act)


def train_until(monkeypatch, step, *overrides):
    with monkeypatch.context() as patch:
        at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        train(*overrides)
