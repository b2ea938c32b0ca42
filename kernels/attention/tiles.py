"""How kernels are launched: flash_v2 by a table of tiles, warps and pipeline stages for each architecture, head
dimension and dtype; flash_v1 by its paper's formula.

Static on purpose: nothing is tuned at start-up, so every run and every rank launches the same kernels and
CUDA-graph capture meets no search. Rows say what was measured; the others are only known to compile and to
fit.
"""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """How to launch a kernel, under the kernels' argument names. BLOCK_M counts queries, BLOCK_N keys.

    MASKED_FIRST says in which order a tile visits its blocks: those that need a mask before those that do not.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    MASKED_FIRST: bool = False


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    dkdv: Tile
    dq: Tile
    use_tma: bool


# Small and uneven on purpose: short test inputs then cross many tile edges. use_tma as on sm_90.
INTERPRETER = Tiles(Tile(64, 32, 4, 1, True), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1, True), use_tma=True)

# architecture -> largest head dimension of a row -> how to launch for 16-bit inputs
HALF = {
    # Not measured. Fits the 99 KB of shared memory of the smaller GPUs of the family.
    "sm_80": {
        64: Tiles(Tile(128, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2), use_tma=False),
        128: Tiles(Tile(128, 32, 4, 2), Tile(32, 64, 8, 2), Tile(64, 32, 4, 2), use_tma=False),
        256: Tiles(Tile(64, 32, 8, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), use_tma=False),
    },
    "sm_90": {
        # H200, causal, 32,768 tokens, bf16, lengths 2k, 8k, 32k: the best of nine to ten each, both orders; NOTES.md.
        # In the backward masked blocks go first because the other order spills, at the same speed.
        64: Tiles(
            Tile(64, 128, 4, 2, True), Tile(128, 64, 4, 2, True), Tile(128, 64, 4, 3, True), use_tma=True
        ),
        # As for 64.
        128: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2, True), Tile(128, 64, 8, 3, True), use_tma=True),
        # H200, causal, 8k: the best of six or seven each. dK and dV spill: those that do not are 30 % slower.
        256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2, True), Tile(64, 32, 4, 3, True), use_tma=True),
    },
    # Not measured.
    "sm_100": {
        64: Tiles(Tile(128, 128, 8, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3), use_tma=True),
        128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), use_tma=True),
        256: Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(128, 32, 8, 2), use_tma=True),
    },
    # Not measured. 64 KB of shared memory.
    "gfx942": {
        64: Tiles(Tile(128, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), use_tma=False),
        128: Tiles(Tile(128, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1), use_tma=False),
        256: Tiles(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), use_tma=False),
    },
}

# Every architecture: exact fp32 products do not use tensor cores. Not measured.
FP32 = {
    64: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), use_tma=False),
    128: Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), use_tma=False),
    256: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), use_tma=False),
}


def architecture(device: torch.device) -> str:
    """The name of the rows for a device: sm_80 stands for every CUDA GPU that has no rows of its own."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(torch.cuda.get_device_capability(device)[0], "sm_80")


def tiles(architecture: str, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The launch records of a problem; head_dim, the larger one, at most 256."""
    if architecture == "interpreter":
        return INTERPRETER
    rows = FP32 if dtype == torch.float32 else HALF[architecture]
    return rows[next(limit for limit in sorted(rows) if head_dim <= limit)]


# An H200's, for compiling where there is no GPU.
DEFAULT_SMS = 132


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device: as many programs as stay on it where each takes the whole of one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else DEFAULT_SMS


# What flash_v1 takes the interpreter's SRAM for, in fp32 numbers: 64 KiB.
INTERPRETER_SRAM = 16_384


def sram_elements(device: torch.device) -> int:
    """M of flash_v1: the fp32 numbers that fit into the shared memory of one block of threads.

    Counted in fp32 whatever the dtype, since O, dK and dV are kept in it: so a dtype changes no block, and 16-bit
    inputs leave half of the memory for what the paper does not count, scores and copies in another layout.
    """
    if device.type == "cpu":
        return INTERPRETER_SRAM
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return properties.shared_memory_per_block // 4
    return properties.shared_memory_per_block_optin // 4


def block_sizes(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """B_r and B_c: the queries and the keys of flash_v1's blocks, powers of two of at least 16.

    K_j, V_j, Q_i and O_i of head_dim columns share the SRAM: B_c = ceil(M / 4d), B_r = min(B_c, d), rounded down.
    head_dim is what lies on chip, the larger one of Q and V, padded to a power of two.

    Source: FlashAttention (arXiv:2205.14135), algorithm 1, line 1.
    """
    keys = -(-sram_elements // (4 * head_dim))
    queries = min(keys, head_dim)
    return _power_of_two_below(queries), _power_of_two_below(keys)


def _power_of_two_below(size: int) -> int:
    return max(1 << (size.bit_length() - 1), 16)
