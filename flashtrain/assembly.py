"""What a Config stands for: its corpus, its model with the attention bound to it, and its scorer.

The verbs share these steps; from here on code takes plain arguments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashtrain import device as devices
from flashtrain import runs
from flashtrain.composition import refuse_all_but
from flashtrain.config import Config
from flashtrain.data.corpus import Corpus, open_corpus
from flashtrain.data.digest import parts_digest
from flashtrain.data.documents import stdlib_source, text_source
from flashtrain.data.options import DataOptions, RecallOptions, TextOptions
from flashtrain.data.recall import RecallCorpus, RecallTokenizer
from flashtrain.data.tokenizer import Tokenizer, load_tokenizer
from flashtrain.device import Device
from flashtrain.errors import UserError
from flashtrain.evaluation.scoring import NllFunction
from flashtrain.kernels.attention import AttentionSpec, Intervals, attention, require, resolve, supporting
from flashtrain.model.attention import causal_window
from flashtrain.model.cache import KeyValueCache
from flashtrain.model.gpt import GPT
from flashtrain.model.head import token_nll
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions
from flashtrain.saved_settings import saved_model
from flashtrain.training.checkpoint import load_weights

# What of a model may change where it starts from the weights of another: how it is called, and what its layers see.
MAY_DIFFER = ("name", "rope", "windows")

Data = Corpus | RecallCorpus
"""What a run reads: documents of text, or the rows of a task."""


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
    fed, piece = config.eval.fed_lengths(), config.eval.prefill_tokens
    return _made(
        config,
        [config.train.sequence_length, *(min(length, piece or length) for length in fed)],
        pieces=[(piece, length) for length in fed if length > (piece or length)],
        trains=trains,
    )


def assemble_training(config: Config) -> Assembly:
    """Make what training takes, and nothing that only an evaluation asks for; the seed draws weights."""
    return _made(config, [config.train.sequence_length], pieces=[], trains=True)


def _made(
    config: Config, lengths: Sequence[int], *, pieces: Sequence[tuple[int, int]], trains: bool
) -> Assembly:
    """Assembled for rows of these lengths, and of pieces as `choose_attention` has them."""
    device = devices.resolve(config.trainer.device, config.trainer.precision, config.trainer.compile)
    device.set_tf32()
    tokenizer = open_tokenizer(config.data)
    options = resolve_model(config.model, tokenizer)
    variant = choose_attention(
        config.attention.variant,
        options,
        device,
        lengths,
        pieces=pieces,
        packed_length=config.train.sequence_length if trains and config.data.isolate_documents else None,
        trains=trains,
        deterministic=config.attention.deterministic,
    )
    torch.manual_seed(config.seed)
    model = build_model(
        options,
        variant,
        device,
        config.trainer.activation_checkpointing,
        deterministic=config.attention.deterministic,
    )
    return Assembly(device, tokenizer, variant, model)


def assemble_run(config: Config) -> tuple[Assembly, int]:
    """Make what the finished run `config.run` used, with its weights, and the step these are from."""
    refuse_all_but(("run", "checkpoint"), config)
    if config.run is None:
        raise UserError("which run is meant? Say run=DIR, a folder that train.py made")
    assembly = assemble(config, trains=False)
    runs.require_same(Path(config.run), "tokenizer", assembly.tokenizer.fingerprint)
    step = load_weights(assembly.model, runs.checkpoint(Path(config.run), config.checkpoint))
    assembly.model.eval()
    return assembly, step


def load_initial_weights(made: Assembly, place: str) -> int:
    """Give the model the weights of the run `place`, or of one of its checkpoints; the step that these are from.

    Raises UserError where that run has another tokenizer, or another model in more than `MAY_DIFFER`.
    """
    folder = runs.folder_of(place)
    if runs.read_provenance(folder).get("tokenizer") != made.tokenizer.fingerprint:
        raise UserError(
            f"train.init_from={place} was trained with another tokenizer than {made.tokenizer.name}, whose tokens its "
            "weights do not know; give its own with data.tokenizer=..., or its own data"
        )
    here, there = vars(made.model.options), vars(resolve_model(saved_model(folder), made.tokenizer))
    names = [name for name in here if name not in MAY_DIFFER and here[name] != there[name]]
    if names:
        differences = "; ".join(f"model.{name} is {there[name]} there and {here[name]} here" for name in names)
        raise UserError(
            f"train.init_from={place} is of another model: {differences}; give the settings that it was trained with, "
            "of which model.rope and model.windows may change"
        )
    return load_weights(made.model, runs.checkpoint_of(place))


def open_tokenizer(data: DataOptions) -> Tokenizer:
    """What makes tokens of text: the one that is named, or that of the task."""
    return RecallTokenizer(data) if isinstance(data, RecallOptions) else load_tokenizer(data.tokenizer)


def open_data(data: DataOptions, tokenizer: Tokenizer) -> Data:
    """The tokenized corpus, built or found in the cache, or the rows of a task."""
    if isinstance(data, RecallOptions):
        return RecallCorpus(data)
    source = text_source(data.path, data.column) if isinstance(data, TextOptions) else stdlib_source()
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
    pieces: Sequence[tuple[int, int]] = (),
    deterministic: bool = False,
) -> str:
    """The variant for rows of each of `lengths` in every layer, and for rows of documents of `packed_length`.

    pieces: (piece, length): rows of `length` tokens that are read `piece` tokens at a time, over a cache.

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
            q_len=q_len,
            kv_len=kv_len,
            intervals=intervals,
            softcap=_softcap(model),
            needs_grad=trains,
            deterministic=deterministic,
        )
        for q_len, kv_len, intervals in _calls(model, sorted(lengths, reverse=True), packed_length, pieces)
    ]
    specs.sort(key=lambda spec: len(supporting(spec)))
    name = resolve(variant, specs[0])
    for spec in specs:
        require(name, spec)
    return name


def _calls(
    model: ModelOptions, lengths: Sequence[int], packed_length: int | None, pieces: Sequence[tuple[int, int]]
) -> list[tuple[int, int, Intervals]]:
    """Numbers of queries and keys, and masks, that the layers of the model are called with, each once."""
    windows = list(dict.fromkeys(model.windows))
    called = [(length, length, causal_window(window)) for length in lengths for window in windows]
    for piece, length in pieces:
        for size in dict.fromkeys((piece, length % piece or piece)):  # the last piece sees the most keys
            for window in windows:
                keys = length if window is None else min(length, window - 1 + size)
                called.append((size, keys, causal_window(window)))
    if packed_length is not None:
        documents = torch.zeros(1, packed_length, dtype=torch.int32, device="meta")  # any: only shapes are asked for
        called += [(packed_length, packed_length, causal_window(window).in_documents(documents)) for window in windows]
    return called


def _softcap(model: ModelOptions) -> float:
    """The softcap as kernels take it: 0 for none."""
    return model.attention_softcap or 0.0


def build_model(
    options: ModelOptions,
    variant: str,
    device: Device,
    activation_checkpointing: str,
    *,
    deterministic: bool = False,
) -> GPT:
    """The model on its device, weights drawn from the global generator, its attention bound to what calls share."""
    bound = functools.partial(attention, variant=variant, softcap=_softcap(options), deterministic=deterministic)
    model = GPT(options, bound, activation_checkpointing).to(device.type, device.precision.weights)
    if device.compile:
        devices.start_compile_workers()
        torch.compiler.reset()  # a sweep's earlier jobs would count towards the limit of recompilations
        model.compile(dynamic=False)
    return model


def weights_digest(model: GPT) -> str:
    """A digest of the weights' names and bytes."""
    state = model.state_dict()
    return parts_digest(
        part
        for name, tensor in state.items()
        for part in (name.encode(), tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    )


def scorer(
    model: GPT,
    device: Device,
    chunk_size: int,
    rope: RopeOptions | None,
    prefill_tokens: int | None,
    score_rows: Callable[..., Tensor] = token_nll,
) -> NllFunction:
    """What an evaluation asks for: (B, L) inputs and targets -> their negative log-likelihoods in nats.

    `rope`: as `GPT.forward` takes it. `prefill_tokens`: tokens of a row that are read at once, over a cache of those
    before; None: all of them. `score_rows`: of head.py; with `token_hits` the result is (2, B, L).
    """

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # every length and last batch would be compiled anew
    def scores(inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        length = inputs_BL.shape[1]
        whole = prefill_tokens is None or length <= prefill_tokens
        cache = None if whole else KeyValueCache(model.options.windows, length)
        pieces = (tensor.split(length if whole else prefill_tokens, dim=1) for tensor in (inputs_BL, targets_BL))
        return torch.cat([piece(inputs, targets, cache) for inputs, targets in zip(*pieces, strict=True)], dim=-1)

    def piece(inputs_BS: Tensor, targets_BS: Tensor, cache: KeyValueCache | None) -> Tensor:
        targets_BS = targets_BS.to(device.type)
        with device.autocast():
            hidden = model(inputs_BS.to(device.type), rope=rope, cache=cache).flatten(0, 1)
            vocab_size = model.options.vocab_size
            rows = score_rows(hidden, model.head_weight, targets_BS.flatten(), vocab_size, chunk_size)
        return rows.unflatten(-1, targets_BS.shape)

    return scores
