"""The launch table: which record a problem gets."""

import torch

from flashtrain.kernels.attention import ops
from flashtrain.kernels.attention.tiles import FP32, FULL_FORWARD, HALF, INTERPRETER, num_sms, tiles


def test_the_larger_head_dimension_decides(monkeypatch):
    monkeypatch.setattr(ops, "architecture", lambda device: "sm_90")
    q, v = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16), torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    causal = ops.Intervals.causal()
    for a, b in ((q, v), (v, q)):
        assert ops._tiles(a, b, causal) == HALF["sm_90"][128]
    assert ops._tiles(q, q, causal) == HALF["sm_90"][64]
    assert ops._tiles(v.float(), q.float(), causal) == FP32[128]


def test_a_row_serves_all_head_dimensions_up_to_its_own():
    for head_dim, row in ((16, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)):
        for architecture, rows in HALF.items():
            assert tiles(architecture, head_dim, torch.float16) == rows[row]
        assert tiles("sm_80", head_dim, torch.float32) == FP32[row]


def test_the_full_mask_has_a_forward_of_its_own_in_16_bits():
    full = tiles("sm_90", 128, torch.bfloat16, is_full=True)
    assert full.forward == FULL_FORWARD["sm_90"][128] != HALF["sm_90"][128].forward
    assert (full.dkdv, full.dq) == (HALF["sm_90"][128].dkdv, HALF["sm_90"][128].dq)
    assert tiles("sm_90", 64, torch.bfloat16, is_full=True) == HALF["sm_90"][64]
    assert tiles("sm_90", 128, torch.float32, is_full=True) == FP32[128]
    assert tiles("sm_80", 128, torch.bfloat16, is_full=True) == HALF["sm_80"][128]
    assert tiles("interpreter", 128, torch.float16, is_full=True) == INTERPRETER


def test_a_device_without_a_gpu_counts_as_an_h200():
    assert num_sms(torch.device("cpu")) == 132
