"""Train steps of other trainers that `python -m flashtrain.bench_training peers=[train_step_peers:NAME]` times.

With this folder on PYTHONPATH; for `nanogpt` also nanoGPT's model.py, there under the name nanogpt_model.py. Each makes
a GPT-2 124M or a Llama of its size on the GPU, compiled, under bf16 autocast, with fused AdamW and clipping, on one
batch of random tokens, and returns (step, tokens of a step).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

DEVICE = "cuda"
VOCAB_SIZE, PADDED = 50_257, 50_304

Peer = tuple[Callable[[], None], int]


def nanogpt(sequence_length: int, tokens: int) -> Peer:
    """The model and the optimizer of github.com/karpathy/nanoGPT."""
    from nanogpt_model import GPT, GPTConfig

    config = GPTConfig(
        block_size=sequence_length, vocab_size=PADDED, n_layer=12, n_head=12, n_embd=768, dropout=0.0, bias=False
    )
    model = GPT(config).to(DEVICE)
    inputs, labels = (_random_tokens(sequence_length, tokens) for _ in range(2))
    compiled = _compiled(model)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), DEVICE)
    return _step(model, optimizer, lambda: compiled(inputs, labels)[1]), inputs.numel()


def hf_llama(sequence_length: int, tokens: int) -> Peer:
    """LlamaForCausalLM of transformers, whose attention is SDPA's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
        vocab_size=PADDED, max_position_embeddings=sequence_length, attn_implementation="sdpa",
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE)
    inputs = _random_tokens(sequence_length, tokens)
    compiled = _compiled(model)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    return _step(model, optimizer, lambda: compiled(input_ids=inputs, labels=inputs).loss), inputs.numel()


def _random_tokens(sequence_length: int, tokens: int) -> Tensor:
    """Rows (B, S) of as many tokens as asked for, one row at least."""
    return torch.randint(0, VOCAB_SIZE, (max(1, tokens // sequence_length), sequence_length), device=DEVICE)


def _compiled(model: nn.Module) -> Callable:
    torch._dynamo.reset()  # or a second length would be compiled for all lengths
    return torch.compile(model)


def _step(model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
