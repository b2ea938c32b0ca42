"""FlashAttention-2 in portable Triton: outer loop over query tiles; the backward without atomics."""
