"""Streams of documents, and models whose every prediction is known, as the scorer's callables."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flashtrain.evaluation.perplexity import Conditions

PREFIX = 256


@dataclass
class Stream:
    tokens: np.ndarray
    offsets: np.ndarray


def stream_of(documents):
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    return Stream(np.concatenate(documents).astype(np.uint16), offsets)


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

    def nll(inputs, targets):
        hidden, _ = gru(embedding(inputs))
        return torch.nn.functional.cross_entropy(head(hidden).transpose(1, 2), targets, reduction="none")

    return nll


@pytest.fixture
def conditions():
    return Conditions(
        model="nano",
        step=400,
        training_length=512,
        positions="learned positions",
        attention="sdpa_flash",
        dtype="float32",
        device="cpu",
        corpus="stdlib",
        corpus_fingerprint="3f9a12cd",
        tokenizer="bytes",
        tokenizer_fingerprint="0b17e5",
        prefix_id=PREFIX,
    )
