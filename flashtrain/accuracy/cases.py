"""The calls that attention is checked with: a covering selection of masks, lengths, heads, head dims and dtypes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtrain.device import DTYPES
from flashtrain.kernels.attention import AttentionSpec, Intervals, make_qkv

ROWS = 2
WINDOW = 64
CHUNK = 48
DOCUMENTS = 5


@dataclass(frozen=True)
class Case:
    """One call on `ROWS` rows of normal numbers."""

    group: str
    """What it is told under: its mask, or the feature that it has beside it."""
    mask: str
    dtype: str
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    softcap: float
    seed: int

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        shape = (ROWS, self.q_len, self.kv_len, self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim)
        return make_qkv(*shape, dtype=DTYPES[self.dtype], device=device, seed=self.seed)

    def intervals(self, device: str) -> Intervals:
        return MASKS[self.mask](self, device)

    def spec(self, intervals: Intervals, device: str, *, needs_lse: bool) -> AttentionSpec:
        return AttentionSpec.on(
            device,
            dtype=DTYPES[self.dtype],
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            q_len=self.q_len,
            kv_len=self.kv_len,
            intervals=intervals,
            softcap=self.softcap,
            needs_lse=needs_lse,
        )

    def __str__(self) -> str:
        head_dim = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        softcap = f", softcap {self.softcap:g}" if self.softcap else ""
        return (
            f"{self.mask}, {self.q_len} queries, {self.kv_len} keys, heads {self.q_heads}/{self.kv_heads}, "
            f"head dim {head_dim}{softcap}, {self.dtype}"
        )


def _documents(case: Case, device: str) -> Intervals:
    """Causal within documents of random lengths, other ones in each row; some may have no queries or no keys."""
    generator = torch.Generator().manual_seed(case.seed)
    q_documents, k_documents = (
        torch.randint(DOCUMENTS, (ROWS, length), generator=generator).sort().values.to(device)
        for length in (case.q_len, case.kv_len)
    )
    return Intervals.causal().in_documents(q_documents, q_documents if case.q_len == case.kv_len else k_documents)


def _prefix_lm(case: Case, device: str) -> Intervals:
    prefix = torch.tensor([case.kv_len // 3, case.kv_len // 2], device=device)
    return Intervals.prefix_lm(prefix, case.q_len, case.kv_len)


MASKS: dict[str, Callable[[Case, str], Intervals]] = {
    "full": lambda case, device: Intervals.full(),
    "causal": lambda case, device: Intervals.causal(),
    "window": lambda case, device: Intervals.window(WINDOW - 1, 0),
    "documents": _documents,
    "chunked": lambda case, device: Intervals.causal().in_chunks(CHUNK, case.q_len, case.kv_len, device),
    "prefix_lm": _prefix_lm,
}


def covering(
    masks: Sequence[str],
    dtypes: Sequence[str],
    lengths: Sequence[Sequence[int]],
    heads: Sequence[Sequence[int]],
    head_dims: Sequence[int],
    *,
    softcap: float,
    v_head_dim: int | None,
    seed: int,
) -> list[Case]:
    """Cases in which every mask meets every dtype, lengths, heads and head dim; these take turns, not in step.

    `lengths` are pairs of queries and keys, `heads` of query and KV heads. Each mask comes once more with scores
    capped at `softcap`, unless that is 0, and once with `v_head_dim` for v, unless that is None.
    """
    plain = max(len(dtypes), len(lengths), len(heads), len(head_dims))
    groups = [None] * plain + ["softcap"] * (softcap > 0) + ["v_head_dim"] * (v_head_dim is not None)
    cases = []
    for shift, mask in enumerate(masks):
        for turn, group in enumerate(groups):
            q_len, kv_len = lengths[turn % len(lengths)]
            q_heads, kv_heads = heads[(turn + shift // 2) % len(heads)]
            head_dim = head_dims[(turn + 2 * shift) % len(head_dims)]
            cases.append(
                Case(
                    group or mask,
                    mask,
                    dtypes[(turn + shift) % len(dtypes)],
                    q_len,
                    kv_len,
                    q_heads,
                    kv_heads,
                    head_dim,
                    v_head_dim=v_head_dim if group == "v_head_dim" else head_dim,
                    softcap=softcap if group == "softcap" else 0.0,
                    seed=seed + len(cases),
                )
            )
    return cases
