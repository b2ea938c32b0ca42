"""What a block computes again changes no gradient and no state key, and nothing runs twice whose results are kept."""

from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from presets import preset
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.kernels.attention import attention
from flashtrain.model import layers
from flashtrain.model.checkpointing import ATTENTION_OPERATORS, MODES, PRODUCT_OPERATORS
from flashtrain.model.gpt import GPT

aten = torch.ops.aten
COUNTED = ATTENTION_OPERATORS | PRODUCT_OPERATORS
NUM_LAYERS = 2
OPTIONS = {"num_layers": NUM_LAYERS, "hidden_size": 32, "num_heads": 2, "vocab_size": 100}
# Triton's kernels are interpreted on a CPU.
KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"


class Case(NamedTuple):
    variant: str
    masked: bool
    """With documents, a window and a softcap, as far as the variant has them."""
    device: str = "cpu"
    family: str = "nano"

    def model(self, mode):
        softcap = 5.0 if self.masked and self.variant != "sdpa_math" else 0.0
        torch.manual_seed(0)
        options = preset(self.family, **OPTIONS, windows=[8, None] if self.masked else None)
        return GPT(options, partial(attention, variant=self.variant, softcap=softcap), mode).to(self.device)

    def gradients(self, model):
        tokens = torch.randint(100, (2, 24), generator=torch.Generator().manual_seed(0)).to(self.device)
        documents = None
        if self.masked:
            documents = (torch.arange(24, device=self.device) > 9).int().expand(2, -1).contiguous()
        hidden = model(tokens, documents)
        hidden.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]


CASES = [
    Case("standard", masked=True),
    Case("sdpa_flash", masked=False),
    Case("flash_v2", masked=True, device=KERNELS_ON),
]


def each_of(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{case.variant}{'-masked' * case.masked}")


class Calls(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] += 1
        return operator(*args, **(kwargs or {}))


def of(operators, counts):
    return Counter({operator: count for operator, count in counts.items() if operator in operators})


of_attention = partial(of, ATTENTION_OPERATORS)


@cache
def eager(case, mode):
    """The gradients, what was called, and the state keys of a model that is not compiled."""
    model = case.model(mode)
    with Calls() as seen:
        gradients = case.gradients(model)
    return gradients, seen.counts, list(model.state_dict())


@each_of([*CASES, Case("standard", masked=False), Case("sdpa_math", masked=True)])
def test_gradients_are_the_same_bits_and_what_is_kept_runs_once(case):
    gradients, calls, _ = zip(*(eager(case, mode) for mode in MODES), strict=True)
    for mode, some in zip(MODES, gradients, strict=True):
        assert all(torch.equal(*pair) for pair in zip(gradients[0], some, strict=True)), mode
    with Calls() as forward, torch.no_grad():
        case.model("none")(torch.zeros(2, 24, dtype=torch.int64, device=case.device))
    assert of_attention(forward.counts) and of(PRODUCT_OPERATORS, forward.counts)
    assert all(count % NUM_LAYERS == 0 for count in of(COUNTED, forward.counts).values())
    none, mlp, pointwise, selective, full = calls
    assert of(COUNTED, mlp) == of(COUNTED, pointwise) == of(COUNTED, none)
    assert of_attention(selective) == of_attention(none)
    assert of_attention(full) == of_attention(none + forward.counts)


@pytest.mark.parametrize(
    ("family", "activation"), [("gpt2", [aten.gelu.default]), ("nano", [aten.silu.default, aten.mul.Tensor])]
)
def test_mlp_computes_its_activation_again_and_nothing_else(family, activation):
    case = Case("sdpa_flash", masked=False, family=family)
    (expected, none, _), (actual, mlp, _) = (eager(case, mode) for mode in ("none", "mlp"))
    again = {operator: count for operator, count in (mlp - none).items() if not operator.is_view}
    assert again == dict.fromkeys(activation, NUM_LAYERS)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


def compiled(case, mode, counted):
    """What `eager` returns of a model that is compiled into one graph; of what is called, what is `counted`."""
    counts = Counter()

    def counting(graph, inputs):
        for node in graph.graph.nodes:
            # An operator that may draw random numbers is an argument of what keeps their state.
            operators = [x for x in (node.target, *node.args) if isinstance(x, OpOverload)]
            counts.update(counted.intersection(operators))
        return make_boxed_func(graph.forward)

    model = case.model(mode)
    backend = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    model.compile(backend=backend, fullgraph=True)
    return case.gradients(model), counts, list(model.state_dict())


@pytest.mark.parametrize("mode", MODES[1:])
@each_of(CASES)
def test_compiled_into_one_graph_it_is_the_same_with_the_same_state_keys(case, mode):
    expected, _, keys = eager(case, "none")
    _, calls, keys_of_mode = eager(case, mode)
    actual, counts, keys_of_compiled = compiled(case, mode, COUNTED)
    assert counts == of(COUNTED, calls)
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
    assert keys == keys_of_mode == keys_of_compiled


@pytest.mark.parametrize(
    ("run", "modes"),
    [(eager.__wrapped__, MODES), (partial(compiled, counted=frozenset()), MODES[:2])],
    ids=["eager", "compiled"],
)
def test_swiglus_kernel_runs_again_where_its_result_is_not_kept(monkeypatch, run, modes):
    kernels = pytest.importorskip("flashtrain.kernels.swiglu")
    launched = []

    def count_and_compute(kernel, shape, *tensors):
        launched.append(kernel)
        *dout, gate_up, result = tensors
        gate, up = gate_up.chunk(2, dim=-1)
        if kernel is kernels._swiglu_kernel:
            result.copy_(F.silu(gate) * up)
        else:
            result.copy_(torch.cat([aten.silu_backward(dout[0] * up, gate), dout[0] * F.silu(gate)], dim=-1))

    monkeypatch.setattr(layers, "has_kernel", lambda x: True)
    monkeypatch.setattr(kernels, "_launch", count_and_compute)
    case, expected = Case("standard", masked=False, device=KERNELS_ON), None
    for mode in modes:
        launched.clear()
        gradients, *_ = run(case, mode)
        expected = expected or gradients
        assert Counter(launched) == {
            kernels._swiglu_kernel: NUM_LAYERS * (1 if mode == "none" else 2),
            kernels._swiglu_backward_kernel: NUM_LAYERS,
        }, mode
        assert all(torch.equal(*pair) for pair in zip(expected, gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["sdpa_efficient", "sdpa_flash", "sdpa_cudnn"])
def test_pytorchs_gpu_kernels_run_once_where_their_results_are_kept(variant):
    case, calls = Case(variant, masked=False, device="cuda"), {}
    for mode in MODES:
        with Calls() as seen, torch.autocast("cuda", torch.bfloat16):
            case.gradients(case.model(mode))
        calls[mode] = of_attention(seen.counts).total()
    assert calls == dict.fromkeys(MODES, NUM_LAYERS) | {"full": 2 * NUM_LAYERS}
