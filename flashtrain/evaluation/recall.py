"""Associative recall of one model: which answers it gives right, by length and by where each was said.

Each length has documents of its own, fed whole in one forward; an answer is right where it is the most probable token
after its query, with all queries and answers before it as they should be. Several ranks take the batches in turn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from flashtrain import ranks
from flashtrain.evaluation.cost import Cost, Metered
from flashtrain.evaluation.options import EvalOptions
from flashtrain.evaluation.perplexity import Conditions
from flashtrain.evaluation.progress import tokens_bar
from flashtrain.evaluation.scoring import NOT_SCORED
from flashtrain.evaluation.table import RecallTable, concatenate
from flashtrain.evaluation.windows import PURPOSES, RECALL

KEYS = ("lengths", "max_documents", "batch_tokens", "prefill_tokens", "rope")
"""The options of an evaluation that recall takes: documents of each length, `max_documents` of them."""

NUM_DEPTHS = 10
Z = 1.959964  # of a normal distribution, 95 % lie so many standard deviations around its mean

# (inputs (B, L) int64, targets (B, L) int64) -> (2, B, L): nats, and 1 where the target is the most probable token.
HitFunction = Callable[[Tensor, Tensor], Tensor]


class RecallStream(Protocol):
    def document(self, i: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (length + 1,) of document i, and depths (answers,): where each was said among all, from 0 to 1."""

    def scored(self, i: int, length: int) -> slice:
        """Which of the `length` targets of document i are answers; the same for all i."""


@dataclass(frozen=True)
class Recall:
    """Sums over answers."""

    correct: int
    targets: int
    nll_sum: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.targets

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of an answer, in nats."""
        return self.nll_sum / self.targets

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        n, p = self.targets, self.accuracy
        middle = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
        return middle - half, middle + half


@dataclass(frozen=True)
class RecallEvaluation:
    """The table that was scored, and what it comes to."""

    table: RecallTable
    at_length: dict[int, Recall]
    by_depth: dict[tuple[int, int], Recall]
    """(length, depth) -> the answers said between depth and depth + 1 tenths of all that was."""
    num_values: int
    """Values that an answer may be: a guess is right once in so many times."""
    documents: int
    """Of each length."""
    options: EvalOptions
    conditions: Conditions
    cost: Cost = field(compare=False)  # the same figures may take more or less

    def beyond_training(self, length: int) -> bool:
        """Whether `length` tokens are more than the model ever saw in a row while training."""
        return length > self.conditions.training_length


def evaluate_recall(
    score: HitFunction,
    stream: RecallStream,
    *,
    num_values: int,
    options: EvalOptions,
    conditions: Conditions,
    console: Console,
) -> RecallEvaluation:
    """Score documents of every length and reduce the table; a progress bar runs on `console` meanwhile.

    Several ranks score together, and each returns the same.
    """
    metered = Metered(score)
    with tokens_bar(console) as progress:
        task = progress.add_task("recall", total=options.max_documents * sum(options.lengths))
        table = score_recall(
            metered,
            stream,
            options.lengths,
            options.max_documents,
            options.batch_tokens,
            lambda tokens: progress.advance(task, tokens),
        )
    return RecallEvaluation(
        table=table,
        at_length=recall_at_length(table),
        by_depth=recall_by_depth(table),
        num_values=num_values,
        documents=options.max_documents,
        options=options,
        conditions=conditions,
        cost=metered.cost(),
    )


def score_recall(
    score: HitFunction,
    stream: RecallStream,
    lengths: Sequence[int],
    num_documents: int,
    batch_tokens: int,
    advance: Callable[[int], object],
) -> RecallTable:
    """Return the table of all answers in the first documents, in batches of at most `batch_tokens` or one document.

    advance: called after each batch, of several ranks after each round, with the number of tokens fed.
    """
    tables = []
    batches = _batches(lengths, num_documents, batch_tokens)
    for taken, scored in ranks.in_turn(batches, lambda batch: _score_batch(score, stream, batch)):
        tables += scored
        advance(sum(len(batch.documents) * batch.length for batch in taken))
    return concatenate(tables)


@dataclass(frozen=True)
class _Batch:
    """Documents of one length, the tokens of each a window of its own."""

    length: int
    documents: np.ndarray
    windows: np.ndarray


def _batches(lengths: Sequence[int], num_documents: int, batch_tokens: int) -> Iterator[_Batch]:
    for place, length in enumerate(lengths):
        rows = max(1, batch_tokens // length)
        for first in range(0, num_documents, rows):
            documents = np.arange(first, min(first + rows, num_documents))
            yield _Batch(length, documents, place * num_documents + documents)


def _score_batch(score: HitFunction, stream: RecallStream, batch: _Batch) -> RecallTable:
    """Its answers, document after document."""
    length, documents = batch.length, batch.documents
    all_tokens, all_depths = zip(*(stream.document(i, length) for i in documents), strict=True)
    scored, tokens, depth = stream.scored(0, length), np.stack(all_tokens), np.concatenate(all_depths)
    inputs, targets = tokens[:, :-1].copy(), np.full_like(tokens[:, 1:], NOT_SCORED)
    targets[:, scored] = tokens[:, 1:][:, scored]
    nll, hits = score(torch.from_numpy(inputs), torch.from_numpy(targets)).float().cpu().numpy()
    position = np.arange(1, length + 1)[scored]
    num_answers, count = len(position), len(depth)
    return RecallTable(
        purpose=np.full(count, PURPOSES.index(RECALL), np.int8),
        length=np.full(count, length, np.int32),
        window=np.repeat(batch.windows, num_answers).astype(np.int32),
        document=np.repeat(documents, num_answers).astype(np.int32),
        position=np.tile(position, len(documents)).astype(np.int32),
        context=np.tile(position, len(documents)).astype(np.int32),
        offset=np.zeros(count, np.int64),
        bytes=np.zeros(count, np.int32),
        nll=nll[:, scored].ravel(),
        correct=hits[:, scored].ravel() > 0,
        depth=depth,
    )


def recall_at_length(table: RecallTable) -> dict[int, Recall]:
    """Score the answers of each length."""
    return {length: _summarize(table.of(RECALL, length)) for length in table.lengths(RECALL)}


def recall_by_depth(table: RecallTable) -> dict[tuple[int, int], Recall]:
    """Score the answers of each length by the tenth in which they were said, (length, 0) to (length, 9).

    A tenth without answers is left out.
    """
    tenths = np.minimum((table.depth * NUM_DEPTHS).astype(int), NUM_DEPTHS - 1)
    return {
        (length, tenth): _summarize(table.where(chosen))
        for length in table.lengths(RECALL)
        for tenth in range(NUM_DEPTHS)
        if (chosen := (table.length == length) & (tenths == tenth)).any()
    }


def _summarize(table: RecallTable) -> Recall:
    return Recall(int(table.correct.sum()), len(table), float(table.nll.sum(dtype=np.float64)))
