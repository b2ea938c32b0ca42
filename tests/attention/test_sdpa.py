"""PyTorch's kernels behind the contract: as accurate as `standard`, pinned, and without copies."""

import pytest
import torch
from tolerance import assert_as_accurate_as_standard, make_qkv
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.kernels.attention import Intervals, attention, sdpa

FULL, CAUSAL, WINDOW = Intervals.full(), Intervals.causal(), Intervals.window(20, 3)
CPU_KERNELS = {
    "sdpa_flash": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "sdpa_math": "aten._safe_softmax.default",
}
CUDA_KERNELS = {
    "sdpa_flash": "aten._scaled_dot_product_flash_attention.default",
    "sdpa_efficient": "aten._scaled_dot_product_efficient_attention.default",
    "sdpa_cudnn": "aten._scaled_dot_product_cudnn_attention.default",
}

SQUARE = [(2, 2), (63, 63), (130, 130)]
OBLONG = [(1, 70), (33, 70), (70, 33)]
FLASH_CASES = [(FULL, *lengths) for lengths in SQUARE + OBLONG] + [(CAUSAL, *lengths) for lengths in SQUARE]
MASK_CASES = [(mask, *lengths) for mask in (FULL, CAUSAL, WINDOW) for lengths in SQUARE + OBLONG]


def case_id(case) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


def attend_with(variant: str, intervals: Intervals):
    return lambda q, k, v: attention(q, k, v, intervals, variant=variant)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize(
    ("variant", "case"),
    [("sdpa_flash", case) for case in FLASH_CASES] + [("sdpa_math", case) for case in MASK_CASES],
    ids=case_id,
)
def test_cpu_kernels_are_as_accurate_as_standard(variant, case, heads):
    intervals, Sq, Sk = case
    inputs = make_qkv(2, Sq, Sk, *heads, 24)
    assert_as_accurate_as_standard(attend_with(variant, intervals), inputs, intervals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", CPU_KERNELS)
def test_cpu_kernels_in_16_bits(variant, dtype):
    inputs = make_qkv(2, 130, 130, 4, 4, 64, dtype=dtype)
    assert_as_accurate_as_standard(attend_with(variant, CAUSAL), inputs, CAUSAL)


@pytest.mark.parametrize("intervals", [CAUSAL, WINDOW], ids=str)
def test_rows_that_see_no_key_are_exactly_zero(intervals):
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 40, 16, 4, 2, 8))
    out = attention(q, k, v, intervals, variant="sdpa_math")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    empty = ~intervals.dense(40, 16)[0].any(dim=1)
    assert empty.any()
    assert (out[:, empty] == 0).all() and (dq[:, empty] == 0).all()
    assert dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize(("Sq", "Sk"), [(3, 0), (0, 3)], ids=["no-keys", "no-queries"])
def test_math_takes_empty_sequences(Sq, Sk):
    q, k, v = (x.requires_grad_() for x in make_qkv(1, Sq, Sk, 2, 1, 8))
    out = attention(q, k, v, CAUSAL, variant="sdpa_math")
    assert out.shape == (1, Sq, 2, 8) and (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def compile_and_record(function, operators: list[str]):
    """`function` compiled without a graph break; the operators of its forward and backward are added."""

    def list_operators(graph_module, _inputs):
        operators.extend(str(node.target) for node in graph_module.graph.nodes)
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=list_operators))


@pytest.mark.parametrize(
    ("variant", "case"), [("sdpa_flash", (CAUSAL, 63, 63)), ("sdpa_math", (CAUSAL, 70, 33))], ids=case_id
)
def test_compiled_cpu_kernels_stay_pinned(variant, case):
    intervals, Sq, Sk = case
    operators: list[str] = []
    compiled = compile_and_record(attend_with(variant, intervals), operators)
    assert_as_accurate_as_standard(compiled, make_qkv(2, Sq, Sk, 4, 2, 16), intervals)
    assert CPU_KERNELS[variant] in operators
    flash = {op for op in operators if "flash_attention" in op}
    forward = CPU_KERNELS["sdpa_flash"]
    assert flash == ({forward, forward.replace("_cpu", "_cpu_backward")} if variant == "sdpa_flash" else set())


@pytest.mark.parametrize("variant", ["standard", "sdpa_math"])
@pytest.mark.parametrize("Hkv", [2, 4])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_inductor_replaces_no_written_out_attention(variant, Hkv, mask):
    """Inductor turns some spellings of attention into PyTorch's fused one; these are not among them."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attend_with(variant, mask), fullgraph=True)
    assert_as_accurate_as_standard(compiled, make_qkv(2, 32, 32, 4, Hkv, 16), mask)
    assert counters["inductor"]["fuse_attention"] == 0


class Recorder(TorchDispatchMode):
    """The operators that run, with their positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls.append((str(operator), args))
        return operator(*args, **(kwargs or {}))


def record(variant: str, intervals: Intervals, Sq: int, Sk: int, Hkv: int, device: str) -> tuple:
    """The output of a kernel and the operators around it, on tensors without data: no GPU is needed."""
    with FakeTensorMode():
        q = torch.empty(2, Sq, 4, 64, device=device, dtype=torch.bfloat16)
        k = torch.empty(2, Sk, Hkv, 64, device=device, dtype=torch.bfloat16)
        with Recorder() as recorder:
            out, _ = getattr(sdpa, variant)(q, k, k, intervals, 0.125)
    return out, recorder.calls


@pytest.mark.parametrize("variant", CUDA_KERNELS)
def test_cuda_kernels_take_and_give_the_layout_without_copies(variant):
    out, calls = record(variant, CAUSAL, 128, 128, Hkv=4, device="cuda")
    assert out.shape == (2, 128, 4, 64) and out.is_contiguous()
    assert {name for name, _ in calls} - {"prim.device.default"} == {"aten.transpose.int", CUDA_KERNELS[variant]}


@pytest.mark.parametrize("variant", ["sdpa_flash", "sdpa_cudnn"])
def test_cuda_kernels_take_grouped_heads_as_they_are(variant):
    _, calls = record(variant, CAUSAL, 128, 128, Hkv=2, device="cuda")
    assert not any("clone" in name for name, _ in calls)


def test_the_efficient_kernel_gets_an_aligned_bias():
    _, calls = record("sdpa_efficient", WINDOW, 50, 70, Hkv=2, device="cpu")
    (bias,) = (args[3] for name, args in calls if name == CUDA_KERNELS["sdpa_efficient"])
    assert bias.shape == (2, 4, 50, 70) and bias.dtype == torch.bfloat16
    assert bias.stride() == (0, 0, 80, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", CUDA_KERNELS)
def test_compiled_cuda_kernels_stay_pinned(variant, head_dim):
    operators: list[str] = []
    inputs = make_qkv(2, 256, 256, 8, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    compiled = compile_and_record(attend_with(variant, CAUSAL), operators)
    assert_as_accurate_as_standard(compiled, inputs, CAUSAL)
    forward = CUDA_KERNELS[variant]
    attentions = {op for op in operators if "_attention" in op}
    assert attentions == {forward, forward.replace("_attention.", "_attention_backward.")}
    torch._dynamo.reset()
    compiled = torch.compile(attend_with(variant, CAUSAL), fullgraph=True)
    assert_as_accurate_as_standard(compiled, inputs, CAUSAL)
