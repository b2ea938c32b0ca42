"""Checkpoints in Hugging Face's format: a small one as transformers saves it, and what our model is of one."""

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from flashtrain.interop.folder import TensorFolder, read_config
from flashtrain.interop.settings import read_settings
from flashtrain.interop.tensors import import_weights
from flashtrain.model.attention import Attention
from flashtrain.model.gpt import GPT

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


def load_checkpoint(folder: Path, attention: Attention) -> GPT:
    """Our model with the weights of a checkpoint."""
    family, options, _ = read_settings(read_config(folder), "config.json", folder.name)
    model, tensors = GPT(options, attention), TensorFolder(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.load_state_dict(import_weights(family, model.options, shapes, tensors.names, tensors.read, folder.name))
    return model
