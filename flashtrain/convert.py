"""Convert between Hugging Face's checkpoints and runs.

`python -m flashtrain.convert source=CHECKPOINT output=RUN [data=... train....=...]` makes a run of a checkpoint, before
its first step; `python -m flashtrain.convert run=RUN output=CHECKPOINT` exports the weights of a run;
`python -m flashtrain.convert source=FILE.gguf output=CHECKPOINT` makes a checkpoint of a GGUF file.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from flashtrain import ranks, runs
from flashtrain.assembly import open_data, open_tokenizer, resolve_model
from flashtrain.composition import PRETRAINED_LENGTH, Root, refuse_all_but
from flashtrain.composition import settle as settle_run
from flashtrain.config import Config
from flashtrain.data.options import RecallOptions
from flashtrain.data.tokenizer import FileTokenizer, load_tokenizer
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.interop import gguf
from flashtrain.interop.family import Family
from flashtrain.interop.folder import CONFIG, TOKENIZER, TensorFolder, read_config, write_checkpoint
from flashtrain.interop.settings import read_settings, write_settings
from flashtrain.interop.tensors import export_weights, import_weights
from flashtrain.model.gpt import GPT
from flashtrain.model.options import ModelOptions
from flashtrain.saved_settings import given_keys, to_yaml
from flashtrain.training.checkpoint import MODEL_PREFIX, load_weights, written_whole

OF_WEIGHTS = (PRETRAINED_LENGTH, "train.init_from")


@dataclass
class ConvertConfig(Config):
    source: str | None
    """Folder of a Hugging Face checkpoint to make a run of, or GGUF file to make such a checkpoint of."""


@dataclass(frozen=True)
class Import:
    source: Path
    family: Family
    config: Config
    """Of the run that it becomes."""


@dataclass(frozen=True)
class Export:
    config: Config
    """Of the run."""
    output: str | None


@dataclass(frozen=True)
class Unpacking:
    source: Path
    """A GGUF file."""
    output: str | None


def settle(composed: DictConfig, overrides: list[str]) -> Import | Export | Unpacking:
    """What to convert, from what Hydra composed and the command line; the model is the checkpoint's, or the run's."""
    if (composed.source is None) == (composed.run is None):
        raise UserError(
            "what is meant? Say source=CHECKPOINT, a folder in Hugging Face's format, or run=RUN, one to export"
        )
    given = given_keys(overrides)
    if composed.run is not None:
        if others := sorted(given - {"run", "checkpoint", "output"}):
            raise UserError(
                f"{', '.join(others)} is not for an export, which takes run, checkpoint and output; leave it out"
            )
        output, composed.output = composed.output, None
        return Export(settle_run(composed, overrides), output)
    source = Path(composed.source)
    if source.suffix == gguf.SUFFIX:
        if others := sorted(given - {"source", "output"}):
            raise UserError(f"{', '.join(others)} is for a run, and {source} becomes a checkpoint first; leave it out")
        return Unpacking(source, composed.output)
    if chosen := sorted(key for key in given if key.split(".")[0] == "model" or key in OF_WEIGHTS):
        raise UserError(f"{', '.join(chosen)} is not to be chosen: the model is that of {source}; leave it out")
    if "experiment" in given:
        raise UserError(f"experiment=... brings a model of its own, and this one is that of {source}; leave it out")
    if OmegaConf.get_type(composed.data) is RecallOptions:
        raise UserError(f"data=recall has a vocabulary of its own and {source} another; say data=text or data=stdlib")
    settings = read_config(source)
    family, composed.model, training_length = read_settings(settings, str(source / CONFIG), source.resolve().name)
    composed.train.pretrained_length = training_length
    if "train.sequence_length" not in given:
        composed.train.sequence_length = training_length
    if "train.tokens_per_step" not in given and composed.train.sequence_length > 0:
        rows = max(composed.train.tokens_per_step // composed.train.sequence_length, 1)
        composed.train.tokens_per_step = rows * composed.train.sequence_length
    if "data.tokenizer" not in given:
        composed.data.tokenizer = str(source / TOKENIZER)
    config = settle_run(composed, overrides)
    return Import(source, family, Config(**{field.name: getattr(config, field.name) for field in fields(Config)}))


def run(asked: Import | Export | Unpacking) -> None:
    """Convert, and say what came of it."""
    ranks.refuse_torchrun("a conversion", "python -m flashtrain.convert ..., which takes one process")
    match asked:
        case Import():
            import_checkpoint(asked)
        case Export():
            export_run(asked)
        case Unpacking():
            unpack_gguf(asked)


def import_checkpoint(asked: Import) -> None:
    """Make the folder of a run before its first step, with the weights and the tokenizer of a checkpoint."""
    source, family, config = asked.source, asked.family, asked.config
    refuse_all_but(("source", "output"), config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the model of {source} knows "
            f"{config.model.vocab_size}; name the model's own with data.tokenizer=..."
        )
    options = resolve_model(config.model, tokenizer)
    tensors = TensorFolder(source)
    weights = import_weights(family, options, _shapes(options), tensors.names, tensors.read, str(source))
    corpus = open_data(config.data, tokenizer)
    facts = runs.provenance(
        corpus=corpus.fingerprint, tokenizer=tokenizer.fingerprint, source=str(source), architecture=family.architecture
    )
    with runs.folder_made_whole(config.output, options.name) as folder:
        if isinstance(tokenizer, FileTokenizer):
            config.data.tokenizer = str(folder / TOKENIZER)
            runs.copy(tokenizer.name, folder / TOKENIZER)
        runs.write_whole(folder / runs.CONFIG_FILE, to_yaml(config))
        runs.write_json(folder / runs.PROVENANCE_FILE, facts)
        _save(weights, runs.checkpoint(folder, runs.DEFAULT_CHECKPOINT))
    print(f"wrote {folder}: a run with the weights of {source}, {family.architecture}, before its first step")


def export_run(asked: Export) -> None:
    """Write the weights of a run as a checkpoint, in float32, of the first family that can express its model."""
    config = asked.config
    refuse_all_but(("run", "checkpoint", "output"), config)
    tokenizer = open_tokenizer(config.data)
    options = resolve_model(config.model, tokenizer)
    runs.require_same(Path(config.run), "tokenizer", tokenizer.fingerprint)
    model = _empty_model(options).to_empty(device="cpu")
    steps = load_weights(model, runs.checkpoint(Path(config.run), config.checkpoint))
    family, settings = write_settings(options, config.train.length_after(steps), tokenizer.prefix_id)
    with runs.folder_made_whole(asked.output, options.name) as folder:
        write_checkpoint(folder, settings, export_weights(family, options, model.state_dict()))
        if isinstance(tokenizer, FileTokenizer):
            runs.copy(tokenizer.name, folder / TOKENIZER)
    if not isinstance(tokenizer, FileTokenizer):
        print(f"no {TOKENIZER}: the tokenizer is {tokenizer.name}, and {tokenizer.prefix_id} stands before a document")
    print(f"wrote {folder}: {family.architecture} with the weights of {config.run}")


def unpack_gguf(asked: Unpacking) -> None:
    """Write the model and the tokenizer of a GGUF file as a checkpoint in float32."""
    settings, tensors, tokenizer = gguf.read_gguf(asked.source)
    with runs.folder_made_whole(asked.output, asked.source.stem) as folder:
        write_checkpoint(folder, settings, tensors)
        runs.write_whole(folder / TOKENIZER, tokenizer)
    print(f"wrote {folder}: a checkpoint of {asked.source}, to be converted with source={folder}")


def _save(weights: dict[str, Tensor], path: Path) -> None:
    """Write a checkpoint of step 0, from which training starts as from drawn weights."""
    state = {MODEL_PREFIX + name: tensor for name, tensor in weights.items()}
    with written_whole(path) as partial, partial.open("wb") as file:
        torch.save({"state_dict": state, "global_step": 0, "loops": {}}, file)


def _empty_model(options: ModelOptions) -> GPT:
    with torch.device("meta"):
        return GPT(options, attention=None)


def _shapes(options: ModelOptions) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in _empty_model(options).state_dict().items()}


ROOT = Root("convert", ConvertConfig, settle)

if __name__ == "__main__":
    main(run, ROOT)
