"""What runs moves exactly what the model says: elements by matrix and direction, both passes, every algorithm."""

import pytest
import torch

from flashtrain.kernels.attention import Intervals, sram_elements, tiles
from flashtrain.performance.counting import KERNELS, count_kernels, count_standard
from flashtrain.performance.io import Launch, Shape, predict
from flashtrain.performance.traffic import elements_by_matrix, elements_by_pass

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

# flash_v1 knows no other masks.
KERNEL_CASES = [("flash_v2", mask) for mask in MASKS] + [("flash_v1", "full"), ("flash_v1", "causal")]

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@shapes
@pytest.mark.parametrize(("variant", "mask"), KERNEL_CASES, ids="-".join)
def test_kernels_move_what_the_model_says(variant, mask, shape):
    intervals = MASKS[mask](shape)
    counted = count_kernels(variant, shape, intervals, torch.float32)
    for pass_name in PASSES:
        model = predict(variant, pass_name, shape, intervals, torch.float32, INTERPRETER).transfers
        of_kernels = [one for one in model if one.pass_name in KERNELS.values()]
        assert elements_by_pass(counted[pass_name]) == elements_by_pass(of_kernels)
        assert {(one.matrix, one.element_bytes) for one in counted[pass_name]} <= {
            (one.matrix, one.element_bytes) for one in of_kernels
        }


@shapes
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_standard_moves_what_the_model_says(mask, shape, dtype):
    intervals = MASKS[mask](shape)
    counted = count_standard(shape, intervals, dtype)
    for pass_name in PASSES:
        matrices = [one for one in counted[pass_name] if one.matrix != "bounds"]
        # Vectors: as many numbers as there are rows and columns, some times over.
        assert sum(one.elements for one in counted[pass_name] if one.matrix == "bounds") <= 60 * shape.batch * (
            shape.q_len + shape.kv_len
        )
        model = predict("standard", pass_name, shape, intervals, dtype, INTERPRETER)
        assert elements_by_matrix(matrices) == elements_by_matrix(model.transfers)
        assert sum(one.bytes for one in matrices) == sum(one.bytes for one in model.transfers)
