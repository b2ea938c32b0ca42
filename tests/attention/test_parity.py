"""The parity grid: out, lse, dq, dk and dv of every variant, held to the one tolerance rule.

A covering selection of mask x lengths x heads x dtype x head dimensions x softcap: every mask meets every pair of
lengths, the rest takes turns. In Triton's interpreter for flash_v2, and a few for flash_v1, where there is no GPU; on
a GPU in bf16 and longer too. fp32 meets head dimensions up to 128, and no single key, where `standard` is exact: dP -
delta of a flash backward differs by the rounding of sums over the head dimension, which the rule does not allow for.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.spec import AttentionSpec
from flashtrain.kernels.attention.variants import VARIANTS, refusal


def documents(B, S):
    """(B, S) a few documents in each row, other ones in each row of the batch."""
    starts = torch.rand(B, S, generator=torch.Generator().manual_seed(S)) < 4 / S
    return starts.cumsum(dim=1)


def in_documents(window, B, Sq, Sk):
    return window.in_documents(documents(B, Sq), documents(B, Sk))


def in_sequences(window, B, Sq, Sk):
    """The same for all rows of the batch: sequences of queries, some without keys and the reverse, then padding."""
    ends = torch.tensor([0.0, 0.3, 0.3, 0.6, 0.9])
    other_ends = torch.tensor([0.0, 0.0, 0.4, 0.6, 0.9])
    return window.in_sequences((ends * Sq).int(), Sq, (other_ends * Sk).int(), Sk)


def prefix(B, Sq, Sk):
    return Intervals.prefix_lm(torch.arange(1, B + 1) * Sk // 3, Sq, Sk)


# The mask of a batch of B rows with Sq queries and Sk keys, on the CPU.
MASKS = {
    "full": lambda B, Sq, Sk: Intervals.full(),
    "causal": lambda B, Sq, Sk: Intervals.causal(),
    "window(20, 3)": lambda B, Sq, Sk: Intervals.window(20, 3),
    "window(64, 0)": lambda B, Sq, Sk: Intervals.window(64, 0),
    "window(None, 5)": lambda B, Sq, Sk: Intervals.window(None, 5),
    "window(0, None)": lambda B, Sq, Sk: Intervals.window(0, None),
    "documents": lambda *shape: in_documents(Intervals.causal(), *shape),
    "windows in documents": lambda *shape: in_documents(Intervals.window(20, 3), *shape),
    "sequences": lambda *shape: in_sequences(Intervals.causal(), *shape),
    "chunks": lambda B, Sq, Sk: Intervals.causal().in_chunks(50, Sq, Sk),
    "prefix": prefix,
    "prefix in documents": lambda *shape: prefix(*shape) & in_documents(Intervals.full(), *shape),
}
SQUARE = [(S, S) for S in (1, 7, 63, 64, 65, 127, 129, 200)]
OBLONG = [(1, 129), (129, 1), (7, 64), (65, 200), (200, 65)]
FLASH_V1_LENGTHS = [(1, 129), (65, 65), (129, 1), (65, 200), (200, 65)]
FLASH_V1_MASKS = ["full", "causal"]
HEADS = [(2, 2), (4, 2), (3, 1)]
DTYPES = [torch.float32, torch.float16]
HEAD_DIMS = [(16, 16), (24, 24), (64, 64), (72, 48), (128, 128), (256, 256), (40, 96)]
SOFTCAPS = [0.0, 0.0, 1.5]

# Variant and case -> by how much it is beyond what the rule allows where it was measured, and why.
MEASURED_ON = ("NVIDIA H200", "2.11.0", "3.6.0")  # device, torch, triton
BEYOND_THE_RULE = {
    "flash_v2-window(0, None)-129x4097-heads3x1-D24x128-float32": "dv 1.5 times: P comes back from an LSE kept in fp32",
    "flash_v2-prefix-1000x65-heads3x1-D72x72-softcap1.5-float32": "dk 2.0 and dv 2.4 times: approximate exp2 in tanh",
    "flash_v2-windows in documents-1000x65-heads3x1-D24x128-float32": "dq 1.01 times: dP and delta are rounded apart",
    "sdpa_efficient-windows in documents-1000x65-heads3x1-D24x128-float32": "dk 1.03 times, in PyTorch's own kernel",
    "sdpa_efficient-prefix in documents-1000x65-heads4x2-D128x128-float32": "dq 1.3 times, in PyTorch's own kernel",
}

GPU_LENGTHS = [(1, 1), (63, 63), (129, 129), (1000, 1000), (4097, 4097), (1, 1000), (1000, 65), (129, 4097)]
GPU_DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]
GPU_HEAD_DIMS = [(64, 64), (128, 128), (72, 72), (256, 256), (24, 128)]
# FlexAttention compiles each case for many seconds.
FLEX_LENGTHS = [(1000, 1000), (129, 4097)]


class Case(NamedTuple):
    mask: str
    Sq: int
    Sk: int
    Hq: int
    Hkv: int
    D: int
    Dv: int
    softcap: float
    dtype: torch.dtype

    def __str__(self):
        cap = f"-softcap{self.softcap}" * (self.softcap > 0)
        lengths, heads, dims = f"{self.Sq}x{self.Sk}", f"heads{self.Hq}x{self.Hkv}", f"D{self.D}x{self.Dv}"
        return f"{self.mask}-{lengths}-{heads}-{dims}{cap}-{str(self.dtype)[6:]}"


def covering(lengths, dtypes, head_dims, masks=tuple(MASKS)):
    """Every mask with every lengths; heads, dims, cap and dtype in turns that do not run in step."""
    for turn, (mask, (Sq, Sk)) in enumerate(itertools.product(masks, lengths)):
        dtype = dtypes[turn // 2 % len(dtypes)]
        D, Dv = head_dims[turn * 2 % len(head_dims)]
        if dtype == torch.float32 and Sk == 1:
            dtype = torch.float16
        if dtype == torch.float32:
            D, Dv = min(D, 128), min(Dv, 128)
        yield Case(mask, Sq, Sk, *HEADS[turn % len(HEADS)], D, Dv, SOFTCAPS[turn // 5 % len(SOFTCAPS)], dtype)


def hold_to_the_rule(variant, case, device):
    B = 2 if max(case.Sq, case.Sk) < 300 else 1
    intervals = MASKS[case.mask](B, case.Sq, case.Sk).to(device)
    inputs = make_qkv(
        B, case.Sq, case.Sk, case.Hq, case.Hkv, case.D, case.Dv, dtype=case.dtype, device=device
    )
    assert_as_accurate_as_standard(
        lambda q, k, v: VARIANTS[variant].attend(q, k, v, intervals, case.D**-0.5, case.softcap),
        inputs,
        intervals,
        softcap=case.softcap,
        lse_gradient=variant in ("standard", "flash_v1", "flash_v2", "flash_hopper", "flex"),
    )


def here():
    import triton

    return torch.cuda.get_device_name(), torch.__version__.partition("+")[0], triton.__version__


def expected_failure(variant, case, where):
    """Strict where the same bits come out as when it was measured: there a pass is news, and the entry goes."""
    reason, measured = BEYOND_THE_RULE[f"{variant}-{case}"], " ".join(MEASURED_ON)
    doubts = []
    if not variant.startswith("flash"):
        doubts.append(f"{variant} adds up in no fixed order, so a run may be within the rule")
    if where != MEASURED_ON:
        doubts.append(f"measured with {measured}, and with {' '.join(where)} it may be within the rule")
    return pytest.mark.xfail(reason="; ".join([reason, *doubts]), raises=AssertionError, strict=not doubts)


def test_what_is_beyond_the_rule_is_in_the_grid():
    grid = {f"{variant}-{case}" for case in covering(GPU_LENGTHS, GPU_DTYPES, GPU_HEAD_DIMS) for variant in VARIANTS}
    assert BEYOND_THE_RULE.keys() <= grid


@pytest.mark.parametrize(
    ("variant", "where", "strict", "doubt"),
    [
        ("flash_v2", MEASURED_ON, True, None),
        ("flash_v2", ("NVIDIA A100", "2.11.0", "3.6.0"), False, "with NVIDIA A100 2.11.0 3.6.0 it may be within"),
        ("sdpa_efficient", MEASURED_ON, False, "sdpa_efficient adds up in no fixed order"),
    ],
)
def test_a_failure_is_demanded_where_it_is_certain(variant, where, strict, doubt):
    case = next(key for key in BEYOND_THE_RULE if key.startswith(variant)).removeprefix(f"{variant}-")
    mark = expected_failure(variant, case, where)
    assert mark.kwargs["strict"] is strict and (doubt is None or doubt in mark.kwargs["reason"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
@pytest.mark.parametrize("case", list(covering(SQUARE + OBLONG, DTYPES, HEAD_DIMS)), ids=str)
def test_flash_v2_interpreted(case, nan_filled_outputs):
    hold_to_the_rule("flash_v2", case, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here")
@pytest.mark.parametrize("case", list(covering(FLASH_V1_LENGTHS, DTYPES, HEAD_DIMS, FLASH_V1_MASKS)), ids=str)
def test_flash_v1_interpreted(case, nan_filled_outputs):
    hold_to_the_rule("flash_v1", case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "standard"])
@pytest.mark.parametrize("case", list(covering(GPU_LENGTHS, GPU_DTYPES, GPU_HEAD_DIMS)), ids=str)
def test_on_the_gpu(request, variant, case, nan_filled_outputs):
    if variant == "flex" and (case.Sq, case.Sk) not in FLEX_LENGTHS:
        pytest.skip(f"{variant} is tested at {FLEX_LENGTHS}")
    if f"{variant}-{case}" in BEYOND_THE_RULE:
        request.applymarker(expected_failure(variant, case, here()))
    spec = AttentionSpec.on(
        "cuda",
        dtype=case.dtype,
        head_dim=case.D,
        v_head_dim=case.Dv,
        num_q_heads=case.Hq,
        num_kv_heads=case.Hkv,
        q_len=case.Sq,
        kv_len=case.Sk,
        intervals=MASKS[case.mask](1, case.Sq, case.Sk),
        softcap=case.softcap,
    )
    why_not = refusal(variant, spec)
    if why_not is not None:
        pytest.skip(f"{variant} {why_not}")
    hold_to_the_rule(variant, case, "cuda")
