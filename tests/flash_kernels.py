"""The variants with kernels of ours that tests call through their operators, and where they run."""

from dataclasses import dataclass

import pytest
import torch
from tolerance import make_qkv

from flashtrain.kernels.attention import Intervals
from flashtrain.kernels.attention.variants import attend_of

CAUSAL = Intervals.causal()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of sm_90")]
"""What a test of flash_hopper's kernel is marked with."""


def hopper(test):
    """`test` with all of these marks."""
    for mark in on_hopper:
        test = mark(test)
    return test


@dataclass(frozen=True)
class Flash:
    """A variant with kernels of ours, called as its operators are; `dtype` has inputs unless a test says another."""

    name: str
    dtype: torch.dtype
    most_head_dim: int

    def __call__(self, q, k, v, intervals=CAUSAL, scale=None, softcap=0.0, deterministic=False):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        attend = attend_of(self.name, deterministic=deterministic, needs_lse=True)
        return attend(q, k, v, intervals, scale, softcap)

    def qkv(self, *shape, **options):
        defaults = {"dtype": self.dtype, "device": "cuda" if torch.cuda.is_available() else "cpu"}
        return make_qkv(*shape, **(defaults | options))
