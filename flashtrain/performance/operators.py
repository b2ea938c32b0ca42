"""The operators of a transformer block, forward: what each computes and moves when it runs alone.

A pre-norm block of GPT-2's shape: the MLP is four times as wide, every linear layer is one matrix product. Each
operator reads its inputs and writes its result once; nothing is fused but flash attention. FLOPs of what is done to
each element are counted as the operations of its formula, an exponential or a tanh as one.
"""

from dataclasses import dataclass

import torch

from flashtrain.performance.io import Shape
from flashtrain.performance.roofline import Estimate, Rates

MLP_WIDTH = 4

# Operations for each element.
NORM, SOFTMAX, GELU, DROPOUT, ADD = 7, 5, 9, 2, 1


@dataclass(frozen=True)
class Operator:
    name: str
    flops: int
    bytes: int
    share_of_sms: float = 1.0
    """Of the SMs that have something to do."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def bound(self, rates: Rates) -> str:
        return rates.bound(self.flops / self.share_of_sms, self.bytes)

    def seconds(self, rates: Rates) -> float:
        """The least that it takes."""
        return rates.seconds(self.flops / self.share_of_sms, self.bytes)


def block(shape: Shape, dtype: torch.dtype, attention: dict[str, Estimate]) -> list[Operator]:
    """The operators in order, for a shape with as many keys as queries.

    attention: variant -> its forward; each becomes one operator, with the bytes that HBM sees.
    """
    tokens, D = shape.batch * shape.q_len, shape.head_dim
    width, kv_width = shape.num_q_heads * D, shape.num_kv_heads * D
    scores = shape.q_rows * shape.kv_len

    def product(name: str, columns: int, depth: int) -> Operator:
        elements = tokens * depth + depth * columns + tokens * columns
        return Operator(name, 2 * tokens * columns * depth, elements * dtype.itemsize)

    def elementwise(name: str, operations: int, elements: int, matrices: int, extra_bytes: int = 0) -> Operator:
        return Operator(name, operations * elements, matrices * elements * dtype.itemsize + extra_bytes)

    hidden = tokens * width
    return [
        elementwise("norm", NORM, hidden, 2),
        product("Q, K, V projections", width + 2 * kv_width, width),
        Operator("scores S = Q K^T", 2 * scores * D, (shape.q_rows * D + shape.kv_rows * D + scores) * dtype.itemsize),
        elementwise("softmax P", SOFTMAX, scores, 2),
        Operator("P V", 2 * scores * D, (scores + shape.kv_rows * D + shape.q_rows * D) * dtype.itemsize),
        *(
            Operator(f"attention, {name}", found.flops, found.hbm_bytes, found.share_of_sms)
            for name, found in attention.items()
        ),
        product("output projection", width, width),
        # The mask of what is kept: a byte for each element.
        elementwise("dropout", DROPOUT, hidden, 2, extra_bytes=hidden),
        elementwise("residual sum", ADD, hidden, 3),
        elementwise("norm", NORM, hidden, 2),
        product("MLP up", MLP_WIDTH * width, width),
        elementwise("GELU", GELU, MLP_WIDTH * hidden, 2),
        product("MLP down", width, MLP_WIDTH * width),
        elementwise("dropout", DROPOUT, hidden, 2, extra_bytes=hidden),
        elementwise("residual sum", ADD, hidden, 3),
    ]
