"""Data-parallel training: a copy of the model on each rank, gradients averaged in the last backward of a step."""

import signal
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
        by_torchrun = TorchElasticEnvironment.detect()
        super().__init__(
            # Named, or Lightning would take a scheduler's variables to mean that it starts the processes.
            cluster_environment=TorchElasticEnvironment() if by_torchrun else LightningEnvironment(),
            process_group_backend="nccl" if device_type == "cuda" else "gloo",
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants
        )
        # Dynamo would cut the model's graph at buckets, which activation checkpointing does not survive.
        torch._dynamo.config.optimize_ddp = False

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one has started: they may wait for it in a collective that no signal reaches.

        Raises UserError where it fails for want of another.
        """
        if not ranks.fails_first():
            time.sleep(SECONDS_TO_SPEAK)
        self.launcher.kill(signal.SIGKILL)
        if isinstance(exception, DistError) or "by peer" in str(exception):  # NCCL's, and what Gloo says
            raise UserError(
                "another rank has ended without a word, as one does that is killed for want of memory; continue from "
                "the last checkpoint with resume=DIR"
            ) from exception
