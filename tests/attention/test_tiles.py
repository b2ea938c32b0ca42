"""The launch table: which record a problem gets."""

import torch

from flashtrain.kernels.attention import ops
from flashtrain.kernels.attention.tiles import FP32, HALF, num_sms, tiles


def test_the_larger_head_dimension_decides(monkeypatch):
    monkeypatch.setattr(ops, "architecture", lambda device: "sm_90")
    q, v = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    for a, b in ((q, v), (v, q)):
        assert ops._tiles(a, b) == HALF["sm_90"][128]
    assert ops._tiles(q, q) == HALF["sm_90"][64]
    assert ops._tiles(v.float(), q.float()) == FP32[128]


def test_a_row_serves_all_head_dimensions_up_to_its_own():
    for head_dim, row in ((16, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)):
        for architecture, rows in HALF.items():
            assert tiles(architecture, head_dim, torch.float16) == rows[row]
        assert tiles("sm_80", head_dim, torch.float32) == FP32[row]


def test_a_device_without_a_gpu_counts_as_an_h200():
    assert num_sms(torch.device("cpu")) == 132
