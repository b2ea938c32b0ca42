"""What a family of Hugging Face's models is to us: how its settings and tensors are ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashtrain.interop.fields import Fields
from flashtrain.model.options import ModelOptions


@dataclass(frozen=True)
class Piece:
    """One of our tensors, and theirs that stand in it row after row; rows of ours beyond them are padding."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    """How many each of theirs has."""
    transposed: bool = False
    """Whether theirs has columns where ours has rows."""


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`."""

    architecture: str
    fixed: dict[str, Any]
    """Our settings that all of its models have in common."""
    prefix: str
    """How the names of its tensors begin, the head's apart; a checkpoint of the body alone leaves it out."""
    buffers: str
    """Matches names of tensors in older checkpoints that follow from the settings."""
    read: Callable[[Fields, str], tuple[ModelOptions, int]]
    """(settings, a name for the model) -> our settings and the tokens in a row that it was trained with."""
    write: Callable[[ModelOptions, int], dict[str, Any]]
    """The inverse, for resolved options that `obstacles` has nothing against."""
    obstacles: Callable[[ModelOptions], list[str]]
    """The settings of resolved options that it cannot express, beside what is against `fixed`."""
    pieces: Callable[[ModelOptions], list[Piece]]
    """All tensors of a model of resolved options."""


HEAD = "lm_head.weight"


def said(options: ModelOptions, key: str) -> str:
    """A setting as it stands on a command line."""
    return f"model.{key}={getattr(options, key)}"


def head_piece(options: ModelOptions) -> list[Piece]:
    """The head where it is a tensor of its own, which is named alike in all families."""
    return [] if options.tie_embeddings else [Piece("head.weight", (HEAD,), (options.vocab_size,))]
