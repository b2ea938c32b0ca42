"""The real model, head and data in the training loop: they fit together, learn, and resume bit for bit."""

import multiprocessing
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import ADAMW, COSINE, StopAt, assert_same_weights, make_trainer, weights

from flashtrain.data.corpus import Corpus, TokenStream
from flashtrain.data.datamodule import StepDataModule
from flashtrain.kernels.attention import attention
from flashtrain.model.gpt import GPT
from flashtrain.model.head import summed_cross_entropy, token_nll
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions
from flashtrain.training.module import TrainingModule

NUM_STEPS, LENGTH, ROWS, VOCAB, PREFIX = 40, 32, 8, 257, 256
OPTIONS = ModelOptions(
    name="tiny",
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=None,
    norm="rmsnorm",
    norm_eps=1e-5,
    positions="rope",
    max_positions=None,
    rope=RopeOptions("default", 10000.0),
    mlp="swiglu",
    mlp_hidden_size=None,
    bias=False,
    qk_norm=True,
    windows=None,
    attention_softcap=None,
    tie_embeddings=True,
    vocab_size=VOCAB,
)


def stream(num_tokens, seed):
    words = np.random.default_rng(7).integers(97, 123, size=(20, 6))
    text = words[np.random.default_rng(seed).integers(0, 20, size=num_tokens // 6 + 1)].ravel()[:num_tokens]
    offsets = np.array([*range(0, num_tokens, 50), num_tokens])
    text[offsets[:-1]] = PREFIX
    return TokenStream(text.astype(np.uint16), offsets, num_tokens)


class Seen(Callback):
    """The inputs and the loss of every step."""

    def __init__(self):
        self.batches, self.losses = {}, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self.batches[trainer.global_step], self.losses[trainer.global_step] = batch["inputs"], outputs["loss"].item()


class SignalAll(Callback):
    """Sends SIGINT and SIGTERM to the processes that read data, and then one of them to this one, at step `step`."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGINT)
                os.kill(worker.pid, signal.SIGTERM)
            os.kill(os.getpid(), self.number)


def run(
    folder, stop_at=None, resume=False, isolate_documents=False, callbacks=(), seed=3, micro_batch_rows=3, num_workers=0
):
    torch.manual_seed(seed)
    model = GPT(OPTIONS, partial(attention, variant="standard"))
    head = {"vocab_size": VOCAB, "chunk_size": 50}
    module = TrainingModule(
        model,
        partial(summed_cross_entropy, **head),
        partial(token_nll, **head),
        bytes_per_token=torch.tensor([1] * 256 + [0]),
        optimizer=ADAMW,
        schedule=COSINE,
        num_steps=NUM_STEPS,
        micro_batch_rows=micro_batch_rows,
    )
    corpus = Corpus("0", "0", "made-up words", "bytes", 0, 0, None, stream(6_000, seed=0), stream(1_000, seed=1))
    data = StepDataModule(
        corpus,
        sequence_length=LENGTH,
        rows_per_step=ROWS,
        num_steps=NUM_STEPS,
        seed=5,
        validation_rows=16,
        validation_batch_rows=4,
        isolate_documents=isolate_documents,
        num_workers=num_workers,
    )
    trainer = make_trainer(folder, NUM_STEPS, checkpoint_every=1000, callbacks=[StopAt(stop_at), *callbacks])
    ckpt = folder / "checkpoints" / "last.ckpt" if resume else None
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return module, trainer


@pytest.fixture(scope="module")
def seen():
    """What `straight` saw."""
    return Seen()


@pytest.fixture(scope="module")
def straight(tmp_path_factory, seen):
    return run(tmp_path_factory.mktemp("straight"), callbacks=[seen])


def test_it_learns(straight):
    module, trainer = straight
    assert trainer.global_step == NUM_STEPS
    assert module.validation_metrics["val/bits_per_byte"] < 0.6 * np.log2(VOCAB)


@pytest.mark.parametrize("stop_at", [20, 27])
def test_train_40_is_train_some_stop_and_resume(straight, tmp_path, stop_at):
    # 187 rows of text, 320 in 40 steps of 8: the order crosses an epoch's edge between the two stops.
    stopped, trainer = run(tmp_path, stop_at=stop_at)
    assert stopped.stop_requested and trainer.global_step == stop_at
    resumed, trainer = run(tmp_path, resume=True)
    assert trainer.global_step == NUM_STEPS
    assert_same_weights(weights(resumed), weights(straight[0]))
    assert resumed.validation_metrics == straight[0].validation_metrics


def run_in_legs(folder, legs):
    """Run to the stop of each leg (None: the end) with its settings, from the checkpoint of the one before; what was
    random in a process is different in each. Returns what all saw, and the last module."""
    total = Seen()
    for number, (stop_at, settings) in enumerate(legs):
        seen, start = Seen(), len(total.batches)
        stop = () if stop_at is None else [SignalAll(stop_at, (signal.SIGINT, signal.SIGTERM)[number % 2])]
        module, trainer = run(folder, resume=number > 0, seed=3 + number, callbacks=[seen, *stop], **settings)
        assert list(seen.batches) == list(range(start + 1, (stop_at or NUM_STEPS) + 1))
        assert not multiprocessing.active_children()
        total.batches |= seen.batches
        total.losses |= seen.losses
    return total, module


def assert_same_batches(first, second):
    assert first.batches.keys() == second.batches.keys()
    assert all(torch.equal(batch, second.batches[step]) for step, batch in first.batches.items())


def test_three_resumes_with_other_numbers_of_workers_over_an_epochs_edge_are_one_run(straight, seen, tmp_path):
    legs = [(11, {"num_workers": 2}), (23, {}), (25, {"num_workers": 1}), (None, {})]  # the edge is within step 24
    legged, module = run_in_legs(tmp_path, legs)
    assert_same_batches(legged, seen)
    assert legged.losses == seen.losses
    assert_same_weights(weights(module), weights(straight[0]))
    assert module.validation_metrics == straight[0].validation_metrics


def test_resumed_with_other_micro_batches_takes_the_same_batches_to_the_same_losses(straight, seen, tmp_path):
    legged, _ = run_in_legs(tmp_path, [(23, {"micro_batch_rows": 8}), (30, {"micro_batch_rows": 2}), (None, {})])
    assert_same_batches(legged, seen)
    # Sums in another order differ by float32's rounding, 6e-8, which 40 steps of training carry on.
    assert legged.losses == pytest.approx(seen.losses, rel=1e-5)


def test_with_documents_apart_validation_scores_each_as_if_alone(straight, tmp_path):
    module, _ = run(tmp_path, isolate_documents=True)
    tokens, total, count = stream(1_000, seed=1).tokens.astype(np.int64), 0.0, 0
    for row in np.arange(16) * 31 // 16:  # 31 rows of text, of which 16 are scored
        row_tokens = tokens[row * LENGTH : (row + 1) * LENGTH + 1]
        for piece in np.split(row_tokens, np.flatnonzero(row_tokens[1:] == PREFIX) + 1):
            inputs, targets = torch.from_numpy(piece[:-1]), torch.from_numpy(piece[1:])
            with torch.no_grad():
                hidden = module.model(inputs[None])[0]
            total += token_nll(hidden, module.model.head_weight, targets, VOCAB, chunk_size=50).double().sum().item()
            count += len(targets)
    assert count < 16 * LENGTH
    # Shorter matrix products sum in another order, which float32 rounds at 6e-8 of the loss.
    assert module.validation_metrics["val/loss"] == pytest.approx(total / count, rel=1e-6)
    assert module.validation_metrics["val/loss"] != straight[0].validation_metrics["val/loss"]
