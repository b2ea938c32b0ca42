"""A step is one update on the mean over all its targets; a NaN or Inf never reaches the weights."""

import copy
import csv
import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from tiny_training import (
    ADAMW,
    COSINE,
    GPU,
    MUON,
    ROWS,
    VOCAB,
    Steps,
    assert_same_weights,
    batch_of,
    make_module,
    make_trainer,
    nll,
    weights,
)
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from flashtrain.errors import UserError
from flashtrain.training.checkpoint import read_checkpoint
from flashtrain.training.loggers import CsvLogger
from flashtrain.training.optim import build_optimizer
from flashtrain.training.schedule import learning_rate_factor

NUM_STEPS = 12

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
each_optimizer = pytest.mark.parametrize("options", [ADAMW, MUON], ids=lambda options: options.name)


class History(Callback):
    """The outputs, weights and optimizer state after every step."""

    def __init__(self):
        self.outputs, self.weights, self.moments = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.outputs.append(outputs)
        self.weights.append(weights(pl_module))
        self.moments.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))


def fit(tmp_path, module, data, num_steps=NUM_STEPS, **changes):
    history = History()
    trainer = make_trainer(tmp_path, num_steps, callbacks=[history], **changes)
    trainer.fit(module, datamodule=data)
    return history


def with_ignored(step, batch):
    return batch_of(step, ignored=0.6)


@each_optimizer
def test_a_step_is_what_plain_pytorch_does(tmp_path, options):
    module = make_module(NUM_STEPS, micro_batch_rows=3, optimizer=options)
    model = copy.deepcopy(module.model)
    history = fit(tmp_path, module, Steps(NUM_STEPS, with_ignored))

    optimizer = build_optimizer(model, options)
    for step in range(NUM_STEPS):
        batch = batch_of(step, ignored=0.6)
        logits = model(batch["inputs"]) @ model.head_weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), options.clip_norm)
        factor = learning_rate_factor(step, NUM_STEPS, COSINE)
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        optimizer.step()
        optimizer.zero_grad()
        for name, peak in options.learning_rates().items():
            assert history.outputs[step][name] == factor * peak
        torch.testing.assert_close(history.outputs[step]["loss"], loss.detach())
        torch.testing.assert_close(history.outputs[step]["grad_norm"], norm)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(module.model.state_dict()[name], tensor, msg=name)


@each_optimizer
def test_a_step_counts_once(tmp_path, options):
    class Counts(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert trainer.global_step == batch_idx + 1

    trainer = make_trainer(tmp_path, NUM_STEPS, callbacks=[Counts()])
    trainer.fit(make_module(NUM_STEPS, micro_batch_rows=3, optimizer=options), datamodule=Steps(NUM_STEPS))
    assert trainer.global_step == NUM_STEPS


def test_each_kind_of_parameters_has_its_learning_rate_in_the_log(tmp_path):
    fit(tmp_path, make_module(NUM_STEPS, optimizer=MUON), Steps(NUM_STEPS), loggers=[CsvLogger(tmp_path)])
    with (tmp_path / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        ratio = float(row["matrix_learning_rate"]) / float(row["learning_rate"])
        assert ratio == pytest.approx(MUON.matrix_learning_rate / MUON.learning_rate)


@pytest.mark.parametrize("micro_batch_rows", [1, 3, 7], ids="micro{}".format)
def test_transformers_34191_micro_batches_do_not_change_the_step(tmp_path, micro_batch_rows):
    losses = []
    for rows in (ROWS, micro_batch_rows):
        module = make_module(NUM_STEPS, micro_batch_rows=rows)
        history = fit(tmp_path, module, Steps(NUM_STEPS, with_ignored))
        losses.append(torch.stack([outputs["loss"] for outputs in history.outputs]))
    torch.testing.assert_close(losses[0], losses[1])


def test_documents_go_with_their_rows_and_none_without(tmp_path):
    fed = []

    def with_documents(step, batch):
        return batch | {"documents": batch["inputs"].int()}

    for edit in (with_documents, lambda step, batch: batch):
        module = make_module(1, micro_batch_rows=3)
        module.model.register_forward_hook(lambda _, arguments, __: fed.append(arguments))
        fit(tmp_path, module, Steps(1, edit), num_steps=1)
    training = [arguments for arguments in fed if len(arguments[0]) < ROWS]
    assert [len(inputs) for inputs, _ in training] == 2 * [3, 3, 2]
    for inputs, documents in training[:3]:
        assert torch.equal(documents, inputs.int())
    assert [documents for _, documents in training[3:]] == 3 * [None]


@each_optimizer
def test_the_gradient_is_clipped_to_the_norm_and_null_leaves_it(tmp_path, options):
    class UsedNorms(Callback):
        """The norm of the gradient that the optimizer took."""

        def on_train_start(self, trainer, pl_module):
            self.norms = []
            trainer.optimizers[0].register_step_post_hook(
                lambda *_: self.norms.append(get_total_norm([p.grad for p in pl_module.parameters()]))
            )

    for clip_norm in (0.1, None):
        module = make_module(2, optimizer=dataclasses.replace(options, clip_norm=clip_norm))
        history, used = History(), UsedNorms()
        make_trainer(tmp_path, 2, callbacks=[history, used]).fit(module, datamodule=Steps(2))
        for outputs, norm in zip(history.outputs, used.norms, strict=True):
            assert outputs["grad_norm"] > 0.1
            torch.testing.assert_close(norm, torch.tensor(clip_norm) if clip_norm else outputs["grad_norm"])


# Faults


def empty_from(first, *others):
    """Steps (from 0) without a single target: their loss is 0 / 0."""
    bad = {first, *others}

    def edit(step, batch):
        if step in bad:
            batch["labels"][:] = -100
        return batch

    return edit


@each_optimizer
@pytest.mark.parametrize("step", [1, 7, NUM_STEPS], ids=["first-step", "between", "last-step"])
def test_nan_loss_never_reaches_the_weights_and_names_its_step(tmp_path, step, options):
    module, history = make_module(NUM_STEPS, optimizer=options), History()
    before = weights(module)
    trainer = make_trainer(tmp_path, NUM_STEPS, callbacks=[history], checkpoint_every=1)
    with pytest.raises(UserError, match=f"^step {step}: the loss or the gradient is NaN or Inf"):
        trainer.fit(module, datamodule=Steps(NUM_STEPS, empty_from(step - 1)))
    good = history.weights[step - 2] if step > 1 else before
    assert_same_weights(weights(module), good)
    assert all(torch.isfinite(tensor).all() for tensor in weights(module).values())
    if step > 1:
        for name, state in history.moments[step - 2].items():
            for key, value in state.items():
                assert torch.equal(value, history.moments[step - 1][name][key]), (name, key)
        assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == step - 1


@each_optimizer
def test_good_steps_after_a_fault_do_not_reach_the_weights_either(tmp_path, options):
    module, history = make_module(NUM_STEPS, optimizer=options), History()
    trainer = make_trainer(tmp_path, NUM_STEPS, callbacks=[history], checkpoint_every=1000)
    with pytest.raises(UserError, match="^step 5: "):
        trainer.fit(module, datamodule=Steps(NUM_STEPS, empty_from(4)))
    assert len(history.weights) == 5  # step 6 was under way when the flag of step 5 was read
    assert_same_weights(weights(module), history.weights[3])


def test_a_fault_is_found_before_validation_and_no_checkpoint_is_written(tmp_path):
    module = make_module(NUM_STEPS)
    trainer = make_trainer(tmp_path, NUM_STEPS, validate_every=6, checkpoint_every=1000)
    with pytest.raises(UserError, match="^step 6: "):
        trainer.fit(module, datamodule=Steps(NUM_STEPS, empty_from(5)))
    assert not module.validation_metrics and not (tmp_path / "checkpoints").exists()


@each_optimizer
def test_inf_gradient_of_a_finite_loss_is_a_fault(tmp_path, options):
    calls = []

    def sum_nll(hidden, weight, targets):
        calls.append(None)
        total = nll(hidden, weight, targets, reduction="sum")
        return total + (hidden.sum() * 0).sqrt() if len(calls) == 3 else total  # d sqrt(0) is Inf

    module = make_module(NUM_STEPS, optimizer=options)
    module._sum_nll = sum_nll
    with pytest.raises(UserError, match="^step 3: "):
        fit(tmp_path, module, Steps(NUM_STEPS))
    assert all(torch.isfinite(tensor).all() for tensor in weights(module).values())


# Waiting


class HostReads(TorchDispatchMode):
    """Notes operations whose result the host must know: on a GPU each of them waits for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in function.name() for word in self.WAITING):
            self.reads.append((function.name(), args[0].data_ptr()))
        return function(*args, **kwargs or {})


@each_optimizer
def test_a_step_reads_nothing_but_the_late_flag(tmp_path, options):
    class Spy(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            self.mode = HostReads()
            self.mode.__enter__()

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.mode.__exit__(None, None, None)
            late_flag = ("aten::_local_scalar_dense", pl_module._fault._on_host.data_ptr())
            assert self.mode.reads == [late_flag] * (trainer.global_step > 1)  # step 1 has none before it

    trainer = make_trainer(tmp_path, 4, callbacks=[Spy()])
    trainer.fit(make_module(4, micro_batch_rows=3, optimizer=options), datamodule=Steps(4))


@pytest.mark.gpu
@needs_gpu
@each_optimizer
def test_a_step_never_waits_for_the_gpu(tmp_path, options):
    class Strict(Callback):
        def on_train_batch_start(self, *_):
            torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    trainer = make_trainer(tmp_path, 6, callbacks=[Strict()], device_type="cuda")
    module = make_module(6, micro_batch_rows=3, optimizer=options, device=GPU)
    trainer.fit(module, datamodule=Steps(6))
    assert trainer.global_step == 6


@pytest.mark.gpu
@needs_gpu
@each_optimizer
def test_nan_loss_on_the_gpu_names_its_step(tmp_path, options):
    module, history = make_module(NUM_STEPS, optimizer=options, device=GPU), History()
    trainer = make_trainer(tmp_path, NUM_STEPS, callbacks=[history], device_type="cuda")
    with pytest.raises(UserError, match="^step 7: "):
        trainer.fit(module, datamodule=Steps(NUM_STEPS, empty_from(6)))
    assert_same_weights(weights(module.cuda()), history.weights[5])


# Compilation


def test_compiling_in_place_renames_nothing_in_a_checkpoint(tmp_path):
    module = make_module(NUM_STEPS)
    module.model.compile(backend="eager")
    fit(tmp_path, module, Steps(NUM_STEPS))
    checkpoint = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert checkpoint["state_dict"].keys() == make_module(NUM_STEPS).state_dict().keys()


# Validation


def test_validation_is_weighted_by_targets_and_bits_per_byte_leaves_special_tokens_out(tmp_path):
    bytes_per_token = torch.arange(VOCAB) % 4  # every fourth token is special
    module, data = make_module(NUM_STEPS, bytes_per_token=bytes_per_token), Steps(NUM_STEPS)
    fit(tmp_path, module, data)
    nlls, targets = [], []
    for batch in data.val_dataloader():
        with torch.no_grad():
            hidden = module.model(batch["inputs"]).flatten(0, 1)
            each = partial(nll, reduction="none")(hidden, module.model.head_weight, batch["labels"].flatten())
        scored = batch["labels"].flatten() != -100
        nlls.append(each[scored].double())
        targets.append(batch["labels"].flatten()[scored])
    nlls, num_bytes = torch.cat(nlls), bytes_per_token[torch.cat(targets)]
    assert module.validation_metrics["val/loss"] == pytest.approx(nlls.mean().item(), rel=1e-9)
    expected = nlls[num_bytes > 0].sum().item() / (math.log(2) * num_bytes.sum().item())
    assert module.validation_metrics["val/bits_per_byte"] == pytest.approx(expected, rel=1e-9)


def test_validating_alone_gives_the_same_numbers_and_writes_nothing(tmp_path):
    module = make_module(NUM_STEPS)
    fit(tmp_path, module, Steps(NUM_STEPS))
    expected = dict(module.validation_metrics)
    trainer = make_trainer(tmp_path / "other", NUM_STEPS)
    trainer.validate(make_module(NUM_STEPS, seed=1), datamodule=Steps(NUM_STEPS), verbose=False)
    again = make_module(NUM_STEPS, seed=1)
    trainer.validate(
        again, datamodule=Steps(NUM_STEPS), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", verbose=False
    )
    assert again.validation_metrics == expected
    assert not (tmp_path / "other").exists()
