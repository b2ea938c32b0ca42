"""What of a source is trained on and what is held out for validation.

Decides what is left out (empty documents and second copies) and what is held out: the documents whose names have
the lowest digests, so that adding documents moves few others, or the last lines of the only document.
"""

from dataclasses import dataclass

from flashtrain.data.digest import digest
from flashtrain.data.documents import Source
from flashtrain.errors import UserError

TRAIN, VALIDATION = "train", "validation"

Parts = dict[str, slice]
"""The characters of a document that go to train and to validation; empty where it is left out."""


@dataclass(frozen=True)
class Split:
    parts: list[Parts]
    """Of each document of the source, in its order."""
    num_empty: int
    """Documents left out for having no text."""
    num_repeated: int
    """Documents left out for having the same text as an earlier one."""
    cut: str | None
    """Where the only document is cut in two, for people; None where there are several."""


def split_documents(source: Source, validation_fraction: float) -> Split:
    """Hold out `validation_fraction` of the different documents and at least one, or the end of the only one.

    Raises UserError if the source cannot be read or has less than two characters.
    """
    kept, num_documents, num_empty = {}, 0, 0
    for name, text in source.documents():
        if text:
            name_bytes = name.encode(errors="surrogateescape")  # a file's name need not be UTF-8
            kept.setdefault(digest(text.encode()), (digest(name_bytes), num_documents))
        else:
            num_empty += 1
        num_documents += 1
    parts: list[Parts] = [{}] * num_documents
    cut = None
    if len(kept) > 1:
        whole = {split: {split: slice(None)} for split in (TRAIN, VALIDATION)}
        num_validation = min(max(1, round(validation_fraction * len(kept))), len(kept) - 1)
        for rank, (_, i) in enumerate(sorted(kept.values())):
            parts[i] = whole[VALIDATION if rank < num_validation else TRAIN]
    else:
        text = next((text for _, text in source.documents() if text), "")
        if len(text) < 2:
            raise UserError(
                f"{source.label} does not have two characters of text, one to train on and one to hold out for "
                "validation; give more"
            )
        place = cut_place(text, validation_fraction)
        cut = "at a line end" if text[place - 1] == "\n" else "inside a line"
        ((_, i),) = kept.values()
        parts[i] = {TRAIN: slice(place), VALIDATION: slice(place, None)}
    return Split(parts, num_empty, num_documents - num_empty - len(kept), cut)


def cut_place(text: str, last_fraction: float) -> int:
    """The place where text[place:] is about the last `last_fraction` of `text`, and neither part is empty.

    It is behind the line end nearest to the exact place. Where none is so near that the smaller part keeps more
    than half its length, it is the exact place, inside a line. `text` has at least two characters.
    """
    goal = min(max(1, round((1 - last_fraction) * len(text))), len(text) - 1)
    reach = (min(goal, len(text) - goal) - 1) // 2
    before = text.rfind("\n", goal - reach - 1, goal) + 1
    behind = text.find("\n", goal - 1, goal + reach) + 1
    return min((end for end in (before, behind) if end), key=lambda end: abs(end - goal), default=goal)
