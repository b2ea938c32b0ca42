"""What all tests share: without a CUDA GPU, Triton interprets its kernels and tests marked gpu are skipped."""

import gc
import importlib.util
import os
import sys
from types import ModuleType

import hypothesis
import pytest
import torch

# An example may wait for a core.
hypothesis.settings.register_profile("without a deadline", deadline=None)
hypothesis.settings.load_profile("without a deadline")

# Triton reads this once, when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        import interpreter

        interpreter.search_once()


def pytest_configure(config: pytest.Config) -> None:
    """Leave the workers that pytest-xdist is about to start a thread each: with more they wait for one another."""
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, which would look through it for half a second each."""
    gc.freeze()


@pytest.fixture
def module(monkeypatch):
    """module("name", function=..., ...) makes a module of these functions importable."""

    def add(name, **functions):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return add


@pytest.fixture
def nan_filled_outputs():
    """New memory holds NaN, so that an output nobody wrote cannot pass for a right one.

    Warnings alone: flash_hopper's own backward stays, which is not deterministic.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.empty(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
