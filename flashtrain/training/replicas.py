"""Data-parallel training: a copy of the model on each rank, gradients averaged in the last backward of a step."""

import os
import signal
import threading
import time

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import DistError

from flashtrain import ranks
from flashtrain.errors import UserError

SECONDS_TO_SPEAK = 1.0
"""What a rank is given to say why it fails before it may be killed."""


class Replicas(DDPStrategy):
    """DDP that keeps each gradient once, in its buckets, and whose ranks end together where one fails."""

    def __init__(self, device_type: str) -> None:
        self.by_torchrun = TorchElasticEnvironment.detect()
        super().__init__(
            # Named, or Lightning would take a scheduler's variables to mean that it starts the processes.
            cluster_environment=TorchElasticEnvironment() if self.by_torchrun else LightningEnvironment(),
            process_group_backend="nccl" if device_type == "cuda" else "gloo",
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants
        )
        # Or Dynamo cuts the model's graph at buckets, for every micro-batch, so that the last may overlap with sending.
        torch._dynamo.config.optimize_ddp = False

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.local_rank > 0 and not self.by_torchrun:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one has started: they may wait for it in a collective that no signal reaches.

        Raises UserError where it fails for want of another.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which torchrun ends ranks while this one says why
        if not ranks.fails_first():
            time.sleep(SECONDS_TO_SPEAK)
        self.launcher.kill(signal.SIGKILL)
        if isinstance(exception, DistError) or "by peer" in str(exception):  # NCCL's, and what Gloo says
            raise UserError(
                "another rank has ended without a word, as one does that is killed for want of memory; continue from "
                "the last checkpoint with resume=DIR"
            ) from exception


def _end_with(parent: int) -> None:
    """End this process once the one that started it is gone, of which a collective need not notice."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
