"""The calls that attention is checked with: a covering selection of masks, lengths, heads, head dims and dtypes."""

import itertools
from collections import Counter
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
    lse_gradient: bool
    """Whether the LSE, too, has an upstream gradient."""
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
        lse_gradient = ", gradient of the LSE" if self.lse_gradient else ""
        return (
            f"{self.mask}, {self.q_len} queries, {self.kv_len} keys, heads {self.q_heads}/{self.kv_heads}, "
            f"head dim {head_dim}{softcap}{lse_gradient}, {self.dtype}"
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


PLAIN = ("full", "causal")
"""The masks that every variant has."""


def covering(
    masks: Sequence[str],
    dtypes: Sequence[str],
    lengths: Sequence[Sequence[int]],
    heads: Sequence[Sequence[int]],
    head_dims: Sequence[int],
    *,
    softcap: float,
    v_head_dim: int | None,
    lse_gradient: bool,
    seed: int,
) -> list[Case]:
    """Cases of each group, a mask or a feature, that meet every dtype, lengths, heads and head dim.

    `lengths` are pairs of queries and keys, `heads` of query and KV heads. The features are scores capped at
    `softcap`, unless that is 0, `v_head_dim` for v, unless that is None, and a gradient of the LSE, if
    `lse_gradient`; under each of them the masks take turns. Any two choices of dtype, lengths, heads and head dim
    meet in some case, and the first lengths under each mask of `PLAIN` meet every dtype with every head dim, while
    heads take turns.
    """
    groups = [
        *masks,
        *["softcap"] * (softcap > 0),
        *["v_head_dim"] * (v_head_dim is not None),
        *["lse_gradient"] * lse_gradient,
    ]
    pairs_of_lengths, pairs_of_heads = ([tuple(pair) for pair in pairs] for pairs in (lengths, heads))
    calls = [
        (mask, dtype, pairs_of_lengths[0], pairs_of_heads[(i + j + n) % len(heads)], head_dim)
        for i, mask in enumerate(mask for mask in masks if mask in PLAIN)
        for j, dtype in enumerate(dtypes)
        for n, head_dim in enumerate(head_dims)
    ]
    calls = _until_all_meet(calls, groups, dtypes, pairs_of_lengths, pairs_of_heads, head_dims)
    calls.sort(key=lambda call: groups.index(call[0]))
    turns = itertools.cycle(masks)
    return [
        Case(
            group,
            group if group in masks else next(turns),
            dtype,
            *of_lengths,
            *of_heads,
            head_dim,
            v_head_dim=v_head_dim if group == "v_head_dim" else head_dim,
            softcap=softcap if group == "softcap" else 0.0,
            lse_gradient=group == "lse_gradient",
            seed=seed + number,
        )
        for number, (group, dtype, of_lengths, of_heads, head_dim) in enumerate(calls)
    ]


def _until_all_meet(calls: list[tuple], *choices: Sequence) -> list[tuple]:
    """`calls`, each one of every `choices`, and such more that any two of different choices are together in one.

    The next is always the one in which most pairs meet for the first time, and of these the one of rarest pairs.
    """
    possible = {call: set(itertools.combinations(enumerate(call), 2)) for call in itertools.product(*choices)}
    calls, pairs = list(calls), set().union(*possible.values())
    met = Counter(pair for call in calls for pair in possible[call])
    while apart := pairs - met.keys():
        ranks = {call: (len(of & apart), -sum(met[pair] for pair in of)) for call, of in possible.items()}
        calls.append(max(ranks, key=ranks.get))
        met.update(possible[calls[-1]])
    return calls
