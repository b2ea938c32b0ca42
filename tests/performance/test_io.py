"""The model of traffic against small cases counted by hand, closed forms, and what must hold for any shape."""

import pytest
import torch

from flashtrain.kernels.attention import Intervals, Tile, Tiles, block_sizes
from flashtrain.performance.io import (
    VARIANTS,
    WITHIN_SOFTMAX,
    Launch,
    Shape,
    compulsory,
    flash_elements,
    padded,
    predict,
    standard_elements,
)
from flashtrain.performance.traffic import elements_by_matrix, elements_by_pass, total_bytes, total_elements

PASSES = ("forward", "backward")
HALF = torch.bfloat16


def square(tile):
    """A launch with tiles of `tile` queries and keys throughout."""
    one = Tile(tile, tile, 4, 1)
    return Launch(Tiles(one, one, one, use_tma=False), sram_elements=4 * 2 * tile)


def one_head(N, d):
    return Shape(1, N, N, 1, 1, d)


def test_standard_backward_by_hand():
    """N = 4, d = 2: dO and P make dV, and so on; on a GPU the product of P and dP is a matrix for a while."""
    work = predict("standard", "backward", one_head(4, 2), Intervals.full(), HALF, square(2))
    within = [(one.matrix, one.direction, one.elements) for one in work.transfers if one.pass_name == WITHIN_SOFTMAX]
    assert within == [("P", "read", 16), ("P*dP", "read", 16), ("P*dP", "write", 16)]
    seen = [one for one in work.transfers if one.pass_name != WITHIN_SOFTMAX]
    assert elements_by_matrix(seen) == {
        ("P", "read"): 32, ("dO", "read"): 16, ("dV", "write"): 8, ("V", "read"): 8, ("dP", "write"): 16,
        ("dP", "read"): 16, ("dS", "write"): 16, ("dS", "read"): 32, ("K", "read"): 8, ("Q", "read"): 8,
        ("dQ", "read"): 8, ("dQ", "write"): 16, ("dK", "read"): 8, ("dK", "write"): 16,
    }  # fmt: skip
    assert work.flops == 4 * 64


def test_standard_by_hand():
    """N = 4, d = 2: Q, K, V, O of 8 elements, S and P of 16, each product 2 * 4 * 4 * 2 operations."""
    work = predict("standard", "forward", one_head(4, 2), Intervals.full(), HALF, square(2))
    assert [(one.pass_name, one.matrix, one.direction, one.elements) for one in work.transfers] == [
        ("S = scale Q K^T", "Q", "read", 8),
        ("S = scale Q K^T", "K", "read", 8),
        ("S = scale Q K^T", "S", "write", 16),
        ("P = softmax(S)", "S", "read", 16),
        ("P = softmax(S)", "P", "write", 16),
        ("O = P V", "P", "read", 16),
        ("O = P V", "V", "read", 8),
        ("O = P V", "O", "write", 8),
    ]
    assert total_elements(work.transfers) == standard_elements(4, 2) == 96
    assert total_bytes(work.transfers) == 192
    assert work.flops == 2 * 64


def test_flash_v2_by_hand():
    """N = 4, d = 2, tiles of 2: either tile reads all of K and V, if causal the first tile their first half."""
    full = predict("flash_v2", "forward", one_head(4, 2), Intervals.full(), HALF, square(2))
    assert elements_by_matrix(full.transfers) == {
        ("Q", "read"): 8, ("K", "read"): 16, ("V", "read"): 16, ("O", "write"): 8, ("LSE", "write"): 4,
    }  # fmt: skip
    causal = predict("flash_v2", "forward", one_head(4, 2), Intervals.causal(), HALF, square(2))
    assert elements_by_matrix(causal.transfers)["K", "read"] == 4 + 8
    assert causal.flops / full.flops == 3 / 4


def test_flash_v2_backward_by_hand():
    """As above, causal: key tile 0 is seen by both query tiles, key tile 1 by the second."""
    work = predict("flash_v2", "backward", one_head(4, 2), Intervals.causal(), HALF, square(2))
    assert elements_by_pass(work.transfers) == {
        ("delta", "O", "read"): 8, ("delta", "dO", "read"): 8, ("delta", "LSE", "read"): 4,
        ("delta", "dLSE", "read"): 4, ("delta", "delta", "write"): 4, ("delta", "lse2", "write"): 4,
        ("dK, dV", "K", "read"): 8, ("dK, dV", "V", "read"): 8, ("dK, dV", "Q", "read"): 8 + 4,
        ("dK, dV", "dO", "read"): 8 + 4, ("dK, dV", "lse2", "read"): 4 + 2, ("dK, dV", "delta", "read"): 4 + 2,
        ("dK, dV", "dK", "write"): 8, ("dK, dV", "dV", "write"): 8,
        ("dQ", "Q", "read"): 8, ("dQ", "dO", "read"): 8, ("dQ", "lse2", "read"): 4, ("dQ", "delta", "read"): 4,
        ("dQ", "K", "read"): 4 + 8, ("dQ", "V", "read"): 4 + 8, ("dQ", "dQ", "write"): 8,
    }  # fmt: skip


def test_flash_v1_by_hand():
    """N = 64, d = 16, blocks of 16: K and V once; Q, O, l and m go by four times, O from a start of zeros."""
    launch = Launch(square(16).tiles, sram_elements=4 * 16 * 16)
    assert block_sizes(launch.sram_elements, 16) == (16, 16)
    work = predict("flash_v1", "forward", one_head(64, 16), Intervals.full(), torch.float32, launch)
    assert elements_by_matrix(one for one in work.transfers if one.pass_name == "forward") == {
        ("K", "read"): 1024, ("V", "read"): 1024, ("Q", "read"): 4096, ("O", "read"): 4096, ("O", "write"): 4096,
        ("l", "read"): 256, ("l", "write"): 256, ("m", "read"): 256, ("m", "write"): 256,
    }  # fmt: skip
    assert elements_by_pass(work.transfers)["start", "O", "write"] == 1024
    assert not [one for one in work.transfers if one.pass_name == "finish" and one.matrix == "O"]
    half = predict("flash_v1", "forward", one_head(64, 16), Intervals.full(), HALF, launch)
    assert {(one.direction, one.element_bytes) for one in half.transfers if one.matrix == "O"} == {
        ("read", 4), ("write", 4), ("write", 2),
    }  # fmt: skip


def test_causal_flash_v1_does_half_and_the_diagonal():
    """Of 4 x 4 blocks, 10."""
    launch = Launch(square(16).tiles, sram_elements=4 * 16 * 16)
    full, causal = (
        predict("flash_v1", "forward", one_head(64, 16), mask, HALF, launch)
        for mask in (Intervals.full(), Intervals.causal())
    )
    assert causal.flops * 16 == full.flops * 10


@pytest.mark.parametrize(("N", "d"), [(1024, 64), (4096, 128), (777, 40)])
@pytest.mark.parametrize("heads", [1, 6])
def test_standard_is_the_closed_form(N, d, heads):
    shape = Shape(1, N, N, heads, heads, d)
    work = predict("standard", "forward", shape, Intervals.full(), HALF, square(64))
    assert total_elements(work.transfers) == heads * standard_elements(N, d)


def test_flash_v1_is_of_the_order_of_its_closed_form():
    """Twice the length: four times the traffic; four times the SRAM: a quarter, where B_c = M / 4d exactly."""
    def elements(N, M):
        work = predict("flash_v1", "forward", one_head(N, 64), Intervals.full(), HALF, Launch(square(64).tiles, M))
        return sum(one.elements for one in work.transfers if one.matrix in ("Q", "O") and one.pass_name == "forward")

    M = 4 * 64 * 128
    assert elements(8192, M) == 4 * elements(4096, M)
    assert elements(8192, M) == 4 * elements(8192, 4 * M)
    assert elements(8192, M) / flash_elements(8192, 64, M) == 3 * 4


def test_what_a_mask_adds_to_standard_is_named():
    def names(mask, shape, pass_name):
        return {one.pass_name for one in predict("standard", pass_name, shape, mask, HALF, square(2)).transfers}

    plain = one_head(8, 2)
    full, causal = (names(mask, plain, "forward") for mask in (Intervals.full(), Intervals.causal()))
    assert causal - full == {"make the mask", "mask S"} and full < causal
    assert names(Intervals.causal(), plain, "backward") - names(Intervals.full(), plain, "backward") == {"mask dS"}
    oblong = names(Intervals.causal(), Shape(1, 8, 4, 1, 1, 2), "forward")
    assert oblong - causal == {"seek empty rows", "fill empty rows of S", "clear empty rows of P"}
    grouped = names(Intervals.full(), Shape(2, 8, 8, 4, 2, 2), "forward")
    assert grouped - full == {"copy Q", "copy K and V"}


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", [Intervals.full(), Intervals.causal()], ids=str)
def test_more_is_never_less(variant, pass_name, mask):
    """Longer, wider, more heads, more rows: more bytes, no fewer FLOPs; and never below what has to move."""
    def work(**sizes):
        base = dict(batch=1, q_len=300, kv_len=300, num_q_heads=2, num_kv_heads=2, head_dim=32)
        shape = Shape(**base | sizes)
        found = predict(variant, pass_name, shape, mask, HALF, square(64))
        assert total_bytes(found.transfers) >= total_bytes(compulsory(pass_name, shape, HALF))
        return total_bytes(found.transfers), found.flops

    bytes, flops = work()
    for sizes in ({"q_len": 500, "kv_len": 500}, {"head_dim": 64}, {"num_q_heads": 4}, {"batch": 3}):
        more = work(**sizes)
        assert more[0] > bytes and more[1] > flops


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", [Intervals.full(), Intervals.causal(), Intervals.window(40, 0)], ids=str)
def test_a_pass_that_reads_nothing_again_asks_for_matrices_once(variant, pass_name, mask):
    """And what every pass asks for is a matrix of the work's."""
    work = predict(variant, pass_name, Shape(2, 200, 200, 4, 2, 32), mask, HALF, square(64))
    for one in work.passes:
        assert {transfer.pass_name for transfer in one.transfers} <= {one.name}
        once = [transfer.elements <= work.matrices[transfer.matrix] for transfer in one.transfers]
        assert all(once) or one.reused_bytes > 0


@pytest.mark.parametrize(
    ("mask", "readers", "widest"),
    [
        (Intervals.full(), 8, 16),
        (Intervals.causal(), 8, 16),
        (Intervals.window(3, 0), 3, 6),
        (Intervals.window(0, 0), 1, 2),
        (Intervals.causal().in_documents(torch.tensor([[0] * 4 + [1] * 6 + [2] * 6, [0] * 8 + [1] * 8])), 4, 8),
    ],
    ids=["full", "causal", "window", "diagonal", "documents"],
)
def test_readers_and_what_they_read_again_follow_the_mask(mask, readers, widest):
    """16 tokens in two rows, d = 2, tiles of 2: with a window of 4 keys a tile sees 3 blocks, and 3 tiles a block."""
    shape = Shape(2, 16, 16, 4, 2, 2)
    (forward,) = predict("flash_v2", "forward", shape, mask, HALF, square(2)).passes
    delta, dkdv, dq = predict("flash_v2", "backward", shape, mask, HALF, square(2)).passes
    assert delta.reused_bytes == 0
    assert forward.readers == dkdv.readers == dq.readers == readers
    assert forward.reused_bytes == dq.reused_bytes == 2 * widest * 2 * 2
    assert dkdv.reused_bytes == 2 * 2 * widest * (2 * 2 + 4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_equal_rows_is_its_rows(variant):
    one, three = (
        predict(variant, "forward", Shape(batch, 100, 100, 2, 2, 32), Intervals.causal(), HALF, square(32))
        for batch in (1, 3)
    )
    assert three.flops == 3 * one.flops
    # Of the mask there is one for all rows; and only several rows have to be laid out anew.
    once, thrice = (
        elements_by_matrix(t for t in work.transfers if t.matrix != "mask" and not t.pass_name.startswith("copy"))
        for work in (one, three)
    )
    assert thrice == {key: 3 * elements for key, elements in once.items()}


@pytest.mark.parametrize(("head_dim", "width"), [(8, 16), (16, 16), (40, 64), (64, 64), (72, 128)])
def test_head_dims_are_computed_at_powers_of_two(head_dim, width):
    assert padded(head_dim) == width
