"""What the kernel tests share."""

import pytest
import torch
from flash_kernels import Flash, on_hopper


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
