"""From the tensors of a checkpoint to the weights of our model, and back."""

import re
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.interop.family import HEAD, Family, Piece
from flashtrain.model.options import ModelOptions


def import_weights(
    family: Family,
    options: ModelOptions,
    shapes: Mapping[str, torch.Size],
    names: Collection[str],
    read: Callable[[str], Tensor],
    place: str,
) -> dict[str, Tensor]:
    """Return our weights, float32, of a checkpoint's tensors; the rows that pad the vocabulary are zeros.

    Args:
        options: of the model, resolved.
        shapes: of its weights, by their names.
        names: of all tensors in the checkpoint, which `read` returns; `place` names it in errors.

    Raises:
        UserError: a tensor is missing, has another shape, or is none of this model's.
    """
    pieces = family.pieces(options)
    prefixed = any(name.startswith(family.prefix) for name in names)

    def theirs(name: str) -> str:
        return name if prefixed else name.removeprefix(family.prefix)

    wanted = {theirs(name) for piece in pieces for name in piece.theirs}
    if missing := sorted(wanted - set(names)):
        raise UserError(f"{place} lacks tensors of the model in its config.json: {_some(missing)}")
    others = sorted(name for name in set(names) - wanted if not re.search(family.buffers, name))
    tied = options.tie_embeddings and HEAD in others
    if tied:
        others.remove(HEAD)
    if others:
        raise UserError(f"{place} has tensors that the model in its config.json has not: {_some(others)}")
    weights = {}
    for piece in pieces:
        weights[piece.ours] = weight = torch.zeros(shapes[piece.ours])
        parts = weight[: sum(piece.rows)].split(piece.rows)
        for part, name in zip(parts, piece.theirs, strict=True):
            part.copy_(_checked(read(theirs(name)), part.shape, piece, f"{place}: {theirs(name)}"))
    embedding = weights["token_embedding.weight"][: options.vocab_size]
    if tied and not torch.equal(read(HEAD).float(), embedding):
        raise UserError(f"{place} has a {HEAD} of its own and tie_word_embeddings in its config.json; set it to false")
    return weights


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _checked(tensor: Tensor, shape: torch.Size, piece: Piece, what: str) -> Tensor:
    if not tensor.is_floating_point():
        raise UserError(f"{what} is of {tensor.dtype}, as in quantized checkpoints, which are not read; use another")
    expected = tuple(reversed(shape)) if piece.transposed else tuple(shape)
    if tuple(tensor.shape) != expected:
        raise UserError(f"{what} is {tuple(tensor.shape)} and {expected} by its config.json; one of them is wrong")
    return tensor.T if piece.transposed else tensor


def export_weights(family: Family, options: ModelOptions, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of the family, of our weights for resolved options."""
    tensors = {}
    for piece in family.pieces(options):
        parts = weights[piece.ours][: sum(piece.rows)].split(piece.rows)
        for part, name in zip(parts, piece.theirs, strict=True):
            tensors[name] = (part.T if piece.transposed else part).clone(memory_format=torch.contiguous_format)
    return tensors
