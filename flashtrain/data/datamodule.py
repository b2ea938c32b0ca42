"""Rows of a corpus as the batches that Lightning sees: one training batch is one whole optimizer step.

The module that trains splits a step into micro-batches. Each rank gets its own part of a step and of the
validation rows, so the Trainer needs `use_distributed_sampler=False`.
"""

import signal
from collections.abc import Iterable, Iterator

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from flashtrain.data.corpus import Corpus, TokenStream
from flashtrain.data.order import rows_for_step
from flashtrain.data.random_tokens import RandomCorpus, RandomStream
from flashtrain.data.recall import RecallCorpus, RecallStream
from flashtrain.errors import UserError

NOT_SCORED = -100  # cross-entropy's ignore index

Stream = TokenStream | RecallStream | RandomStream

Batch = dict[str, torch.Tensor]
"""inputs and labels, each (rows, sequence_length) int64; a label is the token after its input, or `NOT_SCORED` where
the stream does not score it. With documents apart also documents, the same shape in int32: which document of its row an
input is of, never decreasing along the row; the label after a document's last input, the prefix token of the next, is
`NOT_SCORED`. rows, (rows,) int64: which of the stream's each is."""


class StepDataModule(L.LightningDataModule):
    """Training steps in the order of `rows_for_step`, and validation rows spread evenly over their stream.

    `rows_per_step` and `validation_rows` are of all ranks together; there are at most `validation_rows`.
    `isolate_documents` makes batches that say which document a token is of, in training and validation alike.
    `num_workers` processes read training steps ahead, 0 for none; the steps are the same.
    Raises UserError where a split has less than one row.
    """

    start_step: int = 0
    """The first step that the training loader gives, read whenever it starts: on resuming, the steps done."""

    def __init__(
        self,
        corpus: Corpus | RecallCorpus | RandomCorpus,
        *,
        sequence_length: int,
        rows_per_step: int,
        num_steps: int,
        seed: int,
        validation_rows: int,
        validation_batch_rows: int,
        isolate_documents: bool,
        num_workers: int,
    ) -> None:
        super().__init__()
        _require_a_row("train", corpus.train, corpus.source, sequence_length)
        _require_a_row("validation", corpus.validation, corpus.source, sequence_length)
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.rows_per_step = rows_per_step
        self.num_steps = num_steps
        self.seed = seed
        available = corpus.validation.num_rows(sequence_length)
        num_validation_rows = min(validation_rows, available)
        self.validation_rows = np.arange(num_validation_rows) * available // num_validation_rows
        self.validation_batch_rows = validation_batch_rows
        self.isolate_documents = isolate_documents
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.corpus.train, _TrainingSteps(self), self.num_workers)

    def val_dataloader(self) -> DataLoader:
        rows = self.validation_rows[self.trainer.global_rank :: self.trainer.world_size]
        size = self.validation_batch_rows
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return self._loader(self.corpus.validation, batches, num_workers=0)

    def on_before_batch_transfer(self, batch: Batch | UserError, dataloader_idx: int) -> Batch:
        """Lightning calls it in the process that trains, wherever the batch was read."""
        if isinstance(batch, UserError):
            raise batch
        return batch

    def _loader(self, stream: Stream, batches: Iterable[np.ndarray], num_workers: int) -> DataLoader:
        rows = _Rows(stream, self.sequence_length, self.isolate_documents)
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            rows,
            sampler=batches,
            batch_size=None,
            num_workers=num_workers,
            worker_init_fn=_leave_signals_to_the_trainer,
            pin_memory=on_gpu,
        )


class _Rows(Dataset):
    """Indexed by all rows of a batch at once.

    A mistake of the user is returned instead of raised, since torch wraps what a worker raises in text of its own.
    """

    def __init__(self, stream: Stream, sequence_length: int, isolate_documents: bool) -> None:
        self._stream = stream
        self._sequence_length = sequence_length
        self._isolate_documents = isolate_documents

    def __getitem__(self, rows: np.ndarray) -> Batch | UserError:
        try:
            return self._read(rows)
        except UserError as mistake:
            return mistake

    def _read(self, rows: np.ndarray) -> Batch:
        tokens = np.stack([self._stream.row(row, self._sequence_length) for row in rows]).astype(np.int64)
        labels = np.full_like(tokens[:, 1:], NOT_SCORED)
        for row, targets, row_labels in zip(rows, tokens[:, 1:], labels, strict=True):
            scored = self._stream.scored(row, self._sequence_length)
            row_labels[scored] = targets[scored]
        batch = {"inputs": tokens[:, :-1].copy(), "labels": labels, "rows": np.asarray(rows, np.int64)}
        if self._isolate_documents:
            documents = np.stack([self._stream.row_documents(row, self._sequence_length) for row in rows])
            batch["labels"][documents[:, 1:] != documents[:, :-1]] = NOT_SCORED
            batch["documents"] = documents[:, :-1].copy()
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class _TrainingSteps(Sampler):
    """The rows of each step from `start_step` on; the length counts all, as Lightning's counter does."""

    def __init__(self, data: StepDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.num_steps

    def __iter__(self) -> Iterator[np.ndarray]:
        data = self._data
        for step in range(data.start_step, data.num_steps):
            yield rows_for_step(
                step,
                seed=data.seed,
                rows_per_step=data.rows_per_step,
                num_rows=data.corpus.train.num_rows(data.sequence_length),
                rank=data.trainer.global_rank,
                world_size=data.trainer.world_size,
            )


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Let a worker outlive what a terminal or a scheduler sends to all processes; a second SIGTERM ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _require_a_row(split: str, stream: Stream, source: str, sequence_length: int) -> None:
    if stream.num_rows(sequence_length) < 1:
        raise UserError(
            f"the {split} documents of {source} have {stream.num_tokens} tokens together and a row takes "
            f"{sequence_length + 1}; lower train.sequence_length, give more text or change "
            f"data.validation_fraction"
        )
