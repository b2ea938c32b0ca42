"""Each precision trains in the dtypes that it says; float16's overflows are skipped, counted, and resumed with."""

import copy
import csv
import dataclasses
import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from tiny_training import (
    ADAMW,
    MUON,
    Steps,
    StopAt,
    assert_same_weights,
    make_module,
    make_trainer,
    nll,
    weights,
)
from torch.nn.utils import get_total_norm

from flashtrain.device import PRECISIONS, Device
from flashtrain.errors import UserError
from flashtrain.training import scaling
from flashtrain.training.checkpoint import read_checkpoint
from flashtrain.training.loggers import CsvLogger

NUM_STEPS = 12
FIRST_SCALE = 2.0**8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

each_optimizer = pytest.mark.parametrize("options", [ADAMW, MUON], ids=lambda options: options.name)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def scale(monkeypatch):
    """One at which this small model overflows in no step that is not spoiled."""
    monkeypatch.setattr(scaling, "FIRST_SCALE", FIRST_SCALE)


def device(name, kind="cpu"):
    return Device(kind, PRECISIONS[name], compile=False)


class History(Callback):
    """Of every step: the outputs, as numbers, the weights after it, and the norm of the gradient that was used."""

    def __init__(self):
        self.outputs, self.weights, self.norms = [], [], []

    def on_train_start(self, trainer, pl_module):
        trainer.optimizers[0].register_step_post_hook(
            lambda *_: self.norms.append(get_total_norm([p.grad for p in pl_module.parameters()]).item())
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.outputs.append({name: float(value) for name, value in outputs.items()})
        self.weights.append(weights(pl_module))


def fit(folder, precision, *, num_steps=NUM_STEPS, callbacks=(), ckpt=None, edit=None, kind="cpu", **changes):
    trainer_changes = {name: changes.pop(name) for name in ("loggers", "log_every") if name in changes}
    module, history = make_module(num_steps, device=device(precision, kind), **changes), History()
    if edit is not None:
        module._sum_nll = edit
    trainer = make_trainer(folder, num_steps, callbacks=[history, *callbacks], device_type=kind, **trainer_changes)
    trainer.fit(module, datamodule=Steps(num_steps), ckpt_path=ckpt)
    return module, history


def spoiled(*steps, factor=1e6):
    """A loss whose gradient has `factor` within, beyond float16 where it is scaled, in these steps (from 1)."""
    calls = []

    def sum_nll(hidden, weight, targets):
        calls.append(None)
        if len(calls) in steps:
            hidden = _Grown.apply(hidden, factor)
        return nll(hidden, weight, targets, reduction="sum")

    return sum_nll


class _Grown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


# Every precision


@each_optimizer
@pytest.mark.parametrize(
    ("name", "kept", "computed"),
    [("fp32", FP32, FP32), ("bf16", FP32, BF16), ("fp16", FP32, FP16), ("bf16-true", BF16, BF16)],
)
def test_what_is_kept_and_what_is_computed_in_which_dtype(tmp_path, name, kept, computed, options):
    class Dtypes(Callback):
        def on_train_start(self, trainer, pl_module):
            self.computed, self.gradients = set(), set()
            pl_module.model.mix.register_forward_hook(lambda _, __, output: self.computed.add(output.dtype))
            pl_module.model.mix.weight.register_hook(lambda gradient: self.gradients.add(gradient.dtype))

        def on_train_end(self, trainer, pl_module):
            state = trainer.optimizers[0].state.values()
            self.moments = {t.dtype for moments in state for key, t in moments.items() if key != "step"}

    dtypes = Dtypes()
    module, history = fit(tmp_path, name, callbacks=[dtypes], optimizer=options, micro_batch_rows=3)
    assert dtypes.computed == {computed}
    assert {tensor.dtype for tensor in weights(module).values()} == dtypes.gradients == dtypes.moments == {kept}
    assert history.outputs[-1]["loss"] < history.outputs[0]["loss"] - 0.5


@each_optimizer
def test_losses_are_those_of_fp32_within_the_rounding_of_each_precision(tmp_path, options):
    """A number is rounded by half of eps at most; over twelve steps losses part by less than four of them."""
    curves = {}
    for name in ("fp32", "bf16", "fp16", "bf16-true"):
        _, history = fit(tmp_path / name, name, optimizer=options, micro_batch_rows=3)
        curves[name] = torch.tensor([outputs["loss"] for outputs in history.outputs])
    for name in ("bf16", "fp16", "bf16-true"):
        eps = torch.finfo(PRECISIONS[name].products).eps
        distance = (curves[name] / curves["fp32"] - 1).abs().max()
        assert 0 < distance < 4 * eps, (name, distance.item() / eps)


@each_optimizer
@pytest.mark.parametrize("name", ["bf16", "bf16-true", "fp16"])
def test_stopped_and_resumed_is_the_same_run(tmp_path, name, options):
    """fp16 with an overflow before the stop and one behind it, which the scale and the count go on from."""
    fresh = partial(fit, precision=name, optimizer=options)
    scaled = name == "fp16"
    straight, history = fresh(tmp_path / "straight", edit=spoiled(3, 9) if scaled else None)
    fresh(tmp_path / "halves", callbacks=[StopAt(7)], edit=spoiled(3) if scaled else None)
    last = tmp_path / "halves" / "checkpoints" / "last.ckpt"
    resumed, rest = fresh(tmp_path / "halves", ckpt=last, edit=spoiled(2) if scaled else None)
    assert str(rest.outputs) == str(history.outputs[7:])  # NaN is not equal to itself
    assert_same_weights(weights(resumed), weights(straight))
    if scaled:
        assert rest.outputs[-1]["skipped_steps"] == 2 and rest.outputs[-1]["loss_scale"] == FIRST_SCALE / 4


def test_a_run_goes_on_in_another_precision(tmp_path):
    names = ["fp32", "fp16", "bf16-true", "fp16", "bf16"]
    last, ckpt, losses = tmp_path / "checkpoints" / "last.ckpt", None, []
    for part, name in enumerate(names, 1):
        _, history = fit(tmp_path, name, num_steps=30, callbacks=[StopAt(6 * part)], ckpt=ckpt)
        ckpt = last
        losses += [outputs["loss"] for outputs in history.outputs]
    assert len(losses) == 30 and losses[-1] < losses[5] < losses[0]
    assert read_checkpoint(last)["global_step"] == 30


# Loss scaling


def test_the_first_steps_find_the_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "FIRST_SCALE", 2.0**20)
    _, history = fit(tmp_path, "fp16", num_steps=20)
    skipped = [outputs["skipped_steps"] for outputs in history.outputs]
    found = int(skipped[-1])
    assert 0 < found < 10 and skipped[:found] == list(range(1, found + 1)) and skipped[found:] == (20 - found) * [found]
    assert history.outputs[-1]["loss"] < history.outputs[0]["loss"] - 0.5


def test_a_scale_changes_no_gradient_that_float16_can_hold(tmp_path):
    """Losses and norms are of unscaled numbers: within float16's rounding those of float32."""
    _, exact = fit(tmp_path / "fp32", "fp32", num_steps=1)
    _, history = fit(tmp_path / "fp16", "fp16", num_steps=1)
    assert history.outputs[0]["loss_scale"] == FIRST_SCALE
    for name in ("loss", "grad_norm"):
        assert history.outputs[0][name] == pytest.approx(exact.outputs[0][name], rel=2e-3)


@each_optimizer
def test_gradients_are_clipped_once_they_are_unscaled(tmp_path, options):
    clipped = dataclasses.replace(options, clip_norm=0.1)
    _, history = fit(tmp_path, "fp16", optimizer=clipped)
    assert min(outputs["grad_norm"] for outputs in history.outputs) > 0.1
    assert history.norms == pytest.approx(NUM_STEPS * [0.1], rel=1e-4)


@each_optimizer
def test_small_gradients_survive_that_float16_alone_would_lose(tmp_path, options):
    """What flows back is 1e-8 of itself: unscaled, float16 makes zeros of it."""
    module, history = fit(tmp_path / "scaled", "fp16", edit=spoiled(1, factor=1e-8), num_steps=1, optimizer=options)
    assert module.model.mix.weight.dtype == FP32
    unscaled, _ = fit(
        tmp_path / "unscaled", "fp16", edit=spoiled(1, factor=1e-8), num_steps=1, optimizer=options, scale_loss=False
    )
    start = make_module(1).model.norm.weight
    assert torch.equal(unscaled.model.norm.weight, start)
    assert (module.model.norm.weight != start).all()


@each_optimizer
def test_an_overflow_is_skipped_and_counted_and_halves_the_scale(tmp_path, options):
    module, history = fit(
        tmp_path, "fp16", edit=spoiled(4, 5), optimizer=options, loggers=[CsvLogger(tmp_path)], log_every=1
    )
    assert [outputs["skipped_steps"] for outputs in history.outputs] == [0, 0, 0, 1] + 8 * [2]
    scales = [outputs["loss_scale"] for outputs in history.outputs]
    assert scales == 4 * [FIRST_SCALE] + [FIRST_SCALE / 2] + 7 * [FIRST_SCALE / 4]
    assert not math.isfinite(history.outputs[3]["grad_norm"]) and math.isfinite(history.outputs[3]["loss"])
    assert_same_weights(history.weights[2], history.weights[4])
    assert all(torch.isfinite(tensor).all() for tensor in weights(module).values())
    assert history.outputs[-1]["loss"] < history.outputs[0]["loss"] - 0.5
    with (tmp_path / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["skipped_steps"]) for row in rows] == [0, 0, 0, 1] + 8 * [2]
    assert float(rows[-1]["loss_scale"]) == FIRST_SCALE / 4


@each_optimizer
def test_a_skipped_step_leaves_the_optimizer_as_it_was(tmp_path, options):
    class Moments(Callback):
        def on_train_start(self, *_):
            self.after = []

        def on_train_batch_end(self, trainer, *_):
            self.after.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))

    moments = Moments()
    fit(tmp_path, "fp16", num_steps=4, edit=spoiled(3), optimizer=options, callbacks=[moments])
    _, before, skipped, after = moments.after
    for key, state in before.items():
        assert_same_weights(state, skipped[key])
    assert any(not torch.equal(state[name], after[key][name]) for key, state in before.items() for name in state)


def test_what_no_scale_mends_is_a_fault(tmp_path):
    """After eight halvings the scale is 1."""
    with pytest.raises(UserError, match="^step 9: the loss or the gradient is NaN or Inf"):
        fit(tmp_path, "fp16", num_steps=20, edit=spoiled(*range(1, 21), factor=math.inf))


@each_optimizer
@pytest.mark.parametrize("step", [1, 5])
def test_a_loss_that_is_not_finite_is_a_fault_and_no_overflow(tmp_path, step, options):
    calls = []

    def sum_nll(hidden, weight, targets):
        calls.append(None)
        return nll(hidden, weight, targets, reduction="sum") * (math.nan if len(calls) == step else 1.0)

    with pytest.raises(UserError, match=f"^step {step}: the loss or the gradient is NaN or Inf"):
        fit(tmp_path, "fp16", edit=sum_nll, optimizer=options)


# A guard on the gradient's norm


@each_optimizer
@pytest.mark.parametrize("name", ["fp32", "bf16-true", "fp16"])
def test_a_gradient_beyond_skip_norm_is_not_applied_and_counted(tmp_path, name, options):
    guarded = dataclasses.replace(options, skip_norm=50.0)
    module, history = fit(tmp_path, name, edit=spoiled(4, factor=100.0), optimizer=guarded)
    assert 50 < history.outputs[3]["grad_norm"] < math.inf
    assert max(outputs["grad_norm"] for step, outputs in enumerate(history.outputs, 1) if step != 4) < 50
    assert [outputs["skipped_steps"] for outputs in history.outputs] == 3 * [0] + 9 * [1]
    assert_same_weights(history.weights[2], history.weights[3])
    assert not torch.equal(history.weights[3]["mix.weight"], history.weights[4]["mix.weight"])
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["guards"]["skipped_steps"] == 1


@each_optimizer
def test_inf_is_a_fault_with_a_guard_too(tmp_path, options):
    with pytest.raises(UserError, match="^step 4: the loss or the gradient is NaN or Inf"):
        fit(
            tmp_path,
            "fp32",
            edit=spoiled(4, factor=math.inf),
            optimizer=dataclasses.replace(options, skip_norm=50.0),
        )


# On a GPU


@pytest.mark.gpu
@on_gpu
@each_optimizer
@pytest.mark.parametrize("name", PRECISIONS)
def test_no_step_waits_for_the_gpu(tmp_path, name, options):
    class Strict(Callback):
        def on_train_batch_start(self, *_):
            torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    module = make_module(6, micro_batch_rows=3, optimizer=options, device=device(name, "cuda"))
    trainer = make_trainer(tmp_path, 6, callbacks=[Strict()], device_type="cuda")
    trainer.fit(module, datamodule=Steps(6))
    assert trainer.global_step == 6


@pytest.mark.gpu
@on_gpu
@each_optimizer
def test_an_overflow_on_the_gpu_is_skipped_and_counted(tmp_path, options):
    module, history = fit(tmp_path, "fp16", edit=spoiled(4, 5), optimizer=options, kind="cuda")
    assert [outputs["skipped_steps"] for outputs in history.outputs] == [0, 0, 0, 1] + 8 * [2]
    assert_same_weights(history.weights[2], history.weights[4])
    assert history.outputs[-1]["loss"] < history.outputs[0]["loss"] - 0.5


@pytest.mark.gpu
@on_gpu
def test_tf32_rounds_products_and_fp32_does_not():
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    errors = {}
    for name in ("tf32", "fp32"):
        device(name, "cuda").set_tf32()
        errors[name] = ((a.float() @ b.float()).double() - a @ b).norm() / (a @ b).norm()
    assert errors["fp32"] < 1e-6 and 1e-4 < errors["tf32"] < 1e-3
