"""The masks that attention is timed with, by name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain.kernels.attention import Intervals

MASKS = ("causal", "full", "window", "documents")


@dataclass(frozen=True)
class Masks:
    """What `MASKS` leave open."""

    window: int
    """Keys that a query sees with the window mask, its own and those before it."""
    longest_document: int
    """Documents have 1 to this many tokens, each length as likely."""
    seed: int
    """Of the lengths of documents."""

    def intervals(self, name: str, batch: int, length: int, device: str) -> Intervals:
        """The mask of that name for `batch` rows of `length` tokens, with its bounds on `device`."""
        if name == "full":
            return Intervals.full()
        if name == "causal":
            return Intervals.causal()
        if name == "window":
            return Intervals.window(self.window - 1, 0)
        assert name == "documents"
        documents = packed_documents(batch, length, longest=self.longest_document, seed=self.seed)
        return Intervals.causal().in_documents(documents.to(device))

    def label(self, name: str) -> str:
        """What the mask shows, in words."""
        words = {
            "window": f"window of {self.window:,} keys",
            "documents": f"documents of 1 to {self.longest_document:,} tokens",
        }
        return words.get(name, name)


def packed_documents(batch: int, length: int, *, longest: int, seed: int) -> Tensor:
    """(batch, length) int64: which document each token is of, in one stream of documents that is cut into rows."""
    tokens = batch * length
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, longest + 1, (tokens,), generator=generator).cumsum(0)
    return torch.bucketize(torch.arange(tokens), ends, right=True).reshape(batch, length)
