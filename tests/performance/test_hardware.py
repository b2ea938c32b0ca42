import subprocess
from types import SimpleNamespace

import pytest
import torch

from flashtrain.performance.hardware import FIELDS, gpu_state


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="12-ab"))


def test_the_state_is_that_of_the_current_gpu(a_gpu, monkeypatch):
    def run(command, **options):
        assert command[:2] == ["nvidia-smi", "--id=GPU-12-ab"]
        assert command[2] == f"--query-gpu={','.join(FIELDS)}"
        return SimpleNamespace(stdout="570.1, 1980, 1980, 3201, 3201, 612.5, 700.00, 58\n")

    monkeypatch.setattr(subprocess, "run", run)
    state = gpu_state()
    assert (state["driver"], state["sm_mhz"], state["power_watt"]) == ("570.1", "1980", "612.5")
    assert list(state) == list(FIELDS.values())


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_without_the_tool_there_is_no_state(a_gpu, monkeypatch, error):
    def run(command, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_state() is None


@pytest.mark.gpu
def test_this_gpu_has_a_state():
    assert int(gpu_state()["sm_max_mhz"]) > 0
