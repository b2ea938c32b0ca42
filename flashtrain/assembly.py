"""What a Config stands for: its corpus, its model with the attention bound to it, and its scorer.

The verbs share these steps; from here on code takes plain arguments.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashtrain import device as devices
from flashtrain import ranks, runs
from flashtrain.config import Config, DataConfig, TextDataConfig, refuse_all_but
from flashtrain.data.corpus import Corpus, open_corpus
from flashtrain.data.documents import stdlib_source, text_source
from flashtrain.data.tokenizer import Tokenizer, load_tokenizer
from flashtrain.device import Device
from flashtrain.errors import UserError
from flashtrain.evaluation.scoring import NllFunction
from flashtrain.kernels.attention import AttentionSpec, Intervals, attention, require, resolve, supporting
from flashtrain.model.attention import causal_window
from flashtrain.model.gpt import GPT
from flashtrain.model.head import token_nll
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions
from flashtrain.training.checkpoint import load_weights


@dataclass(frozen=True)
class Assembly:
    """What every command needs."""

    device: Device
    tokenizer: Tokenizer
    variant: str
    """The attention variant, never auto."""
    model: GPT


def assemble(config: Config, *, trains: bool) -> Assembly:
    """Make it all, for rows of the training length and of the lengths to evaluate; the seed draws weights."""
    device = devices.resolve(config.trainer.device, config.trainer.precision, config.trainer.compile)
    device.set_tf32()
    tokenizer = load_tokenizer(config.data.tokenizer)
    options = resolve_model(config.model, tokenizer)
    lengths = [*config.eval.lengths, config.train.sequence_length]
    variant = choose_attention(
        config.attention.variant,
        options,
        device,
        lengths,
        packed_length=config.train.sequence_length if trains and config.data.isolate_documents else None,
        trains=trains,
    )
    torch.manual_seed(config.seed)
    model = build_model(options, variant, device, config.trainer.activation_checkpointing)
    return Assembly(device, tokenizer, variant, model)


def assemble_run(config: Config) -> tuple[Assembly, int]:
    """Make what the finished run `config.run` used, with its weights, and the step these are from."""
    refuse_all_but(("run", "checkpoint"), config)
    ranks.refuse_torchrun("a command on a finished run", "python -m ..., which takes one process")
    if config.run is None:
        raise UserError("which run is meant? Say run=DIR, a folder that train.py made")
    assembly = assemble(config, trains=False)
    runs.require_same(Path(config.run), "tokenizer", assembly.tokenizer.fingerprint)
    step = load_weights(assembly.model, runs.checkpoint(Path(config.run), config.checkpoint))
    assembly.model.eval()
    return assembly, step


def open_data(data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The tokenized corpus, built or found in the cache."""
    source = text_source(data.path, data.column) if isinstance(data, TextDataConfig) else stdlib_source()
    return open_corpus(
        source, tokenizer, cache_dir=data.cache_dir, validation_fraction=data.validation_fraction
    )


def resolve_model(options: ModelOptions, tokenizer: Tokenizer) -> ModelOptions:
    """The options with every null written out; a vocabulary of null is the tokenizer's.

    Raises UserError where the vocabulary is too small for the tokenizer.
    """
    vocab_size = options.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size is {vocab_size} and tokenizer {tokenizer.name} has {tokenizer.vocab_size} "
            "tokens; say model.vocab_size=null to take the tokenizer's"
        )
    return dataclasses.replace(options, vocab_size=vocab_size).resolve()


def choose_attention(
    variant: str,
    model: ModelOptions,
    device: Device,
    lengths: Sequence[int],
    *,
    packed_length: int | None,
    trains: bool,
) -> str:
    """The variant for rows of each of `lengths` in every layer, and for rows of documents of `packed_length`.

    `auto` is settled by what the fewest variants can serve, of equals by the longest. Raises Unsupported, naming
    the variants that would do, where one of them cannot be served.
    """
    specs = [
        AttentionSpec.on(
            device.type,
            dtype=device.dtype,
            head_dim=model.head_dim,
            num_q_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            q_len=length,
            kv_len=length,
            intervals=intervals,
            softcap=_softcap(model),
            needs_grad=trains,
        )
        for length, intervals in _masks(model, sorted(lengths, reverse=True), packed_length)
    ]
    specs.sort(key=lambda spec: len(supporting(spec)))
    name = resolve(variant, specs[0])
    for spec in specs:
        require(name, spec)
    return name


def _masks(
    model: ModelOptions, lengths: Sequence[int], packed_length: int | None
) -> list[tuple[int, Intervals]]:
    """The lengths and masks that the layers of the model are called with, each once."""
    masks = [causal_window(window) for window in dict.fromkeys(model.windows)]
    called = [(length, mask) for length in lengths for mask in masks]
    if packed_length is not None:
        documents = torch.zeros(1, packed_length, dtype=torch.int32, device="meta")  # any: only shapes are asked for
        called += [(packed_length, mask.in_documents(documents)) for mask in masks]
    return called


def _softcap(model: ModelOptions) -> float:
    """The softcap as kernels take it: 0 for none."""
    return model.attention_softcap or 0.0


def build_model(options: ModelOptions, variant: str, device: Device, activation_checkpointing: str) -> GPT:
    """The model on its device, weights drawn from the global generator, attention bound to variant and softcap."""
    bound = functools.partial(attention, variant=variant, softcap=_softcap(options))
    model = GPT(options, bound, activation_checkpointing).to(device.type, device.precision.weights)
    if device.compile:
        torch.compiler.reset()  # a sweep's earlier jobs would count towards the limit of recompilations
        model.compile(dynamic=False)
    return model


def scorer(model: GPT, device: Device, chunk_size: int, rope: RopeOptions | None) -> NllFunction:
    """What an evaluation asks for: (B, L) inputs and targets -> their negative log-likelihoods in nats.

    `rope`: as `GPT.forward` takes it.
    """

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # every length and last batch would be compiled anew
    def nll(inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        targets_BL = targets_BL.to(device.type)
        with device.autocast():
            hidden = model(inputs_BL.to(device.type), rope=rope).flatten(0, 1)
            vocab_size = model.options.vocab_size
            rows = token_nll(hidden, model.head_weight, targets_BL.flatten(), vocab_size, chunk_size)
        return rows.view_as(targets_BL)

    return nll
