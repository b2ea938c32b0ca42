"""A GPT trainer on Lightning with Triton FlashAttention kernels and long-context perplexity."""
