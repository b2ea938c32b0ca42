"""Data-parallel training: a copy of the model on each rank, gradients averaged in the last backward of a step."""

import signal

import torch
from lightning.pytorch.strategies import DDPStrategy

from flashtrain import ranks

AFTER_ONE_IS_LOST = "continue from the last checkpoint with resume=DIR"


class Replicas(DDPStrategy):
    """DDP that keeps each gradient once, in its buckets, and whose ranks end together where one fails."""

    def __init__(self, device_type: str) -> None:
        super().__init__(
            cluster_environment=ranks.cluster_environment(),
            process_group_backend="nccl" if device_type == "cuda" else "gloo",
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # they are constants
        )
        # Or Dynamo cuts the model's graph at buckets, for every micro-batch, so that the last may overlap with sending.
        torch._dynamo.config.optimize_ddp = False

    def setup_environment(self) -> None:
        super().setup_environment()
        ranks.end_with_the_starter()

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one has started: they may wait for it in a collective that no signal reaches.

        Raises UserError where it fails for want of another.
        """
        try:
            ranks.heed_the_others(exception, AFTER_ONE_IS_LOST)
        finally:
            self.launcher.kill(signal.SIGKILL)
