"""FlashAttention for Hopper in Gluon: loads, softmax and matrix products at the same time, in warps of their own."""
