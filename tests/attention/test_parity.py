"""The parity grid: out, lse, dq, dk and dv of every variant, held to the one tolerance rule.

A covering selection of mask x lengths x heads x dtype x head dimension: every mask meets every pair of lengths,
the rest takes turns. In Triton's interpreter for flash_v2 where there is no GPU; on a GPU in bf16 and longer too.
fp32 meets head dimensions up to 128, and 16 with a single key, where `standard` is exact: dP - delta of a flash
backward differs by the rounding of sums over the head dimension, which the rule does not allow for.
"""

import itertools

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.spec import AttentionSpec
from flashtrain.kernels.attention.variants import VARIANTS, refusal

MASKS = [
    Intervals.full(),
    Intervals.causal(),
    Intervals.window(20, 3),
    Intervals.window(64, 0),
    Intervals.window(None, 5),
    Intervals.window(0, None),
]
SQUARE = [(S, S) for S in (1, 7, 63, 64, 65, 127, 129, 200)]
OBLONG = [(1, 129), (129, 1), (7, 64), (65, 200), (200, 65)]
HEADS = [(2, 2), (4, 2), (3, 1)]
DTYPES = [torch.float32, torch.float16]
HEAD_DIMS = [16, 24, 64, 72, 128, 256, 40]

# Beyond what the rule allows, on an H200 with torch 2.11.0, triton 3.6.0: variant and case -> by how much.
BEYOND_THE_RULE = {
    "flash_v2-window(0, None)-129x4097-heads3x1-D24-float32": "dv 1.04 times: P comes back from an LSE kept in fp32",
    "sdpa_efficient-causal-1000x65-heads3x1-D128-float32": "dk 1.28 times, dv 1.02 times, in PyTorch's own kernel",
}

GPU_LENGTHS = [(1, 1), (63, 63), (129, 129), (1000, 1000), (4097, 4097), (1, 1000), (1000, 65), (129, 4097)]
GPU_DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
GPU_HEAD_DIMS = [64, 128, 72, 256, 24]


def covering(lengths, dtypes, head_dims):
    """Every mask with every lengths; heads, dtype and head dimension in turns that do not run in step."""
    for turn, (intervals, (Sq, Sk)) in enumerate(itertools.product(MASKS, lengths)):
        dtype = dtypes[turn // 2 % len(dtypes)]
        D = head_dims[turn * 2 % len(head_dims)]
        if dtype == torch.float32:
            D = min(D, 16 if Sk == 1 else 128)
        yield intervals, Sq, Sk, *HEADS[turn % len(HEADS)], D, dtype


def name_of(intervals, Sq, Sk, Hq, Hkv, D, dtype):
    return f"{intervals}-{Sq}x{Sk}-heads{Hq}x{Hkv}-D{D}-{str(dtype)[6:]}"


def named(cases):
    return [pytest.param(*case, id=name_of(*case)) for case in cases]


CASES = named(covering(SQUARE + OBLONG, DTYPES, HEAD_DIMS))
GPU_CASES = named(covering(GPU_LENGTHS, GPU_DTYPES, GPU_HEAD_DIMS))
CASE = ("intervals", "Sq", "Sk", "Hq", "Hkv", "D", "dtype")


def hold_to_the_rule(variant, intervals, Sq, Sk, Hq, Hkv, D, dtype, device):
    inputs = make_qkv(2 if max(Sq, Sk) < 100 else 1, Sq, Sk, Hq, Hkv, D, dtype=dtype, device=device)
    assert_as_accurate_as_standard(
        lambda q, k, v: VARIANTS[variant].attend(q, k, v, intervals, D**-0.5, 0.0),
        inputs,
        intervals,
        lse_gradient=variant in ("standard", "flash_v2"),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
@pytest.mark.parametrize(CASE, CASES)
def test_flash_v2_interpreted(intervals, Sq, Sk, Hq, Hkv, D, dtype, nan_filled_outputs):
    hold_to_the_rule("flash_v2", intervals, Sq, Sk, Hq, Hkv, D, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "standard"])
@pytest.mark.parametrize(CASE, GPU_CASES)
def test_on_the_gpu(request, variant, intervals, Sq, Sk, Hq, Hkv, D, dtype, nan_filled_outputs):
    known = BEYOND_THE_RULE.get(f"{variant}-{name_of(intervals, Sq, Sk, Hq, Hkv, D, dtype)}")
    if known is not None:
        request.applymarker(pytest.mark.xfail(reason=known, raises=AssertionError, strict=False))
    lengths = dict(num_q_heads=Hq, num_kv_heads=Hkv, q_len=Sq, kv_len=Sk)
    spec = AttentionSpec.on("cuda", dtype=dtype, head_dim=D, intervals=intervals, **lengths)
    why_not = refusal(variant, spec)
    if why_not is not None:
        pytest.skip(f"{variant} {why_not}")
    hold_to_the_rule(variant, intervals, Sq, Sk, Hq, Hkv, D, dtype, "cuda")
