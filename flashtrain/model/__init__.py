"""One decoder for GPT-2 and Llama-like families, its loss head and sampling; attention is passed in."""
