"""flash_v1: its blocks, its corners, and its operators (interpreted where there is no GPU)."""

import pytest

from flashtrain.kernels.attention import block_sizes

KIB = 1024


@pytest.mark.parametrize(
    ("sram_elements", "head_dim", "expected"),
    [
        pytest.param(96 * KIB, 64, (64, 256), id="192 KB of fp16, B_c 384"),
        pytest.param(58_112, 64, (64, 128), id="H200, B_c 227"),
        pytest.param(58_112, 128, (64, 64), id="H200, B_c 114"),
        pytest.param(58_112, 256, (32, 32), id="H200, B_c 57"),
        pytest.param(16 * KIB, 64, (64, 64), id="exact"),
        pytest.param(16 * KIB + 1, 64, (64, 64), id="rounded up, then down"),
        pytest.param(16 * KIB - 1, 64, (64, 64), id="rounded up"),
        pytest.param(16 * KIB - 256, 64, (32, 32), id="one less"),
        pytest.param(58_112, 16, (16, 512), id="B_r is d"),
        pytest.param(58_112, 24, (16, 512), id="d is no power of two"),
        pytest.param(1000, 256, (16, 16), id="at least 16"),
    ],
)
def test_block_sizes(sram_elements, head_dim, expected):
    assert block_sizes(sram_elements, head_dim) == expected


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_blocks_fit_the_sram(head_dim):
    """Four blocks of head_dim columns, unless 16 rows are too many; twice the keys would not fit."""
    for sram_elements in (16_384, 25_344, 41_728, 58_112):
        queries, keys = block_sizes(sram_elements, head_dim)
        assert 2 * (queries + keys) * head_dim <= sram_elements
        assert 4 * 2 * keys * head_dim > sram_elements
        assert queries == min(keys, head_dim)
