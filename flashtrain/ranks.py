"""The ranks of a run, its processes, one a device: which of them this one is, how they start, what they tell one
another, how they end.

Lightning starts the others from the first, or torchrun starts them all; each runs the same command. A process alone
is rank 0 of one, and tells nothing and waits for nothing.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers import subprocess_script as process_observer
from torch import Tensor

from flashtrain.errors import UserError

S = TypeVar("S")
T = TypeVar("T")

SECONDS_FOR_THE_FIRST = 10.0
"""For how long other ranks leave it to the first to come to the mistake that they have found, and to end them."""

SECONDS_TO_SPEAK = 1.0
"""What a rank is given to say why it fails before it may be killed."""

LONGEST_WAIT = timedelta(days=7)
"""For how long ranks of an evaluation wait for one with a long document; one that has ended is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    """The rank among those of this machine, and the index of its GPU."""
    per_machine: int

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints, logs and writes."""
        return self.rank == 0

    @property
    def machines(self) -> int:
        return self.world_size // self.per_machine


def resolve(devices: int | None, device_type: str) -> Ranks:
    """The ranks for `devices` of each machine; None: as many as torchrun has started, or one.

    Of several on CUDA each has its GPU as the current one from here on. Raises UserError where torchrun has started
    another number, or there are not so many GPUs.
    """
    by_torchrun = dist.is_torchelastic_launched()
    started = int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun else None
    if devices is not None and started not in (None, devices):
        raise UserError(
            f"trainer.devices is {devices} and torchrun has started {started} processes on this machine; say "
            f"trainer.devices=null to take these, or torchrun --nproc-per-node={devices}"
        )
    per_machine = started or devices or 1
    if device_type == "cuda" and per_machine > torch.cuda.device_count():
        raise UserError(
            f"{per_machine} processes want a GPU each and PyTorch sees {torch.cuda.device_count()} here; "
            f"say {'torchrun --nproc-per-node' if by_torchrun else 'trainer.devices'}={torch.cuda.device_count()}"
        )
    world_size = int(os.environ["WORLD_SIZE"]) if by_torchrun else per_machine
    ranks = Ranks(rank(), world_size, int(os.environ.get("LOCAL_RANK", 0)), per_machine)
    if device_type == "cuda" and world_size > 1:
        torch.cuda.set_device(ranks.local_rank)
    return ranks


def refuse_torchrun(what: str, instead: str) -> None:
    """Raise UserError where torchrun has started several processes for what is not for it."""
    if dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(f"{what} cannot be started with torchrun; say {instead}")


def rank() -> int:
    """The rank of this process, by what torchrun or Lightning has left in its environment; 0 for one alone."""
    return int(os.environ.get("RANK" if dist.is_torchelastic_launched() else "LOCAL_RANK", 0))


def world_size() -> int:
    """How many ranks there are that know one another; 1 for one alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


# How they start


def cluster_environment() -> ClusterEnvironment:
    """What starts them; named, or Lightning would take a scheduler's variables to mean that it starts the processes."""
    return TorchElasticEnvironment() if dist.is_torchelastic_launched() else LightningEnvironment()


def start(mine: Ranks) -> None:
    """Start the other ranks, where torchrun has not, and wait for them; from here on they tell one another numbers.

    In training Lightning's Trainer does this. What is told goes through the CPU (Gloo).
    """
    if mine.world_size == 1:
        return
    silence_lightning()
    strategy = DDPStrategy(
        cluster_environment=cluster_environment(), process_group_backend="gloo", timeout=LONGEST_WAIT
    )
    Fabric(accelerator="cpu", devices=mine.per_machine, num_nodes=mine.machines, strategy=strategy).launch()
    end_with_the_starter()


def silence_lightning() -> None:
    """Let Lightning tell of itself only that a rank was killed."""
    for package in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    logging.getLogger(process_observer.__name__).setLevel(logging.INFO)


# What they tell one another


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over all ranks of a tensor on the run's device. No host waits for it on a GPU."""
    if not dist.is_initialized():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def averaged(tensor: Tensor) -> Tensor:
    """Return the mean over all ranks, as `summed` does."""
    return summed(tensor) / dist.get_world_size() if dist.is_initialized() else tensor


def largest(values: Mapping[str, float], device: torch.device) -> Mapping[str, float | Tensor]:
    """Return the largest that any rank has of each value, fp64 scalars on the device; of one process the values."""
    if not values or not dist.is_initialized():
        return values
    tensor = torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in values.values()])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return dict(zip(values, tensor, strict=True))


def gathered(value: T) -> list[T]:
    """Return what each rank gives, in their order; it waits for all of them and their devices."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def in_turn(items: Iterable[S], work: Callable[[S], T]) -> Iterator[tuple[list[S], list[T]]]:
    """Share the work: in each round every rank has one item, as long as there are. Yield to all the items of the round
    and what each came to, in their order."""
    left, mine = iter(items), rank()
    while taken := list(islice(left, world_size())):
        own = [work(item) for item in taken[mine : mine + 1]]
        yield taken, list(chain.from_iterable(gathered(own)))


class SharedStop:
    """Whether any rank is asked to stop; all know it before the same step, and no step waits for it.

    That is one step later than a process alone would stop, which knows at once.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._on_host = torch.zeros((), pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def tell(self, asked: bool) -> None:
        """Before a step, tell the others whether this rank is asked to stop."""
        if not dist.is_initialized():
            return
        flag = torch.full((), float(asked), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        self._on_host.copy_(flag, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def agreed(self, asked: bool) -> bool:
        """Return what ranks told before the last step; where there is one, whether it is `asked`."""
        if not dist.is_initialized():
            return asked
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._on_host.item())


# How they end


@contextlib.contextmanager
def together(after_one_is_lost: str) -> Iterator[None]:
    """What ranks do together; behind it each is alone, and Lightning's marks are gone, for a sweep's next job.

    Raises UserError, which says what to do `after_one_is_lost`, where this rank fails for want of another.
    """
    before = dict(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or those that outlive the first by a moment warn of it
    try:
        yield
    except BaseException as failure:
        if dist.is_initialized():
            heed_the_others(failure, after_one_is_lost)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCH_CPP_LOG_LEVEL"):
        if name not in before:
            os.environ.pop(name, None)


def fails_first() -> bool:
    """Whether this rank is the one to say why the run ends; the same answer each time.

    A mistake that all make alike is told by one of them, and what then fails in others for want of it by none.
    Before ranks know one another that is rank 0; another waits for it to speak, and to be ended with it.
    """
    if not dist.is_initialized():
        if rank() > 0:
            time.sleep(SECONDS_FOR_THE_FIRST)
        return True
    me = str(rank())
    try:
        return dist.distributed_c10d._get_default_store().compare_set("failed", "", me).decode() == me
    except RuntimeError:  # the store went with the rank that held it
        return False


def heed_the_others(failure: BaseException, after_one_is_lost: str) -> None:
    """Let one that has failed before this rank say why. Raises UserError where this one fails for want of another."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which torchrun ends ranks while this one says why
    if not fails_first():
        time.sleep(SECONDS_TO_SPEAK)
    if isinstance(failure, dist.DistError) or "by peer" in str(failure):  # NCCL's, and what Gloo says
        raise UserError(
            "another rank has ended without a word, as one does that is killed for want of memory; "
            f"{after_one_is_lost}"
        ) from failure


def end_with_the_starter() -> None:
    """End this process once the rank that started it, if one did, is gone, of which a collective need not notice."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0 and not dist.is_torchelastic_launched():
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def fail(message: str | None) -> None:
    """End this one of several ranks with the message, None for the exception's trace, unless another says why.

    What Python does at exit is left out: it may wait for others that wait for this rank. A process alone returns.
    """
    if not dist.is_initialized() and rank() == 0:
        return
    if fails_first():
        print(traceback.format_exc() if message is None else message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
