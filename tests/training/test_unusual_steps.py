"""Faults are kept with their samples and replayed to the row and the layer; spikes and skips are told, a step late."""

import csv
import dataclasses
import errno
import io
import math
import os
from functools import partial

import pytest
import torch
from rich.console import Console
from tiny_training import ADAMW, CPU, ROWS, Steps, StopAt, batch_of, make_module, make_trainer, nll, weights

from flashtrain.errors import UserError
from flashtrain.training.loggers import CsvLogger
from flashtrain.training.replay import read_fault, replay
from flashtrain.training.spikes import FEWEST, Spikes

NUM_STEPS = 40


def with_rows(step, batch):
    """Row r of step k is called 100 k + r."""
    return batch | {"rows": 100 * step + torch.arange(ROWS)}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Faults


def fit_to_a_fault(folder, spoil, **changes):
    """The sentence, and what was saved of the fault in step 7."""

    def edit(step, batch):
        batch = with_rows(step, batch)
        return spoil(batch) if step == 6 else batch

    module = make_module(NUM_STEPS, fault_folder=folder / "faults", **changes)
    with pytest.raises(UserError) as told:
        make_trainer(folder, NUM_STEPS).fit(module, datamodule=Steps(NUM_STEPS, edit))
    return str(told.value), read_fault(folder / "faults" / "step-7.pt"), module


def row_without_targets(batch, places):
    batch["labels"][places] = -100
    return batch


class Poisoned(torch.nn.Module):
    """NaN where token 5 is the first of a row; the identity elsewhere."""

    def forward(self, x_BSC, tokens_BS):
        return torch.where((tokens_BS[:, :1] == 5)[..., None], torch.nan, x_BSC)


def poison(module):
    forward, poisoned = module.model.forward, Poisoned()
    module.model.poisoned = poisoned
    module.model.forward = lambda tokens, documents=None: poisoned(forward(tokens), tokens)


def test_the_rows_of_the_micro_batches_that_are_not_finite_are_named_and_all_is_kept(tmp_path):
    calls = []

    def sum_nll(hidden, weight, targets):
        calls.append(None)
        return nll(hidden, weight, targets, reduction="sum") * (math.nan if len(calls) == 6 * 3 + 2 else 1.0)

    module = make_module(NUM_STEPS, micro_batch_rows=3, fault_folder=tmp_path / "faults")
    module._sum_nll = sum_nll
    with pytest.raises(UserError, match="^step 7: .* NaN or Inf in rows 603, 604, 605 of the training tokens, so the"):
        make_trainer(tmp_path, NUM_STEPS).fit(module, datamodule=Steps(NUM_STEPS, with_rows))
    fault = read_fault(tmp_path / "faults" / "step-7.pt")
    assert fault["step"] == 7 and fault["batch"].keys() == {"inputs", "labels", "rows"}
    assert torch.equal(fault["batch"]["inputs"], batch_of(6)["inputs"])
    for name, tensor in weights(module).items():
        assert torch.equal(fault["weights"][name], tensor)


def test_many_rows_are_said_in_short(tmp_path):
    told, _, _ = fit_to_a_fault(tmp_path, lambda batch: row_without_targets(batch, slice(None)))
    assert "in rows 600, 601, 602, 603, 604, 605, 606, 607 of the training tokens" in told


def test_a_replay_finds_the_row_and_the_layer(tmp_path):
    module = make_module(NUM_STEPS, fault_folder=tmp_path / "faults")
    poison(module)

    def edit(step, batch):
        batch = with_rows(step, batch)
        batch["inputs"][:, 0] = torch.where(batch["inputs"][:, 0] == 5, 6, batch["inputs"][:, 0])
        if step == 6:
            batch["inputs"][4, 0] = 5
        return batch

    with pytest.raises(UserError, match="^step 7: "):
        make_trainer(tmp_path, NUM_STEPS).fit(module, datamodule=Steps(NUM_STEPS, edit))
    fault = read_fault(tmp_path / "faults" / "step-7.pt")
    again = make_module(NUM_STEPS)
    poison(again)
    again.model.load_state_dict(fault["weights"])
    outcomes = list(replay(again.model, partial(nll, reduction="sum"), fault["batch"], CPU.autocast))
    assert [outcome.place for outcome in outcomes if not outcome.finite] == [4]
    assert outcomes[4].module == "poisoned" and outcomes[4].gradients == ["embedding.weight"]
    assert all(0 < outcome.loss < 20 for outcome in outcomes if outcome.finite)
    assert all(parameter.grad is None for parameter in again.model.parameters())


def test_a_fault_whose_file_cannot_be_written_is_told_all_the_same(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    module = make_module(NUM_STEPS, fault_folder=tmp_path / "faults")
    with pytest.raises(UserError, match=r"^step 7: .* NaN or Inf.*; its inputs are not saved \(cannot write .*; look"):
        make_trainer(tmp_path, NUM_STEPS, checkpoint_every=1000).fit(
            module,
            datamodule=Steps(
                NUM_STEPS, lambda step, batch: row_without_targets(batch, slice(None)) if step == 6 else batch
            ),
        )


# Spikes and skips


def test_a_spike_is_far_above_what_came_before():
    spikes = Spikes()
    noise = [0.01 * (step % 3) for step in range(3 * FEWEST)]
    assert [spikes.expected(3.0 + x) for x in noise] == 3 * FEWEST * [None]
    assert spikes.expected(3.1) is None
    assert spikes.expected(3.5) == pytest.approx(3.01, abs=0.01)
    falling = Spikes()
    assert [falling.expected(10 * 0.98**step) for step in range(200)] == 200 * [None]
    early = Spikes()
    assert [early.expected(loss) for loss in (3.0, 3.0, 30.0)] == 3 * [None]


@pytest.mark.parametrize("resumed", [False, True], ids=["in-one-go", "resumed-just-before"])
def test_a_spike_is_told_with_its_rows_and_logged(resumed, tmp_path):
    def edit(step, batch):
        batch = with_rows(step, batch)
        if step == 115:  # labels from nowhere
            batch["labels"] = batch["labels"].flip(0, 1)
        return batch

    def fit(callbacks, checkpoint):
        loggers = [CsvLogger(tmp_path)]
        trainer = make_trainer(
            tmp_path, 120, console=Console(file=file), loggers=loggers, log_every=1, callbacks=callbacks
        )
        trainer.fit(make_module(120), datamodule=Steps(120, edit), ckpt_path=checkpoint)

    file, checkpoint = io.StringIO(), None
    if resumed:
        fit([StopAt(113)], None)
        checkpoint = tmp_path / "checkpoints/last.ckpt"
    fit([], checkpoint)
    [spike] = rows(tmp_path / "spike.csv")
    of_the_step = rows(tmp_path / "train.csv")[115]
    assert spike["step"] == of_the_step["step"] == "116" and spike["loss"] == of_the_step["loss"]
    assert float(spike["loss"]) > float(spike["expected"]) + 0.1
    said = (
        f"step 116/120  loss spike: {float(spike['loss']):.4f}, where {float(spike['expected']):.4f} was usual in rows "
    )
    assert said + "11500, 11501, 11502, 11503, 11504, 11505, 11506, 11507 of the training tokens\n" in file.getvalue()


def test_each_skipped_step_is_told(tmp_path):
    file = io.StringIO()
    module = make_module(NUM_STEPS, optimizer=dataclasses.replace(ADAMW, skip_norm=20.0))
    calls = []

    def sum_nll(hidden, weight, targets):
        calls.append(None)
        return nll(hidden, weight, targets, reduction="sum") * (1e3 if len(calls) in (4, 9) else 1.0)

    module._sum_nll = sum_nll
    make_trainer(tmp_path, NUM_STEPS, console=Console(file=file)).fit(module, datamodule=Steps(NUM_STEPS))
    told = [line for line in file.getvalue().splitlines() if "skipped" in line]
    assert [line.split("  skipped: gradient norm ")[0] for line in told] == ["step 4/40", "step 9/40"]
    assert [line.split("; ")[1] for line in told] == ["1 skipped so far", "2 skipped so far"]
