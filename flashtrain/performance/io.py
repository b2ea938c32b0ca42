"""The model of what attention moves and computes: elements between HBM and the chip, and FLOPs, by algorithm.

It counts what a program asks of global memory: the loads and stores of its loops over tiles, cut off at the ends of
a matrix, with every repeat. Some of that is served by L2, never by HBM (roofline.py); `compulsory` is the other end,
each matrix once. counting.py counts the same of programs that run, and the tests hold both to one number, but for
`WITHIN_SOFTMAX`. FLOPs are those of the matrix products, of whole tiles where there are tiles; exponentials and the
rest are left out.

N is the length, d the head dimension and M the SRAM in elements, as in FlashAttention (arXiv 2205.14135).
"""

from dataclasses import dataclass

import numpy as np
import torch

from flashtrain.kernels.attention import Intervals, Tiles, block_sizes
from flashtrain.performance.traffic import READ, WRITE, Transfer

VARIANTS = ("standard", "flash_v1", "flash_v2")
FLOAT_BYTES = 4  # of statistics of a row, bounds, and flash_v1's O and dQ while they grow
MASK_BYTES = 1

WITHIN_SOFTMAX = "P*dP within PyTorch's CUDA softmax backward"
"""The pass of what dS's operator moves besides on a GPU, unseen from outside: it writes the product of P and dP as a
matrix, and reads that and P once more for dS. On CPUs there is no such pass.
Source: softmax_backward_cuda_out in PyTorch's aten/src/ATen/native/cuda/SoftMax.cu."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D), contiguous."""

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def q_rows(self) -> int:
        return self.batch * self.num_q_heads * self.q_len

    @property
    def kv_rows(self) -> int:
        return self.batch * self.num_kv_heads * self.kv_len


@dataclass(frozen=True)
class Launch:
    """What the kernels are launched with."""

    tiles: Tiles
    """flash_v2's."""
    sram_elements: int
    """M, from which flash_v1 makes its blocks."""


@dataclass(frozen=True)
class Pass:
    """A kernel, or an operator of PyTorch: passes run one after the other."""

    name: str
    transfers: tuple[Transfer, ...]
    """What it asks for."""
    flops: int = 0
    reused_bytes: int = 0
    """Of what is read again and again, as much as passes by the program that sees most, in a head; PyTorch's operators
    are taken to read all just once."""
    readers: int = 1
    """The most programs of a head that read the same row of that."""
    heads: int = 1
    """Of all rows; the programs of a head run side by side, then those of the next. 1 for PyTorch's operators."""
    programs: int | None = None
    """Of a head; None: as many as PyTorch wants."""


@dataclass(frozen=True)
class Work:
    """What a variant does, forward or backward."""

    passes: tuple[Pass, ...]
    matrices: dict[str, int]
    """Elements of every matrix that a pass may ask for, each once."""

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.passes)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What all passes ask for."""
        return tuple(transfer for one in self.passes for transfer in one.transfers)


def predict(
    variant: str, pass_name: str, shape: Shape, intervals: Intervals, dtype: torch.dtype, launch: Launch
) -> Work:
    """The work of a variant (one of `VARIANTS`) in a pass, forward or backward; lengths from 1."""
    passes = _MODELS[variant, pass_name](shape, intervals, dtype.itemsize, launch)
    return Work(tuple(passes), _matrices(shape) | _of_mask(shape, intervals))


def compulsory(pass_name: str, shape: Shape, dtype: torch.dtype) -> tuple[Transfer, ...]:
    """What any algorithm has to move: each input once, each output once. The backward reads no S and no P."""
    asked = _Asked(pass_name, shape, dtype.itemsize)
    if pass_name == "forward":
        return tuple(asked.read("Q", "K", "V") + asked.write("O"))
    return tuple(asked.read("Q", "K", "V", "O", "dO") + asked.write("dQ", "dK", "dV"))


def standard_elements(N: int, d: int) -> int:
    """The closed form of one head of the textbook's forward: Q, K, V, O of N d elements, S and P each twice N^2."""
    return 4 * N * d + 4 * N * N


def flash_elements(N: int, d: int, M: int) -> float:
    """The order of FlashAttention's traffic for one head, N^2 d^2 / M elements, without its constant factor."""
    return N * N * d * d / M


def _matrices(shape: Shape) -> dict[str, int]:
    """Elements of every matrix and vector but a mask's."""
    of_queries = dict.fromkeys(("Q", "O", "dO", "dQ"), shape.q_rows * shape.head_dim)
    of_keys = dict.fromkeys(("K", "V", "dK", "dV"), shape.kv_rows * shape.head_dim)
    scores = dict.fromkeys(("S", "P", "dS", "dP", "P*dP"), shape.q_rows * shape.kv_len)
    statistics = dict.fromkeys(("LSE", "dLSE", "l", "m", "log(l)", "delta", "lse2"), shape.q_rows)
    return of_queries | of_keys | scores | statistics


def _of_mask(shape: Shape, intervals: Intervals) -> dict[str, int]:
    """lo and hi of every query or key; and three matrices, lo <= j, j < hi and both."""
    return {
        "bounds": 2 * _mask_rows(intervals) * max(shape.q_len, shape.kv_len),
        "mask": 3 * _mask_elements(shape, intervals),
    }


class _Asked:
    """Makes the transfers of one pass."""

    def __init__(self, pass_name: str, shape: Shape, itemsize: int):
        self._pass_name = pass_name
        self._itemsize = itemsize
        self._whole = _matrices(shape)

    def read(self, *matrices: str) -> list[Transfer]:
        """Each matrix whole."""
        return [self.part(name, READ, self._whole[name]) for name in matrices]

    def write(self, *matrices: str) -> list[Transfer]:
        return [self.part(name, WRITE, self._whole[name]) for name in matrices]

    def part(self, matrix: str, direction: str, elements: int, element_bytes: int | None = None) -> Transfer:
        element_bytes = self._itemsize if element_bytes is None else element_bytes
        return Transfer(self._pass_name, matrix, direction, elements, element_bytes)

    def parts(self, matrices: str, direction: str, elements: int, element_bytes: int | None = None) -> list[Transfer]:
        """As many elements of each of some matrices, named with blanks between."""
        return [self.part(matrix, direction, elements, element_bytes) for matrix in matrices.split()]

    def as_pass(self, *transfers: Transfer, **how: int) -> Pass:
        """With the other fields of `Pass`."""
        return Pass(self._pass_name, transfers, **how)


@dataclass(frozen=True)
class _Visits:
    """What all tiles along one side of the scores see of the other side; sums are over one head of each batch row."""

    tiles: int
    steps: int
    """Blocks of the other side."""
    rows: int
    """Their rows, as far as they exist."""
    widest: int
    """The most rows that one tile sees."""
    readers: int
    """The most tiles that see one row; 1 where none sees any."""
    has_bounds: bool
    """Whether the mask is read from memory."""

    def bounds(self, asked: _Asked, heads: int, rows: int) -> list[Transfer]:
        """lo and hi of the first and the last row of each tile, in each head, and those of so many rows."""
        count = 2 * (2 * self.tiles * heads + rows)
        return [asked.part("bounds", READ, count, FLOAT_BYTES)] if self.has_bounds else []


def _visits(shape: Shape, intervals: Intervals, tile: int, block: int, *, by_keys: bool = False) -> _Visits:
    """Query tiles over blocks of keys; or, `by_keys`, key tiles over blocks of queries. As geometry.block_ranges."""
    bounds = intervals.bounds_of(shape.q_len, shape.kv_len)
    lo_RS, hi_RS = (bounds.queries if by_keys else bounds.keys).long().cpu().numpy()
    own, other = (shape.kv_len, shape.q_len) if by_keys else (shape.q_len, shape.kv_len)
    first = np.arange(0, own, tile)
    last = np.minimum(first + tile, own) - 1
    begin = lo_RS[:, first] // block
    end = np.maximum(-(-hi_RS[:, last] // block), begin)
    rows = np.maximum(np.minimum(end * block, other) - begin * block, 0)
    # Of each block, the tiles that begin at it or before, less those that end there or before.
    seen = np.zeros((len(lo_RS), -(-other // block) + 1), dtype=np.int64)
    row = np.arange(len(lo_RS))[:, None]
    np.add.at(seen, (row, begin), 1)
    np.add.at(seen, (row, end), -1)
    repeats = shape.batch // len(lo_RS)
    return _Visits(
        tiles=shape.batch * len(first),
        steps=int((end - begin).sum()) * repeats,
        rows=int(rows.sum()) * repeats,
        widest=int(rows.max()),
        readers=max(int(seen.cumsum(1).max()), 1),
        has_bounds=intervals.bounds is not None,
    )


def _product(rows: int, columns: int, depth: int) -> int:
    return 2 * rows * columns * depth


def padded(head_dim: int) -> int:
    """What the kernels compute with: the next power of two from 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _standard_forward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    passes = _Operators(shape, itemsize)
    masked, empty = not intervals.is_full, intervals.may_have_empty_rows(shape.q_len, shape.kv_len)
    mask = _mask_elements(shape, intervals)
    if _queries_are_copied(shape):
        passes.add("copy Q", "Q", "Q")
    if _keys_are_copied(shape):
        passes.add("copy K and V", "K V", "K V")
    passes.add_product("S = scale Q K^T", "Q K", "S")
    if masked:
        # lo <= j, j < hi, and both.
        passes.add("make the mask", "", "", mask_read=2 * mask, mask_written=3 * mask)
        passes.add("mask S", "S", "S", mask_read=mask)
    if empty:
        passes.add("seek empty rows", "", "", mask_read=mask)
        passes.add("fill empty rows of S", "S", "S")
    passes.add("P = softmax(S)", "S", "P")
    if empty:
        passes.add("clear empty rows of P", "P", "P")
    passes.add_product("O = P V", "P V", "O")
    return passes.added


def _standard_backward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    passes = _Operators(shape, itemsize)
    masked, empty = not intervals.is_full, intervals.may_have_empty_rows(shape.q_len, shape.kv_len)
    if _queries_are_copied(shape):
        passes.add("copy dO", "dO", "dO")
    passes.add_product("dV = P^T dO", "P dO", "dV")
    passes.add_product("dP = dO V^T", "dO V", "dP")
    if empty:
        passes.add("clear empty rows of dP", "dP", "dP")
    passes.add(WITHIN_SOFTMAX, "P P*dP", "P*dP")
    passes.add("dS = P (dP - rowsum(P dP))", "dP P", "dS")
    if empty:
        passes.add("clear empty rows of dS", "dS", "dS")
    if masked:
        passes.add("mask dS", "dS", "dS", mask_read=_mask_elements(shape, intervals))
    passes.add_product("dQ = dS K", "dS K", "dQ")
    passes.add("scale dQ", "dQ", "dQ")
    passes.add_product("dK = dS^T Q", "dS Q", "dK")
    passes.add("scale dK", "dK", "dK")
    return passes.added


class _Operators:
    """The passes of `standard`, in order: matrices read and written whole, named with blanks between."""

    def __init__(self, shape: Shape, itemsize: int):
        self._shape = shape
        self._itemsize = itemsize
        self.added: list[Pass] = []

    def add(
        self, name: str, read: str, written: str, flops: int = 0, mask_read: int = 0, mask_written: int = 0
    ) -> None:
        asked = _Asked(name, self._shape, self._itemsize)
        transfers = asked.read(*read.split())
        if mask_read:
            transfers.append(asked.part("mask", READ, mask_read, MASK_BYTES))
        if mask_written:
            transfers.append(asked.part("mask", WRITE, mask_written, MASK_BYTES))
        transfers += asked.write(*written.split())
        self.added.append(asked.as_pass(*transfers, flops=flops))

    def add_product(self, name: str, read: str, written: str) -> None:
        shape = self._shape
        self.add(name, read, written, flops=_product(shape.q_rows, shape.kv_len, shape.head_dim))


def _queries_are_copied(shape: Shape) -> bool:
    """Whether a batched product needs them in another layout than (B, S, H, D)."""
    return shape.group_size > 1 or _keys_are_copied(shape)


def _keys_are_copied(shape: Shape) -> bool:
    return shape.batch > 1 and shape.num_kv_heads > 1


def _mask_rows(intervals: Intervals) -> int:
    """Rows of a batch, if they see differently, or one for all."""
    return 1 if intervals.bounds is None else intervals.bounds.keys.shape[1]


def _mask_elements(shape: Shape, intervals: Intervals) -> int:
    return _mask_rows(intervals) * shape.q_len * shape.kv_len


def _flash_v1_forward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    D, heads = shape.head_dim, shape.num_q_heads
    B_r, B_c = block_sizes(launch.sram_elements, padded(D))
    seen = _visits(shape, intervals, B_c, B_r, by_keys=True)
    rows = heads * seen.rows  # of Q, O, l and m: all that a block of keys meets, in each head, for each block
    start, kernel, finish = (_Asked(name, shape, itemsize) for name in ("start", "forward", "finish"))
    statistics = shape.q_rows
    return [
        start.as_pass(
            start.part("O", WRITE, statistics * D, FLOAT_BYTES),
            *start.parts("l m", WRITE, statistics, FLOAT_BYTES),
        ),
        kernel.as_pass(
            *kernel.parts("K V", READ, shape.batch * heads * shape.kv_len * D),
            kernel.part("Q", READ, rows * D),
            kernel.part("O", READ, rows * D, FLOAT_BYTES),
            *kernel.parts("l m", READ, rows, FLOAT_BYTES),
            kernel.part("O", WRITE, rows * D, FLOAT_BYTES),
            *kernel.parts("l m", WRITE, rows, FLOAT_BYTES),
            flops=2 * heads * seen.steps * _product(B_r, B_c, padded(D)),
            reused_bytes=seen.widest * (D * (itemsize + FLOAT_BYTES) + 2 * FLOAT_BYTES),
            heads=shape.batch * heads,
            programs=1,
        ),
        finish.as_pass(
            *_rounded(finish, "O", statistics * D, itemsize),
            # log l is a matrix of its own before it meets m.
            *finish.parts("l m log(l)", READ, statistics, FLOAT_BYTES),
            *finish.parts("log(l) LSE", WRITE, statistics, FLOAT_BYTES),
        ),
    ]


def _flash_v1_backward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    D, heads = shape.head_dim, shape.num_q_heads
    B_r, B_c = block_sizes(launch.sram_elements, padded(D))
    seen = _visits(shape, intervals, B_c, B_r, by_keys=True)
    rows = heads * seen.rows
    start, kernel, finish = (_Asked(name, shape, itemsize) for name in ("start", "backward", "finish"))
    return [
        start.as_pass(start.part("dQ", WRITE, shape.q_rows * D, FLOAT_BYTES), *start.write("dK", "dV")),
        kernel.as_pass(
            *kernel.read("K", "V"),
            *kernel.parts("Q O dO", READ, rows * D),
            kernel.part("dQ", READ, rows * D, FLOAT_BYTES),
            *kernel.parts("LSE dLSE", READ, rows, FLOAT_BYTES),
            kernel.part("dQ", WRITE, rows * D, FLOAT_BYTES),
            *kernel.write("dK", "dV"),
            flops=5 * heads * seen.steps * _product(B_r, B_c, padded(D)),
            reused_bytes=shape.group_size * seen.widest * (D * (3 * itemsize + FLOAT_BYTES) + 2 * FLOAT_BYTES),
            heads=shape.batch * shape.num_kv_heads,
            programs=1,
        ),
        finish.as_pass(*_rounded(finish, "dQ", shape.q_rows * D, itemsize)),
    ]


def _rounded(asked: _Asked, matrix: str, elements: int, itemsize: int) -> list[Transfer]:
    """From fp32 to the dtype of the call, where that is another."""
    if itemsize == FLOAT_BYTES:
        return []
    return [asked.part(matrix, READ, elements, FLOAT_BYTES), asked.part(matrix, WRITE, elements)]


def _flash_v2_forward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    D, heads, tile = shape.head_dim, shape.num_q_heads, launch.tiles.forward
    seen = _visits(shape, intervals, tile.BLOCK_M, tile.BLOCK_N)
    kernel = _Asked("forward", shape, itemsize)
    return [
        kernel.as_pass(
            *kernel.read("Q"),
            *kernel.parts("K V", READ, heads * seen.rows * D),
            *kernel.write("O"),
            kernel.part("LSE", WRITE, shape.q_rows, FLOAT_BYTES),
            *seen.bounds(kernel, heads, shape.q_rows),
            flops=2 * heads * seen.steps * _product(tile.BLOCK_M, tile.BLOCK_N, padded(D)),
            reused_bytes=2 * seen.widest * D * itemsize,
            readers=seen.readers,
            heads=shape.batch * heads,
            programs=-(-shape.q_len // tile.BLOCK_M),
        )
    ]


def _flash_v2_backward(shape: Shape, intervals: Intervals, itemsize: int, launch: Launch) -> list[Pass]:
    D, heads, kv_heads = shape.head_dim, shape.num_q_heads, shape.num_kv_heads
    delta, dkdv, dq = (_Asked(name, shape, itemsize) for name in ("delta", "dK, dV", "dQ"))
    key_tile, query_tile = launch.tiles.dkdv, launch.tiles.dq
    queries = _visits(shape, intervals, key_tile.BLOCK_N, key_tile.BLOCK_M, by_keys=True)
    keys = _visits(shape, intervals, query_tile.BLOCK_M, query_tile.BLOCK_N)
    return [
        delta.as_pass(
            *delta.read("O", "dO"),
            *delta.parts("LSE dLSE", READ, shape.q_rows, FLOAT_BYTES),
            *delta.parts("delta lse2", WRITE, shape.q_rows, FLOAT_BYTES),
        ),
        dkdv.as_pass(
            *dkdv.read("K", "V"),
            *dkdv.parts("Q dO", READ, heads * queries.rows * D),
            *dkdv.parts("lse2 delta", READ, heads * queries.rows, FLOAT_BYTES),
            *dkdv.write("dK", "dV"),
            *queries.bounds(dkdv, kv_heads, shape.kv_rows),
            flops=4 * heads * queries.steps * _product(key_tile.BLOCK_M, key_tile.BLOCK_N, padded(D)),
            reused_bytes=2 * shape.group_size * queries.widest * (D * itemsize + FLOAT_BYTES),
            readers=queries.readers,
            heads=shape.batch * kv_heads,
            programs=-(-shape.kv_len // key_tile.BLOCK_N),
        ),
        dq.as_pass(
            *dq.read("Q", "dO"),
            *dq.parts("lse2 delta", READ, shape.q_rows, FLOAT_BYTES),
            *dq.parts("K V", READ, heads * keys.rows * D),
            *dq.write("dQ"),
            *keys.bounds(dq, heads, shape.q_rows),
            flops=3 * heads * keys.steps * _product(query_tile.BLOCK_M, query_tile.BLOCK_N, padded(D)),
            reused_bytes=2 * keys.widest * D * itemsize,
            readers=keys.readers,
            heads=shape.batch * heads,
            programs=-(-shape.q_len // query_tile.BLOCK_M),
        ),
    ]


_MODELS = {
    ("standard", "forward"): _standard_forward,
    ("standard", "backward"): _standard_backward,
    ("flash_v1", "forward"): _flash_v1_forward,
    ("flash_v1", "backward"): _flash_v1_backward,
    ("flash_v2", "forward"): _flash_v2_forward,
    ("flash_v2", "backward"): _flash_v2_backward,
}
