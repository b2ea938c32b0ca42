"""FlashAttention's first algorithm, as published."""

from .tiles import block_sizes

__all__ = ["block_sizes"]
