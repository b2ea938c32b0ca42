import pytest
import torch

from flashtrain.performance import achievable as subject
from flashtrain.performance.devices import DEVICES, key_of
from flashtrain.performance.roofline import nominal
from flashtrain.performance.timing import CudaClock


class ClockOf:
    """Says that every call takes as long as it is told."""

    def __init__(self, seconds):
        self.seconds = seconds

    def read(self, call):
        call()
        return lambda: self.seconds


def test_rates_are_bytes_both_ways_and_operations_over_seconds(monkeypatch):
    monkeypatch.setattr(subject, "COPY_BYTES", 4096)
    monkeypatch.setattr(subject, "MATRIX_SIZE", 32)
    found = subject.achievable(ClockOf(0.5), torch.float32, device="cpu", warmup=1, rounds=3, seed=0)
    assert (found.bandwidth, found.flops, found.measured) == (2 * 4096 / 0.5, 2 * 32**3 / 0.5, True)
    alone = subject.product_rate(ClockOf(0.5), torch.float32, device="cpu", warmup=1, rounds=3, seed=0)
    assert alone == found.flops


@pytest.mark.gpu
def test_this_gpu_reaches_most_of_its_data_sheet():
    key = key_of(torch.cuda.get_device_name())
    if key is None:
        pytest.skip("not in the table")
    found = subject.achievable(CudaClock(), torch.bfloat16, device="cuda", warmup=3, rounds=9, seed=0)
    peak = nominal(DEVICES[key], torch.bfloat16)
    assert 0.6 * peak.bandwidth < found.bandwidth < peak.bandwidth
    assert 0.5 * peak.flops < found.flops < peak.flops
