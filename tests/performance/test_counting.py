"""What runs moves exactly what the model says: elements by matrix and direction, both passes, every algorithm."""

import pytest
import torch

from flashtrain.kernels.attention import Intervals, sram_elements, tiles
from flashtrain.performance.counting import (
    KERNELS,
    Operators,
    compare,
    count_kernels,
    count_standard,
    inputs,
    interpreted_traffic,
)
from flashtrain.performance.io import WITHIN_SOFTMAX, Launch, Shape, predict, standard_elements
from flashtrain.performance.traffic import (
    bytes_by_matrix,
    elements_by_matrix,
    elements_by_pass,
    total_bytes,
    total_elements,
)

PASSES = ("forward", "backward")
INTERPRETER = Launch(tiles("interpreter", 64, torch.float32), sram_elements(torch.device("cpu")))

SHAPES = {
    "tile": Shape(1, 64, 64, 1, 1, 64),
    "ragged": Shape(2, 129, 77, 2, 2, 32),
    "grouped": Shape(2, 100, 100, 4, 2, 40),
    "multi-query": Shape(1, 70, 200, 3, 1, 16),
    "few-keys": Shape(1, 150, 37, 2, 1, 64),
    "short": Shape(2, 5, 9, 2, 2, 24),
}


def documents(shape):
    """Three in a row; in one row of the batch the first two are one."""
    q, k = (torch.arange(S).expand(shape.batch, -1) * 3 // S for S in (shape.q_len, shape.kv_len))
    first = torch.arange(shape.batch)[:, None] == 0
    return Intervals.causal().in_documents(*(torch.where(first, x, x.clamp(min=1)) for x in (q, k)))


MASKS = {
    "full": lambda shape: Intervals.full(),
    "causal": lambda shape: Intervals.causal(),
    "window": lambda shape: Intervals.window(17, 3),
    "documents": documents,
}

# Triton's kernels are interpreted where there is no GPU (conftest.py).
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs")

# flash_v1 knows no other masks.
KERNEL_CASES = [("flash_v2", mask) for mask in MASKS] + [("flash_v1", "full"), ("flash_v1", "causal")]

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@interpreted
@shapes
@pytest.mark.parametrize(("variant", "mask"), KERNEL_CASES, ids=["-".join(case) for case in KERNEL_CASES])
def test_kernels_move_what_the_model_says(variant, mask, shape):
    """Kernel by kernel, and with the bytes of each element."""
    intervals = MASKS[mask](shape)
    counted = count_kernels(variant, shape, intervals, torch.float32)
    for pass_name in PASSES:
        model = predict(variant, pass_name, shape, intervals, torch.float32, INTERPRETER).transfers
        of_kernels = [one for one in model if one.pass_name in KERNELS.values()]
        assert elements_by_pass(counted[pass_name]) == elements_by_pass(of_kernels)
        assert bytes_by_matrix(counted[pass_name]) == bytes_by_matrix(of_kernels)


@interpreted
@pytest.mark.parametrize("variant", ["flash_v1", "flash_v2"])
def test_in_half_precision_too(variant):
    shape, mask = SHAPES["grouped"], Intervals.causal()
    counted = count_kernels(variant, shape, mask, torch.float16)
    for pass_name in PASSES:
        model = predict(variant, pass_name, shape, mask, torch.float16, INTERPRETER).transfers
        of_kernels = [one for one in model if one.pass_name in KERNELS.values()]
        assert bytes_by_matrix(counted[pass_name]) == bytes_by_matrix(of_kernels)


@shapes
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_standard_moves_what_the_model_says(mask, shape, dtype):
    intervals = MASKS[mask](shape)
    counted = count_standard(shape, intervals, dtype)
    for pass_name in PASSES:
        matrices = [one for one in counted[pass_name] if one.matrix != "bounds"]
        # Vectors: as many numbers as there are rows and columns, some times over.
        vectors = sum(one.elements for one in counted[pass_name] if one.matrix == "bounds")
        assert vectors <= 60 * shape.batch * (shape.q_len + shape.kv_len)
        model = predict("standard", pass_name, shape, intervals, dtype, INTERPRETER).transfers
        # Within an operator, and on a GPU alone.
        model = [one for one in model if one.pass_name != WITHIN_SOFTMAX]
        assert elements_by_matrix(matrices) == elements_by_matrix(model)
        assert bytes_by_matrix(matrices) == bytes_by_matrix(model)


def test_standard_is_three_operators_where_nothing_is_masked():
    counted = count_standard(Shape(1, 64, 64, 2, 2, 32), Intervals.full(), torch.float32)["forward"]
    assert list(dict.fromkeys(one.pass_name for one in counted)) == ["baddbmm", "_softmax", "bmm"]
    assert total_elements(counted) == 2 * standard_elements(64, 32)


@interpreted
def test_comparisons_are_of_both_passes():
    found = compare("flash_v2", SHAPES["short"], Intervals.causal())
    assert [one.pass_name for one in found] == list(PASSES)
    assert all(one.counted == one.model and one.counted.total() > 0 for one in found)


@interpreted
def test_masked_off_lanes_do_not_count():
    """Queries and keys past the end are in the tiles, not in the count: 5 of 64 rows."""
    counted = count_kernels("flash_v2", SHAPES["short"], Intervals.full(), torch.float32)["forward"]
    shape = SHAPES["short"]
    assert elements_by_matrix(counted)["Q", "read"] == 2 * 5 * 2 * 24 == shape.q_rows * shape.head_dim


@interpreted
def test_afterwards_the_interpreter_is_as_before():
    from triton.runtime import interpreter

    def methods():
        builder = interpreter.interpreter_builder
        return vars(builder).keys() & {"create_masked_load", "create_masked_store"}, interpreter.GridExecutor.__call__

    before = methods()
    with pytest.raises(RuntimeError, match="stop"), interpreted_traffic():
        assert methods() != before
        raise RuntimeError("stop")
    assert methods() == before


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_what_pytorch_does_around_flash_v1_is_in_the_model(dtype):
    """Its launchers fill O, l, m and dQ before the kernels, and round O and dQ and join l and m after them."""
    from flashtrain.kernels.attention.flash_v1 import backward, forward

    shape, mask = SHAPES["grouped"], Intervals.causal()
    q, k, v, dout = (x.detach() for x in inputs(shape, dtype))
    with Operators() as operators:
        operators.phase = "forward"
        out, lse = forward(q, k, v, mask, 0.1, INTERPRETER.sram_elements)
        operators.phase = "backward"
        backward(*map(torch.empty_like, (q, k, v)), dout, lse, q, k, v, out, lse, mask, 0.1, INTERPRETER.sram_elements)
    for pass_name in PASSES:
        model = predict("flash_v1", pass_name, shape, mask, dtype, INTERPRETER).transfers
        around = [one for one in model if one.pass_name in ("start", "finish")]
        # The interpreter copies the bytes of a kernel's arguments back onto themselves.
        events = [
            event for event in operators.events if event.phase == pass_name and event.written[0].dtype != torch.uint8
        ]
        for direction, side in (("read", "read"), ("write", "written")):
            counted = sum(x.numel() * x.element_size() for event in events for x in getattr(event, side))
            assert counted == total_bytes(one for one in around if one.direction == direction)
