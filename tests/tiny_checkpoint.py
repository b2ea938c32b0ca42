"""A checkpoint in Hugging Face's format, small enough for a test, as transformers saves it."""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 300


def save_checkpoint(folder: Path, **changes) -> transformers.PreTrainedModel:
    """A Llama of random weights and a tokenizer of the 256 bytes and a few words; `changes` to its settings."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return model


def tokenizer() -> tokenizers.Tokenizer:
    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(pieces[:1])
    return made
