"""What the kernel tests share."""

from dataclasses import dataclass

import pytest
import torch
from tolerance import make_qkv

from flashtrain.kernels.attention import Intervals, ops

CAUSAL = Intervals.causal()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of sm_90")]


@dataclass(frozen=True)
class Flash:
    """A variant with kernels of ours, called as its operators are; `dtype` has inputs unless a test says another."""

    name: str
    dtype: torch.dtype
    most_head_dim: int

    def __call__(self, q, k, v, intervals=CAUSAL, scale=None, softcap=0.0):
        attend = getattr(ops, self.name)
        return attend(q, k, v, intervals, q.shape[-1] ** -0.5 if scale is None else scale, softcap)

    def qkv(self, *shape, **options):
        defaults = {"dtype": self.dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}
        return make_qkv(*shape, **(defaults | options))


@pytest.fixture(
    params=[
        Flash("flash_v2", torch.float32, 256),
        pytest.param(Flash("flash_hopper", torch.bfloat16, 128), marks=on_hopper),
    ],
    ids=lambda flash: flash.name,
)
def flash(request):
    return request.param


@pytest.fixture
def nan_filled_outputs():
    """New memory holds NaN, so that an output nobody wrote cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.empty(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
