"""How many operations a training token costs, and which share of a device's peak a speed is.

Two counts of attention are in use, and at long context they differ by almost 2x: the usual one lets every
query see the whole row, the visible one counts only what the mask shows. Both are `flops_per_token` with
another number of keys. A device whose peak is not listed has no MFU, never a guess.
"""

from collections.abc import Sequence

import numpy as np
import torch

from flashtrain.kernels.attention import Intervals
from flashtrain.performance.devices import DEVICES, key_of


def flops_per_token(
    num_weights: int, num_layers: int, num_heads: int, head_dim: int, keys_per_query: float
) -> float:
    """Return the FLOPs that forward and backward spend on one token: 6 N + 12 L H D K.

    The backward is twice the forward; what it recomputes is not counted. Source: PaLM (arXiv 2204.02311), appendix B,
    with N as nanoGPT's `estimate_mfu` takes it.

    Args:
        num_weights: N, all weights but tables that are only looked up (positions, an untied embedding).
        keys_per_query: K, the sequence length in the usual count, `visible_keys` in the visible one.
    """
    return 6 * num_weights + 12 * num_layers * num_heads * head_dim * keys_per_query


def visible_keys(layers: Sequence[Intervals], lengths: Sequence[int] | np.ndarray) -> float:
    """Return how many keys a query sees: the mean over layers and over all queries of sequences of these lengths.

    Args:
        layers: the mask of each layer, of no fixed length.
        lengths: tokens of each sequence that is attended to by itself: rows, or documents within rows.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    pairs = sum(
        count * layers.count(mask) * mask.visible(1, length, length)
        for mask in dict.fromkeys(layers)
        for length, count in zip(distinct.tolist(), counts.tolist(), strict=True)
    )
    return pairs / (len(layers) * (distinct * counts).sum().item())


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak in FLOP/s of matrix products in `dtype`, or None for a device that is not in the table.

    tf32: whether those in float32 may be computed in TF32.
    """
    key = key_of(device_name)
    return None if key is None else DEVICES[key].peak_flops(dtype, tf32)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation in [0, 1], or None where the peak is not known."""
    return None if peak is None else tokens_per_second * flops_per_token / peak
