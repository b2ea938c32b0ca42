"""A small problem, and variants and peers measured on it on the CPU."""

import torch

from flashtrain.kernels.attention import Intervals
from flashtrain.performance.attention import Problem, measure
from flashtrain.performance.timing import HostClock

SMALL = Problem("causal", 32, batch=2, head_dim=8, num_q_heads=4, num_kv_heads=2)


def measured(
    variants, intervals=None, problem=SMALL, passes=("forward", "backward"), rounds=2, seed=0, clock=None, peers=()
):
    """{(variant, pass): Measurement} on the CPU in fp32."""
    found = measure(
        problem,
        Intervals.causal() if intervals is None else intervals,
        variants,
        list(passes),
        clock or HostClock(),
        device="cpu",
        dtype=torch.float32,
        warmup=1,
        rounds=rounds,
        seed=seed,
        peers=peers,
    )
    return {(one.variant, one.pass_name): one for one in found}
