"""Attention as the textbook writes it: S = Q K^T, P = softmax(S), O = P V, each matrix in memory.

This is the definition of right (in float64) and, in a low precision, the honest baseline: S and P are stored
in the dtype of the inputs, as plain PyTorch would. Nothing here is fast, and no other variant may import it.
"""

import math

import torch
from torch import Tensor

from .intervals import Intervals


def standard(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention and its log-sum-exp, differentiable to any order.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), any floating dtype; query head h reads KV head
    `h // (Hq // Hkv)`. Returns out (B, Sq, Hq, Dv) in that dtype and lse (B, Hq, Sq), natural log, in float32
    (float64 for float64). A query that sees no key gives out 0, lse -inf and zero gradients.

    Scores are capped to softcap tanh(scores / softcap) unless softcap is 0.

    Source: Vaswani et al. 2017, eq. 1; Dao et al. 2022 (FlashAttention), algorithm 0.
    """
    B, Sq, Hq, D = q.shape
    Sk, Hkv = k.shape[1:3]
    visible = intervals.dense(Sq, Sk, q.device)[:, None, None]
    empty = ~visible.any(dim=-1, keepdim=True)

    # g is the place of a query head in the group that shares KV head h.
    q_BSHGD = q.reshape(B, Sq, Hkv, Hq // Hkv, D)
    scores = torch.einsum("bihgd,bjhd->bhgij", q_BSHGD, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # An empty row holds constants until the softmax is over, so that no gradient meets inf - inf.
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhgij,bjhd->bihgd", probabilities, v)

    lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
    return out.reshape(B, Sq, Hq, v.shape[-1]), lse.reshape(B, Hq, Sq)
