"""What the kernel tests share."""

import pytest
import torch


@pytest.fixture
def nan_filled_outputs():
    """New memory holds NaN, so that an output nobody wrote cannot pass for a right one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.empty(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
