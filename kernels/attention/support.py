"""What each variant supports, in words, found by asking its limits about calls that nobody makes.

limits.py is the one source: a limit that changes there changes the table, and the README's is held to it.
"""

import bisect
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace

import torch
from torch import Tensor

from .intervals import Intervals
from .spec import AttentionSpec
from .variants import VARIANTS, refusal

# A call that every variant serves on its own ground; the rows say what may change about it.
_GPU = AttentionSpec(
    device_type="cuda",
    sm=90,
    cudnn_version=91900,
    triton=306,
    interpreted=False,
    fixed_cublas=False,
    torch_deterministic=False,
    dtype=torch.float16,
    head_dim=64,
    v_head_dim=64,
    num_q_heads=4,
    num_kv_heads=4,
    q_len=256,
    kv_len=256,
    intervals=Intervals.full(),
    softcap=0.0,
    needs_lse=False,
    needs_grad=True,
    deterministic=False,
)
_CPU = replace(_GPU, device_type="cpu", sm=None, cudnn_version=None)
_INTERPRETER = replace(_CPU, interpreted=True)
_ELSEWHERE = replace(_CPU, device_type="mps")

_ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_MOST_HEAD_DIM = 1024
_MOST_KEYS = 1 << 20
_MASKS = {
    "full": lambda Sq, Sk: Intervals.full(),
    "causal": lambda Sq, Sk: Intervals.causal(),
    "window": lambda Sq, Sk: Intervals.window(31, 0),
    "documents": lambda Sq, Sk: Intervals.causal().in_documents(_one_document(Sq), _one_document(Sk)),
}


@dataclass(frozen=True)
class Support:
    """One variant's row. The documents of `masks` are all that bounds hold: chunks, prefixes and mixtures too."""

    name: str
    description: str
    runs_on: str
    dtypes: str
    head_dim: str
    own_v_head_dim: str
    masks: str
    unequal_lengths: str
    grouped_heads: str
    softcap: str
    lse: str
    deterministic: str


_HEADER = Support(
    name="attention=",
    description="what it is",
    runs_on="runs on",
    dtypes="dtypes",
    head_dim="head dim",
    own_v_head_dim="V's own",
    masks="masks",
    unequal_lengths="Sq ≠ Sk",
    grouped_heads="grouped heads",
    softcap="softcap",
    lse="LSE",
    deterministic="deterministic",
)


def support_table() -> tuple[Support, ...]:
    """A row for every variant, in the order of the table of variants. Needs no GPU and no Triton."""
    return tuple(
        Support(
            name=name,
            description=variant.description,
            runs_on=_runs_on(name),
            dtypes=_by_place(name, _dtypes),
            head_dim=_by_place(name, _head_dim),
            own_v_head_dim=_by_place(name, _own_v_head_dim),
            masks=_by_place(name, _masks),
            unequal_lengths=_by_place(name, _unequal_lengths),
            grouped_heads=_by_place(name, _grouped_heads),
            softcap=_by_place(name, _softcap),
            lse=_by_place(name, _lse),
            deterministic=_by_place(name, _deterministic),
        )
        for name, variant in VARIANTS.items()
    )


def markdown(rows: tuple[Support, ...]) -> str:
    """The rows as a Markdown table that ends with a newline."""
    header, *lines = (f"| `{name}` | {' | '.join(cells)} |\n" for name, *cells in map(astuple, (_HEADER, *rows)))
    return header + "|---" * len(fields(Support)) + "|\n" + "".join(lines)


def _serves(name: str, spec: AttentionSpec, **changes) -> bool:
    return refusal(name, replace(spec, **changes)) is None


def _by_place(name: str, words: Callable[[str, AttentionSpec], str]) -> str:
    """What `words` says of the variant on a GPU and, where that is something else, on a CPU."""
    on_gpu = words(name, _GPU)
    for cpu in (_CPU, _INTERPRETER):
        if _serves(name, cpu):
            on_cpu = words(name, cpu)
            return on_gpu if on_cpu == on_gpu else f"{on_gpu}; on CPU {on_cpu}"
    return on_gpu


def _runs_on(name: str) -> str:
    if _serves(name, _ELSEWHERE):
        return "any device"
    served = [f"sm_{sm}" for sm in _ARCHITECTURES if _serves(name, _GPU, sm=sm)]
    and_later = _serves(name, _GPU, sm=_ARCHITECTURES[-1])
    places = [f"CUDA {served[0]} and later" if and_later else f"CUDA {', '.join(served)}"]
    if _serves(name, _CPU):
        places.append("CPU")
    elif _serves(name, _INTERPRETER):
        places.append("CPU with `TRITON_INTERPRET=1`")
    return "; ".join(places)


def _dtypes(name: str, place: AttentionSpec) -> str:
    return ", ".join(words for dtype, words in _DTYPES.items() if _serves(name, place, dtype=dtype))


def _head_dim(name: str, place: AttentionSpec) -> str:
    served = [dim for dim in range(1, _MOST_HEAD_DIM + 1) if _serves(name, place, head_dim=dim, v_head_dim=dim)]
    first, last, step = served[0], served[-1], served[1] - served[0]
    if step == 1 and last == _MOST_HEAD_DIM:
        return "any"
    multiples = f"multiples of {step}"
    return multiples if last == _MOST_HEAD_DIM else f"{first} to {last}, {multiples}"


def _own_v_head_dim(name: str, place: AttentionSpec) -> str:
    return _yes(all(_serves(name, place, v_head_dim=dim) for dim in (place.head_dim // 2, place.head_dim * 2)))


def _masks(name: str, place: AttentionSpec) -> str:
    longest = {mask: _most_keys(name, place, mask) for mask in _masks_served(name, place)}
    if len(longest) == len(_MASKS) and min(longest.values()) == _MOST_KEYS:
        return "all"
    always = [mask for mask, most in longest.items() if most == _MOST_KEYS]
    limited = [mask for mask, most in longest.items() if most < _MOST_KEYS]
    if not limited:
        return ", ".join(always)
    (most,) = {longest[mask] for mask in limited}
    return f"{', '.join(always)}; {', '.join(limited)} up to {most:,} keys"


def _masks_served(name: str, place: AttentionSpec, **lengths: int) -> list[str]:
    place = replace(place, **lengths)
    return [mask for mask, make in _MASKS.items() if _serves(name, place, intervals=make(place.q_len, place.kv_len))]


def _most_keys(name: str, place: AttentionSpec, mask: str) -> int:
    """The longest length of queries and keys that is served, up to a million."""

    def too_long(length: int) -> bool:
        return not _serves(name, place, q_len=length, kv_len=length, intervals=_MASKS[mask](length, length))

    return bisect.bisect_left(range(_MOST_KEYS + 1), True, lo=place.kv_len, key=too_long) - 1


def _unequal_lengths(name: str, place: AttentionSpec) -> str:
    fewer, more = place.kv_len // 2, place.kv_len * 2
    with_fewer, with_more = (_masks_served(name, place, q_len=length) for length in (fewer, more))
    served = [mask for mask in with_fewer if mask in with_more]
    if served == _masks_served(name, place):
        return "yes"
    return f"{', '.join(served)} only" if served else "no"


def _grouped_heads(name: str, place: AttentionSpec) -> str:
    return _yes(_serves(name, place, num_kv_heads=place.num_q_heads // 2))


def _softcap(name: str, place: AttentionSpec) -> str:
    return _yes(_serves(name, place, softcap=30.0))


def _lse(name: str, place: AttentionSpec) -> str:
    return _yes(_serves(name, place, needs_lse=True))


def _deterministic(name: str, place: AttentionSpec) -> str:
    asked = replace(place, deterministic=True)
    if _serves(name, asked):
        return "yes"
    if _serves(name, asked, fixed_cublas=True):
        return "with cuBLAS set"
    return "with PyTorch's switch" if _serves(name, asked, torch_deterministic=True) else "no"


def _one_document(length: int) -> Tensor:
    """(1, length): no limit reads which document a token is of."""
    return torch.zeros(1, length, dtype=torch.int32, device="meta")


def _yes(served: bool) -> str:
    return "yes" if served else "no"
