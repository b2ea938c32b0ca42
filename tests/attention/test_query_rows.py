"""What surrounds flash_hopper's backward kernel, interpreted: where sums start, and dQ in the order of registers."""

import math

import pytest
import torch

from flashtrain.kernels.attention import Intervals

geometry = pytest.importorskip("flashtrain.kernels.attention.geometry")
query_rows = pytest.importorskip("flashtrain.kernels.attention.flash_hopper.query_rows")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU by the tests of the whole backward")

BATCH, LENGTH, HEADS = 2, 150, 3
KEYS = 128
"""Of a tile."""


def start(out, dout, lse, dlse, columns, BLOCK_M, intervals, kv_len, cap=None, in_order=False):
    mask = geometry.mask_arguments(intervals, out.shape[1], kv_len)
    return query_rows.start(
        out, dout, lse, dlse, columns, BLOCK_M, KEYS, kv_len, mask, scale_log2e=0.25, cap=cap, in_order=in_order
    )


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize(("head_dim", "BLOCK_M", "columns"), [(64, 128, 64), (40, 128, 64), (128, 64, 128)])
def test_where_sums_start(head_dim, BLOCK_M, columns, cap, nan_filled_outputs):
    torch.manual_seed(0)
    out, dout = torch.randn(2, BATCH, LENGTH, HEADS, head_dim)
    lse, dlse = torch.randn(2, BATCH, HEADS, LENGTH)
    lse[0, 1, 7] = -math.inf
    s_start, dp_start, dq_sum, dq_next = start(out, dout, lse, dlse, columns, BLOCK_M, Intervals.full(), LENGTH, cap)
    assert dq_next is None
    padded = -(-LENGTH // BLOCK_M) * BLOCK_M
    assert s_start.shape == dp_start.shape == (BATCH, HEADS, padded)
    assert dq_sum.numel() == s_start.numel() * columns and not dq_sum.any()
    units = math.log2(math.e) / (0.25 if cap is None else 1.0)
    delta = (out * dout).sum(-1).transpose(1, 2)
    seen = lse > -math.inf
    torch.testing.assert_close(s_start[..., :LENGTH], -lse.masked_fill(~seen, math.inf) * units)
    torch.testing.assert_close(dp_start[..., :LENGTH], torch.where(seen, dlse - delta, 0.0), rtol=1e-5, atol=1e-5)
    assert (s_start[..., LENGTH:] == -math.inf).all() and not dp_start[..., LENGTH:].any()


@pytest.mark.parametrize("kv_len", [40, 150, 1000])
@pytest.mark.parametrize("intervals", [Intervals.causal(), Intervals.full(), Intervals.window(None, 77)], ids=str)
@pytest.mark.parametrize(("BLOCK_M", "columns"), [(128, 64), (64, 128)])
def test_the_last_tile_that_a_block_sees_adds_first(BLOCK_M, columns, intervals, kv_len, nan_filled_outputs):
    out, lse = torch.randn(BATCH, LENGTH, HEADS, columns), torch.randn(BATCH, HEADS, LENGTH)
    *_, dq_next = start(out, out, lse, lse, columns, BLOCK_M, intervals, kv_len, in_order=True)
    seen = intervals.dense(LENGTH, kv_len)[0].split(BLOCK_M)
    last_tiles = [max((rows.any(0).nonzero() // KEYS).flatten().tolist(), default=-1) for rows in seen]
    assert torch.equal(dq_next, torch.tensor(last_tiles, dtype=torch.int32).expand(BATCH, HEADS, -1))


@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (40, 64), (72, 128), (128, 128)])
def test_dq_is_read_in_the_order_of_the_tensor_cores_registers(head_dim, columns, nan_filled_outputs):
    dq = torch.empty(BATCH, LENGTH, HEADS, head_dim)
    rows = torch.arange(BATCH * HEADS * 192 * columns, dtype=torch.float32).view(BATCH, HEADS, 192, columns)
    # Of a piece: D's fragments as the PTX ISA lists them, register by register, of wgmma.mma_async.m64nNk16.
    warp, lane, register = torch.meshgrid(*map(torch.arange, (4, 32, 32)), indexing="ij")
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + lane % 4 * 2 + register % 2
    place = register // 4 * 512 + (32 * warp + lane) * 4 + register % 4
    pieces = rows.unflatten(2, (3, 64)).unflatten(4, (-1, 64)).transpose(3, 4)
    sums = torch.empty(*pieces.shape[:-2], 64 * 64)
    sums[..., place.flatten()] = pieces[..., row.flatten(), column.flatten()]
    query_rows.finish(sums.flatten(), dq, columns, scale=0.5)
    assert torch.equal(dq, 0.5 * rows[:, :, :LENGTH, :head_dim].transpose(1, 2))
