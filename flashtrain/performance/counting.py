"""What a call of attention really moves, counted without a GPU, for comparison with the model in io.py.

`standard` runs under a dispatch mode: every operator that reads or writes a matrix counts all of it, once; views and
metadata count nothing, nor does a single number. The Triton kernels run in Triton's interpreter, whose every load and
store is counted lane by lane, masked-off lanes and what lies beyond a descriptor's ends left out, and told to the
kernel's argument in whose memory it falls. The interpreter's methods that are wrapped are alike in Triton 3.6 and 3.7.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtrain.kernels.attention import Intervals, architecture, attention, make_qkv, sram_elements, tiles
from flashtrain.performance.io import WITHIN_SOFTMAX, Launch, Shape, predict
from flashtrain.performance.traffic import READ, WRITE, Transfer, elements_by_matrix

Counted = dict[str, tuple[Transfer, ...]]
"""pass (forward, backward) -> what it moved."""

# Kernel -> what io.py calls the pass.
KERNELS = {
    "_fwd_kernel": "forward",
    "_bwd_kernel": "backward",
    "_bwd_delta_kernel": "delta",
    "_bwd_dkdv_kernel": "dK, dV",
    "_bwd_dq_kernel": "dQ",
}

# A kernel's argument, without _ptr -> what io.py calls the matrix, where it is another name.
ARGUMENTS = {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "dq": "dQ", "dk": "dK", "dv": "dV"}
ARGUMENTS |= {"lse": "LSE", "dlse": "dLSE"}


def count_standard(shape: Shape, intervals: Intervals, dtype: torch.dtype) -> Counted:
    """Both passes of `standard`, without its log-sum-exp. What makes a mask's bounds is named bounds."""
    q, k, v, dout = inputs(shape, dtype)
    with Operators() as operators:
        operators.phase = "forward"
        out = attention(q, k, v, intervals, variant="standard")
        operators.phase = "backward"
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    known = {"Q": q, "K": k, "V": v, "dO": dout, "O": out, "dQ": dq, "dK": dk, "dV": dv}
    return _named(operators.events, known, shape)


def count_kernels(variant: str, shape: Shape, intervals: Intervals, dtype: torch.dtype) -> Counted:
    """Both passes of a variant's Triton kernels, by kernel; what PyTorch does around them is not seen."""
    q, k, v, dout = inputs(shape, dtype)
    counted = {}
    with interpreted_traffic() as take:
        out = attention(q, k, v, intervals, variant=variant)
        counted["forward"] = take()
        torch.autograd.grad(out, (q, k, v), dout)
        counted["backward"] = take()
    return counted


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v that ask for gradients, and the gradient of out."""
    sizes = (shape.batch, shape.q_len, shape.kv_len, shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    q, k, v = (x.requires_grad_() for x in make_qkv(*sizes, dtype=dtype))
    return q, k, v, torch.ones_like(q)


@dataclass
class _Event:
    """One operator: it holds its tensors, so that no memory is used for two matrices."""

    phase: str
    name: str
    read: list[Tensor]
    written: list[Tensor]


# They take a tensor for its shape, or to write it.
_READ_NOTHING = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "zero_", "fill_"}
_WRITE_NOTHING = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_"}


class Operators(TorchDispatchMode):
    """Within, every operator that reads or writes a matrix is an event of the `phase` that is set."""

    def __init__(self):
        super().__init__()
        self.phase = ""
        self.events: list[_Event] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given, outputs = _matrices((args, kwargs)), _matrices(result)
        if func._schema.is_mutable:
            written = [args[0]]
            given = [x for x in given if x is not args[0]] if name in {"copy_", *_READ_NOTHING} else given
        else:
            taken = {_memory(x) for x in given}
            written = [x for x in outputs if _memory(x) not in taken]
        if written and name not in _WRITE_NOTHING:
            self.events.append(_Event(self.phase, name, [] if name in _READ_NOTHING else given, written))
        return result


def _matrices(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.numel() > 1]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _distinct_elements(x: Tensor) -> int:
    """What is expanded counts once."""
    return math.prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step != 0)


# An operator -> what its result is.
_RESULTS = {"baddbmm": "S", "_softmax": "P", "_softmax_backward_data": "dS"}
# The result is the first matrix that went in, changed or in another place.
_SAME = {"clone", "where", "mul"}


def _named(events: list[_Event], known: dict[str, Tensor], shape: Shape) -> Counted:
    """Every matrix has the name of what made it, or of what it becomes."""
    names = {_memory(x): name for name, x in known.items()}
    for event in events:
        for x in event.read + event.written:
            if not x.is_floating_point():
                is_mask = x.shape[-2:] == (shape.q_len, shape.kv_len)
                names.setdefault(_memory(x), "mask" if is_mask else "bounds")
        (made,) = event.written
        if event.name in _RESULTS:
            names[_memory(made)] = _RESULTS[event.name]
        elif event.name in _SAME and (name := names.get(_memory(_first_matrix(event)))):
            names.setdefault(_memory(made), name)
    for event in reversed(events):
        if event.name == "_softmax_backward_data":
            names[_memory(event.read[0])] = "dP"
        elif event.name in _SAME:
            names.setdefault(_memory(_first_matrix(event)), names[_memory(event.written[0])])
    moved: dict[str, list[Transfer]] = {"forward": [], "backward": []}
    for event in events:
        sides = ((READ, event.read), (WRITE, event.written))
        moved[event.phase] += [
            Transfer(event.name, names[_memory(x)], direction, _distinct_elements(x), x.element_size())
            for direction, tensors in sides
            for x in tensors
        ]
    return {name: tuple(transfers) for name, transfers in moved.items()}


def _first_matrix(event: _Event) -> Tensor:
    return next((x for x in event.read if x.is_floating_point()), event.read[0])


@contextmanager
def interpreted_traffic() -> Iterator[Callable[[], tuple[Transfer, ...]]]:
    """Within, what interpreted kernels load and store is counted; the function given takes the count."""
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    load, store, launch = builder.create_masked_load, builder.create_masked_store, executor.__call__
    counter = _Lanes()

    def counting_load(ptrs, mask, *rest, **named):
        counter.add(READ, ptrs.data, mask.data)
        return load(ptrs, mask, *rest, **named)

    def counting_store(ptrs, value, mask, *rest):
        counter.add(WRITE, ptrs.data, mask.data)
        return store(ptrs, value, mask, *rest)

    def counting_launch(self, *args, **kwargs):
        arguments = inspect.signature(self.fn).parameters
        named = dict(zip(arguments, args, strict=False)) | kwargs
        counter.enter(KERNELS[self.fn.__name__], {name: x for name, x in named.items() if name in arguments})
        return launch(self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = counting_load, counting_store
    executor.__call__ = counting_launch
    try:
        yield counter.take
    finally:
        del builder.create_masked_load, builder.create_masked_store
        executor.__call__ = launch


@dataclass
class _Lanes:
    kernel: str = ""
    tensors: list[tuple[Tensor, str]] = field(default_factory=list)
    """That the kernel was given, with the matrix that each is."""
    counts: Counter = field(default_factory=Counter)

    def enter(self, kernel: str, arguments: dict[str, object]) -> None:
        self.kernel = kernel
        self.tensors = [(x, _matrix_of(argument)) for argument, value in arguments.items() for x in _tensors(value)]

    def add(self, direction: str, addresses: np.ndarray, mask: np.ndarray) -> None:
        addresses, mask = np.broadcast_arrays(addresses, mask)
        used = addresses[mask]
        if used.size == 0:
            return
        ends = int(used.min()), int(used.max())
        ((name, size),) = {
            (name, x.element_size()) for x, name in self.tensors if all(_has_element_at(x, address) for address in ends)
        }
        self.counts[self.kernel, name, direction, size] += used.size

    def take(self) -> tuple[Transfer, ...]:
        moved = tuple(
            Transfer(kernel, name, direction, count, size)
            for (kernel, name, direction, size), count in self.counts.items()
        )
        self.counts.clear()
        return moved


def _matrix_of(argument: str) -> str:
    name = argument.removesuffix("_ptr")
    return ARGUMENTS.get(name, name)


def _tensors(value: object) -> list[Tensor]:
    """The tensors of an argument: itself, a descriptor's, or those in a tuple."""
    if isinstance(value, tuple):
        return [x for part in value for x in _tensors(part)]
    value = getattr(value, "base", value)
    return [value] if isinstance(value, Tensor) else []


def _has_element_at(x: Tensor, address: int) -> bool:
    """Whether an element of x, which may lie between others' in memory, begins there."""
    rest, inside = divmod(address - x.data_ptr(), x.element_size())
    for step, size in sorted(zip(x.stride(), x.shape, strict=True), reverse=True):
        index = min(max(rest // step, 0), size - 1) if step else 0
        rest -= index * step
    return x.numel() > 0 and rest == inside == 0


@dataclass(frozen=True)
class Comparison:
    """One pass of a variant, counted and by the model: (matrix, direction) -> elements."""

    variant: str
    pass_name: str
    counted: Counter[tuple[str, str]]
    model: Counter[tuple[str, str]]


def compare(variant: str, shape: Shape, intervals: Intervals) -> list[Comparison]:
    """Both passes of a variant of io.py, in fp32, with the launch that the kernels have in the interpreter.

    Left out are, in `standard`, vectors of a mask's bounds and what only a GPU does, within an operator; and what
    PyTorch does before and after a kernel of flash_v1.
    """
    dtype, cpu = torch.float32, torch.device("cpu")
    launch = Launch(tiles(architecture(cpu), shape.head_dim, dtype), sram_elements(cpu))
    if variant == "standard":
        counted = count_standard(shape, intervals, dtype)
    else:
        counted = count_kernels(variant, shape, intervals, dtype)
    found = []
    for pass_name, transfers in counted.items():
        model = predict(variant, pass_name, shape, intervals, dtype, launch).transfers
        if variant == "standard":
            transfers = [one for one in transfers if one.matrix != "bounds"]
            model = [one for one in model if one.pass_name != WITHIN_SOFTMAX]
        else:
            model = [one for one in model if one.pass_name in KERNELS.values()]
        found.append(Comparison(variant, pass_name, elements_by_matrix(transfers), elements_by_matrix(model)))
    return found
