"""Attention as the textbook writes it: S = Q K^T, P = softmax(S), O = P V, each matrix in memory.

This is the definition of right (in float64) and, in a low precision, the honest baseline: S and P are stored
in the dtype of the inputs, as plain PyTorch would. Nothing here is fast, and no other variant may import it.
With the full mask, one batch row and as many KV heads as query heads there are three passes over memory and no
more; what a mask, the log-sum-exp, a cap or another layout adds is a pass of its own. performance/io.py counts
them.
"""

import math

import torch
from torch import Tensor

from .intervals import Intervals


def standard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
    needs_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot-product attention and its log-sum-exp, None unless needed, differentiable to any order.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), any floating dtype; query head h reads KV head
    `h // (Hq // Hkv)`. Returns out (B, Sq, Hq, Dv) in that dtype and lse (B, Hq, Sq), natural log, in float32
    (float64 for float64). A query that sees no key gives out 0, lse -inf and zero gradients.

    Scores are capped to softcap tanh(scores / softcap) unless softcap is 0.

    Source: Vaswani et al. 2017, eq. 1; Dao et al. 2022 (FlashAttention), algorithm 0.
    """
    B, Sq, Hq, D = q.shape
    Sk, Hkv, Dv = v.shape[1:]
    # Z is a KV head of a row, M a query of one of its G query heads: a plain batched product for each.
    G = Hq // Hkv
    q_ZMD = q.reshape(B, Sq, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(B * Hkv, G * Sq, D)
    k_ZND, v_ZND = (x.transpose(1, 2).reshape(B * Hkv, Sk, x.shape[-1]) for x in (k, v))

    scores = torch.baddbmm(q.new_zeros(()), q_ZMD, k_ZND.mT, beta=0, alpha=scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    visible = empty = None
    if not intervals.is_full:
        visible = intervals.dense(Sq, Sk, q.device)
        scores = _where(visible, scores, -math.inf, Hkv)
    if intervals.may_have_empty_rows(Sq, Sk):
        seen = torch.ones(1, Sq, Sk, dtype=torch.bool, device=q.device) if visible is None else visible
        empty = ~seen.any(dim=-1, keepdim=True)
        # An empty row holds constants until the softmax is over, so that no gradient meets inf - inf.
        scores = _where(~empty, scores, 0.0, Hkv)
    probabilities = torch.softmax(scores, dim=-1)
    if empty is not None:
        probabilities = _where(~empty, probabilities, 0.0, Hkv)
    out = torch.bmm(probabilities, v_ZND)

    out = out.view(B, Hkv, G, Sq, Dv).permute(0, 3, 1, 2, 4).reshape(B, Sq, Hq, Dv)
    if not needs_lse:
        return out, None
    lse = torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), dim=-1).view(B, Hq, Sq)
    return out, lse if empty is None else lse.masked_fill(empty.mT, -math.inf)


def out_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Intervals,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """`standard` without the log-sum-exp, which costs passes over S that the textbook does not make."""
    out, _ = standard(q, k, v, intervals, scale, softcap, needs_lse=False)
    return out, None


def _where(shown_RMN: Tensor, x_ZMN: Tensor, other: float, Hkv: int) -> Tensor:
    """x (B Hkv, G Sq, Sk) where shown, (R, Sq, Sk or 1) with R 1 or B, and `other` elsewhere; one pass over x."""
    Z, M, Sk = x_ZMN.shape
    Sq = shown_RMN.shape[1]
    x_BHGMN = x_ZMN.view(Z // Hkv, Hkv, M // max(Sq, 1), Sq, Sk)
    return torch.where(shown_RMN[:, None, None], x_BHGMN, other).view(Z, M, Sk)
