"""A model and data small enough to train in a test, with losses in plain PyTorch."""

import itertools
import os
import signal
import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flashtrain.device import PRECISIONS, Device
from flashtrain.ranks import Ranks
from flashtrain.training.checkpoint import Checkpoints, newest_checkpoint
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.module import TrainingModule
from flashtrain.training.optim import MuonOptions, OptimizerOptions
from flashtrain.training.schedule import CosineOptions, WsdOptions
from flashtrain.training.trainer import build_trainer

VOCAB, WIDTH, ROWS, LENGTH = 32, 16, 8, 12

ADAMW = OptimizerOptions(
    name="adamw", learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0, skip_norm=None
)
MUON = MuonOptions(
    **vars(ADAMW) | {"name": "muon"}, matrix_learning_rate=2e-2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
)
CPU = Device("cpu", PRECISIONS["fp32"], compile=False)
GPU = Device("cuda", PRECISIONS["bf16"], compile=False)
COSINE = CosineOptions(name="cosine", warmup_fraction=0.1, final_fraction=0.1)
WSD = WsdOptions(name="wsd", warmup_fraction=0.1, decay_fraction=0.2, decay_shape="1-sqrt", final_fraction=0.1)


class TinyModel(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        return self.norm(F.gelu(self.mix(self.embedding(tokens_BS))))


def nll(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, reduction: str) -> Tensor:
    return F.cross_entropy(hidden_NC @ weight_VC.T, targets_N, reduction=reduction).float()


def batch_of(step: int, rows: int = ROWS, ignored: float = 0.0) -> dict[str, Tensor]:
    """The rows of a step: successors modulo VOCAB with some noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.arange(LENGTH + 1) + torch.randint(VOCAB, (rows, 1), generator=generator)
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(noise, torch.randint(VOCAB, tokens.shape, generator=generator), tokens) % VOCAB
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < ignored] = -100
    return {"inputs": tokens[:, :-1].clone(), "labels": labels}


class Steps(L.LightningDataModule):
    """Step k has `batch_of(k)`; `seen` lists the steps that were handed out, `edit` may spoil a batch."""

    start_step = 0

    def __init__(self, num_steps: int, edit=lambda step, batch: batch) -> None:
        super().__init__()
        self.num_steps, self.edit = num_steps, edit
        self.seen: list[int] = []

    def train_dataloader(self):
        return Loader(self)

    def val_dataloader(self):
        return DataLoader([batch_of(10_000 + i, ignored=0.2) for i in range(2)], batch_size=None)


class Loader:
    def __init__(self, data: Steps) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.num_steps

    def __iter__(self):
        for step in range(self.data.start_step, self.data.num_steps):
            self.data.seen.append(step)
            yield self.data.edit(step, batch_of(step))


class StopAt(L.Callback):
    """Asks for the end of training when `step` steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.stop_requested = trainer.global_step == self.step


def make_module(num_steps: int, *, micro_batch_rows=ROWS, seed=0, width=WIDTH, device=CPU, **changes) -> TrainingModule:
    torch.manual_seed(seed)
    arguments = {
        "bytes_per_token": torch.ones(VOCAB, dtype=torch.int64),
        "optimizer": ADAMW,
        "schedule": COSINE,
        "num_steps": num_steps,
        "micro_batch_rows": micro_batch_rows,
        "autocast": device.autocast,
        "scale_loss": device.dtype == torch.float16,
    }
    model = TinyModel(width).to(device.precision.weights)
    return TrainingModule(
        model, partial(nll, reduction="sum"), partial(nll, reduction="none"), **arguments | changes
    )


def make_trainer(
    folder,
    num_steps: int,
    *,
    console: Console | None = None,
    callbacks=(),
    trace=None,
    checkpoint_every=10,
    keep_last=0,
    milestone_every=None,
    **changes,
):
    arguments = {
        "device_type": "cpu",
        "ranks": Ranks(rank=0, world_size=1, local_rank=0, per_machine=1),
        "num_steps": num_steps,
        "validate_every": 10,
        "log_every": 5,
        "loggers": [],
        "meter": SpeedMeter(ROWS * LENGTH),
        "flops_per_token": {},
        "peak_flops": None,
        "callbacks": [] if trace is None else [trace],
        "console": console or Console(quiet=True),
    }
    meter = changes.get("meter", arguments["meter"])
    kept = Checkpoints(folder / "checkpoints", checkpoint_every, keep_last, milestone_every, meter)
    trainer = build_trainer(**{"checkpoints": kept, **arguments, **changes})
    trainer.callbacks[:0] = callbacks
    return trainer


class Notes(L.Callback):
    """Appends a line "step loss", in full precision, to a file when a step is done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()}\n")


def train_to_be_killed(folder: Path, num_steps: int, function: str | None, calls: int) -> None:
    """Train from the newest checkpoint, each step saved and noted in `folder`/notes; where `function` is named, as in
    "os.replace", kill this process instead of calling it for the `calls`-th time."""
    torch.set_num_threads(1)
    if function is not None:
        module, _, name = function.rpartition(".")
        original, counter = getattr(sys.modules[module], name), itertools.count(1)

        def call_or_die(*args, **kwargs):
            if next(counter) == calls:
                if function == "torch.save":
                    args[1].write(bytes(100_000))  # a part of the file, of which Python holds back some
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(sys.modules[module], name, call_or_die)
    trainer = make_trainer(folder, num_steps, checkpoint_every=1, keep_last=2, callbacks=[Notes(folder / "notes")])
    newest = newest_checkpoint(folder / "checkpoints")
    trainer.fit(make_module(num_steps), datamodule=Steps(num_steps), ckpt_path=newest)


def weights(module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.model.state_dict().items()}


def assert_same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
