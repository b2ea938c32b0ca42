"""How Lightning's Trainer is set up so that it counts steps: one epoch whose batches are optimizer steps."""

import warnings
from collections.abc import Mapping, Sequence

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from rich.console import Console

from flashtrain.ranks import Ranks, silence_lightning
from flashtrain.training.callbacks import Reporter, StopOnSignal
from flashtrain.training.checkpoint import AtomicCheckpointIO, Checkpoints
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.profiler import DataWait
from flashtrain.training.progress import choose_display
from flashtrain.training.replicas import Replicas
from flashtrain.training.spikes import UnusualSteps


def build_trainer(
    *,
    device_type: str,
    ranks: Ranks,
    num_steps: int,
    validate_every: int | None,
    log_every: int,
    checkpoints: Checkpoints | None,
    loggers: list[Logger],
    meter: SpeedMeter,
    flops_per_token: Mapping[str, float],
    peak_flops: float | None,
    callbacks: Sequence[Callback],
    console: Console,
) -> Trainer:
    """Return a trainer for a `TrainingModule` of `num_steps` steps and a data module that gives whole steps.

    Args:
        device_type: "cpu", or "cuda" for a GPU on each rank.
        validate_every, log_every: in optimizer steps; the last step always has both. None for no validation.
        checkpoints: what is kept, and when; None for nothing.
        flops_per_token: name of an MFU in the logs -> its count of FLOPs; used where `peak_flops`, of all ranks
            together, is known.
        callbacks: of this run, beside those that all runs have.
    """
    _silence()
    display = choose_display(console)
    return Trainer(
        accelerator=device_type,
        devices=ranks.per_machine,
        num_nodes=ranks.machines,
        strategy="auto" if ranks.world_size == 1 else Replicas(device_type),
        max_epochs=1,
        check_val_every_n_epoch=None,
        val_check_interval=validate_every or num_steps,
        limit_val_batches=1.0 if validate_every else 0,
        log_every_n_steps=1,  # of no effect, the Reporter logs; the default brings a warning in short runs
        num_sanity_val_steps=0,
        callbacks=[
            Reporter(
                meter,
                display,
                num_steps=num_steps,
                log_every=log_every,
                flops_per_token=flops_per_token,
                peak_flops=peak_flops,
            ),
            UnusualSteps(display),
            StopOnSignal(),
            *callbacks,
            *([] if checkpoints is None else [checkpoints]),
        ],
        enable_checkpointing=checkpoints is not None,
        logger=loggers,
        profiler=DataWait(meter),
        plugins=[AtomicCheckpointIO()],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _silence() -> None:
    """Turn off Lightning's advice that does not apply here."""
    silence_lightning()
    for message in (
        "You're resuming from a checkpoint that ended before the epoch ended",  # the data starts at its step
        "The '.*_dataloader' does not have many workers",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "`broadcast_buffers` is deprecated",  # by what torch 2.11 does not have
    ):
        warnings.filterwarnings("ignore", message=message)
