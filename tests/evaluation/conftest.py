"""Streams of documents, and models whose every prediction is known, as the scorer's callables."""

import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from eval_options import OPTIONS
from rich.console import Console

from flashtrain.evaluation.perplexity import Conditions, evaluate_perplexity
from flashtrain.evaluation.scoring import Documents

PREFIX = 256

SHORT = replace(OPTIONS, lengths=[32, 64, 128], targets_per_anchor=16, max_anchors=None, batch_tokens=512)


@dataclass
class Tokens:
    """Read in slices, as tokens on disk are, and in no other way."""

    array: np.ndarray

    def __len__(self):
        return len(self.array)

    def __getitem__(self, place):
        assert isinstance(place, slice)
        return self.array[place]


@dataclass
class Stream:
    tokens: Tokens
    offsets: np.ndarray


def stream_of(documents):
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return Stream(Tokens(np.concatenate(documents).astype(np.uint16)), offsets)


@pytest.fixture
def make_stream():
    """Build a stream of the given documents (arrays of token ids)."""
    return stream_of


@pytest.fixture
def random_stream():
    """Build a stream of random bytes, documents of the given numbers of tokens, the prefix token included."""

    def build(*lengths, seed=0):
        rng = np.random.default_rng(seed)
        return stream_of([np.r_[PREFIX, rng.integers(0, 256, length - 1)] for length in lengths])

    return build


@pytest.fixture
def byte_counts():
    """UTF-8 bytes per token of a byte tokenizer whose last token is the prefix."""
    return np.r_[np.ones(256, dtype=np.int64), 0]


@pytest.fixture(scope="session")
def recurrent_nll():
    """A causal model that remembers everything before a token and knows no positions: a random GRU."""
    torch.manual_seed(0)
    embedding, gru, head = (
        torch.nn.Embedding(257, 24),
        torch.nn.GRU(24, 48, batch_first=True),
        torch.nn.Linear(48, 257),
    )
    with torch.no_grad():
        head.weight.mul_(20)  # far from uniform, so that every target has its own nll

    @torch.no_grad()
    def nll(inputs, targets):
        hidden, _ = gru(embedding(inputs))
        return torch.nn.functional.cross_entropy(head(hidden).transpose(1, 2), targets, reduction="none")

    return nll


@pytest.fixture
def conditions():
    return Conditions(
        model="nano",
        weights="5e0c4af1",
        step=400,
        training_length=512,
        positions="learned positions",
        attention="sdpa_flash",
        dtype="float32",
        device="cpu",
        precision="float32 on cpu",
        corpus="stdlib",
        corpus_fingerprint="3f9a12cd",
        text_fingerprint="77d0b1e2",
        tokenizer="bytes",
        tokenizer_fingerprint="0b17e5",
        prefix_id=PREFIX,
    )


@pytest.fixture
def evaluation_of(byte_counts, conditions):
    """Evaluate a model on a stream with SHORT, or changes of them."""

    def build(nll, stream, follows_length=False, journal=None, **changes):
        options = replace(SHORT, **changes).resolve(64, None)
        assert options.validate(None) == []
        return evaluate_perplexity(
            nll,
            Documents(stream, options.prefix),
            bytes_per_token=byte_counts,
            count_words=len,
            options=options,
            conditions=conditions,
            follows_length=follows_length,
            console=Console(file=io.StringIO()),
            journal=journal,
        )

    return build


@pytest.fixture
def curves_of(evaluation_of):
    return lambda *arguments, **changes: evaluation_of(*arguments, **changes).curves
