import pytest
import torch

from flashtrain.kernels.attention import Intervals
from flashtrain.performance.flops import flops_per_token, mfu, peak_flops, visible_keys

GPT2 = {"num_weights": 123_653_376, "num_layers": 12, "num_heads": 12, "head_dim": 64}


def test_usual_and_visible_counts_of_gpt2():
    usual = flops_per_token(**GPT2, keys_per_query=2048)
    visible = flops_per_token(**GPT2, keys_per_query=visible_keys(12 * [Intervals.causal()], [2048]))
    assert usual == 6 * 123_653_376 + 12 * 12 * 768 * 2048
    assert visible == 6 * 123_653_376 + 12 * 12 * 768 * 1024.5


@pytest.mark.parametrize(("length", "gap"), [(1024, 0.07), (8192, 0.38), (131072, 0.91)], ids="S{}".format)
def test_the_counts_part_at_long_context(length, gap):
    usual = flops_per_token(**GPT2, keys_per_query=length)
    visible = flops_per_token(**GPT2, keys_per_query=(length + 1) / 2)
    assert usual / visible - 1 == pytest.approx(gap, abs=0.015)


@pytest.mark.parametrize("lengths", [[48], [20, 28], [5, 17, 26], 48 * [1], [16, 16, 16]], ids=str)
def test_visible_keys_are_those_of_the_dense_masks(lengths):
    """The mean over layers and queries of a row that holds sequences of these lengths."""
    layers = [Intervals.window(7, 0), Intervals.causal(), Intervals.window(7, 0)]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    dense = [mask.in_documents(documents).dense(48, 48).sum().item() for mask in layers]
    assert visible_keys(layers, lengths) == pytest.approx(sum(dense) / (3 * 48), rel=1e-12)


def test_mfu_is_a_share_of_the_dense_peak_and_none_without_one():
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert peak_flops(name, torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H200", torch.float32) == 67e12
    assert peak_flops("NVIDIA H200", torch.float32, tf32=True) == 989e12 / 2
    assert peak_flops("NVIDIA H200", torch.bfloat16, tf32=True) == 989e12
    assert mfu(460_000, 1e9, peak_flops("NVIDIA H200", torch.bfloat16)) == pytest.approx(0.4651, abs=1e-4)
    assert mfu(460_000, 1e9, peak_flops("NVIDIA GeForce RTX 4090", torch.bfloat16)) is None


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "A100", "cpu", ""])
def test_a_name_is_known_exactly_or_not_at_all(name):
    assert peak_flops(name, torch.bfloat16) is None
