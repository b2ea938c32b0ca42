"""What each variant of attention cannot do.

A limit takes the spec of a call and returns why not, or None; a reason is the end of a sentence that begins
with the name of the variant. Limits see plain values only, so they hold for a configuration too.
"""

import torch

from .spec import AttentionSpec

MAX_DENSE_MASK_KEYS = 8192

# GPUs with about 100 KiB of shared memory for a block of threads, where others have 160 or more.
_LITTLE_SHARED_MEMORY = (86, 87, 89, 120, 121)

# The largest head dimensions that share flash_hopper's launch records.
FLASH_HOPPER_HEAD_DIMS = (64, 128)

_HALF = (torch.float16, torch.bfloat16)
_SINGLE = (*_HALF, torch.float32)
_DOUBLE = (*_SINGLE, torch.float64)


def standard(spec: AttentionSpec) -> str | None:
    return _dtype(spec, _DOUBLE) or _deterministic_products(spec)


def flash_v1(spec: AttentionSpec) -> str | None:
    return flash_v2(spec) or _no_softcap(spec) or _full_or_causal(spec)


def flash_v2(spec: AttentionSpec) -> str | None:
    return (
        _device_of_triton(spec)
        or _triton(spec)
        or _sm(spec, 80)
        or _dtype(spec, _SINGLE)
        or _no_interpreted_bf16(spec)
        or _head_dims(spec, multiple=8, least=16, most=256)
    )


def flash_hopper(spec: AttentionSpec) -> str | None:
    return (
        _device(spec, "cuda")
        or _triton(spec, least=306)
        or _compiled(spec)
        or _sm_alone(spec, 90)
        or _dtype(spec, _HALF)
        or _head_dims(spec, multiple=8, least=16, most=FLASH_HOPPER_HEAD_DIMS[-1])
    )


def sdpa_math(spec: AttentionSpec) -> str | None:
    return (
        _no_lse(spec)
        or _no_softcap(spec)
        or _dtype(spec, _DOUBLE)
        or _dense_mask(spec)
        or _deterministic_products(spec)
    )


def sdpa_efficient(spec: AttentionSpec) -> str | None:
    return (
        _no_lse(spec)
        or _no_softcap(spec)
        or _device(spec, "cuda")
        or _sm(spec, 80)
        or _dtype(spec, _SINGLE)
        or _rows_of_16_bytes(spec)
        or _lengths(spec, least=1)
        or _dense_mask(spec)
        or _deterministic_backward(spec)
    )


def sdpa_flash(spec: AttentionSpec) -> str | None:
    everywhere = (
        _no_lse(spec)
        or _no_softcap(spec)
        or _device(spec, "cuda", "cpu")
        or _one_head_dim(spec)
        or _lengths(spec, least=1)
        or _no_dense_mask(spec)
    )
    if everywhere is not None or spec.device_type == "cpu":
        return everywhere or _dtype(spec, _DOUBLE)
    return (
        _sm(spec, 80)
        or _dtype(spec, _HALF)
        or _head_dims(spec, multiple=8, least=8, most=256)
        or _flash_backward(spec)
        or _deterministic_backward(spec)
    )


def sdpa_cudnn(spec: AttentionSpec) -> str | None:
    return (
        _no_lse(spec)
        or _no_softcap(spec)
        or _device(spec, "cuda")
        or _sm(spec, 80)
        or _dtype(spec, _HALF)
        or _head_dims(spec, multiple=8, least=8, most=128)
        # One query gives NaN gradients (NVIDIA/cudnn-frontend#1072), and one key has no kernel.
        or _lengths(spec, least=2)
        or _no_dense_mask(spec)
        or _cudnn(spec)
        or _not_deterministic(spec)
    )


def flex(spec: AttentionSpec) -> str | None:
    return (
        _device(spec, "cuda")
        or _triton(spec)
        or _sm(spec, 80)
        or _dtype(spec, _HALF)
        or _head_dims(spec, multiple=8, least=16, most=256)
        or _flex_tiles(spec)
        or _lengths(spec, least=1)
        or _deterministic_backward(spec)
    )


def _device(spec: AttentionSpec, *types: str) -> str | None:
    return None if spec.device_type in types else f"runs on {' and '.join(types)}, not on {spec.device_type}"


def _device_of_triton(spec: AttentionSpec) -> str | None:
    if spec.device_type == "cuda" or (spec.device_type == "cpu" and spec.interpreted):
        return None
    return f"runs on cuda, or on cpu with TRITON_INTERPRET=1 in the environment, not on {spec.device_type}"


def _triton(spec: AttentionSpec, least: int = 0) -> str | None:
    if spec.triton is None:
        return "needs Triton, which is not installed (pip install triton)"
    if spec.triton < least:
        needed, here = (f"{version // 100}.{version % 100}" for version in (least, spec.triton))
        return f"needs Triton {needed} or later, and this is {here}"
    return None


def _compiled(spec: AttentionSpec) -> str | None:
    return "runs compiled, and TRITON_INTERPRET=1 is in the environment" if spec.interpreted else None


def _sm(spec: AttentionSpec, least: int) -> str | None:
    if spec.device_type != "cuda" or (spec.sm is not None and spec.sm >= least):
        return None
    return f"needs a GPU of sm_{least} or later, and there is {_sm_here(spec)}"


def _sm_alone(spec: AttentionSpec, only: int) -> str | None:
    return None if spec.sm == only else f"needs a GPU of sm_{only}, and there is {_sm_here(spec)}"


def _sm_here(spec: AttentionSpec) -> str:
    return "none here" if spec.sm is None else f"sm_{spec.sm}"


def _dtype(spec: AttentionSpec, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if spec.dtype in dtypes:
        return None
    return f"computes in {', '.join(_name(dtype) for dtype in dtypes)}, not in {_name(spec.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_interpreted_bf16(spec: AttentionSpec) -> str | None:
    """Triton's interpreter multiplies the bits of bf16 numbers as if they were integers."""
    if not spec.interpreted or spec.dtype != torch.bfloat16:
        return None
    return "computes in float16 or float32 in Triton's interpreter, not in bfloat16"


def _head_dims(spec: AttentionSpec, *, multiple: int, least: int, most: int) -> str | None:
    for dim in (spec.head_dim, spec.v_head_dim):
        if dim % multiple != 0 or not least <= dim <= most:
            return f"takes head dimensions from {least} to {most} in multiples of {multiple}, not {dim}"
    return None


def _rows_of_16_bytes(spec: AttentionSpec) -> str | None:
    for dim in (spec.head_dim, spec.v_head_dim):
        if dim == 0 or dim * spec.dtype.itemsize % 16 != 0:
            return f"takes head dimensions of whole 16-byte rows, not {dim} in {_name(spec.dtype)}"
    return None


def _one_head_dim(spec: AttentionSpec) -> str | None:
    if spec.head_dim == spec.v_head_dim:
        return None
    return f"takes one head dimension for q, k and v, not {spec.head_dim} and {spec.v_head_dim}"


def _lengths(spec: AttentionSpec, *, least: int) -> str | None:
    if spec.q_len >= least and spec.kv_len >= least:
        return None
    return f"takes lengths from {least}, not {spec.q_len} queries and {spec.kv_len} keys"


def _no_lse(spec: AttentionSpec) -> str | None:
    return "returns no log-sum-exp" if spec.needs_lse else None


def _no_softcap(spec: AttentionSpec) -> str | None:
    return None if spec.softcap == 0 else f"caps no scores, and softcap is {spec.softcap}"


def _full_or_causal(spec: AttentionSpec) -> str | None:
    if spec.intervals.is_full or spec.intervals.is_causal:
        return None
    if spec.intervals.bounds is not None:
        return "takes the full and the causal mask, not documents, chunks or a prefix"
    # torch 2.11 cannot trace a string made from an object, only from its numbers.
    return f"takes the full and the causal mask, not window({spec.intervals.left}, {spec.intervals.right})"


def _no_dense_mask(spec: AttentionSpec) -> str | None:
    if not spec.intervals.needs_dense(spec.q_len, spec.kv_len):
        return None
    return _full_or_causal(spec) or (
        f"takes the causal mask where there are as many queries as keys, not {spec.q_len} and {spec.kv_len}"
    )


def _dense_mask(spec: AttentionSpec) -> str | None:
    if not spec.intervals.needs_dense(spec.q_len, spec.kv_len) or spec.kv_len <= MAX_DENSE_MASK_KEYS:
        return None
    return f"writes a mask like this out for up to {MAX_DENSE_MASK_KEYS} keys, not for {spec.kv_len}"


def _flash_backward(spec: AttentionSpec) -> str | None:
    if spec.sm in _LITTLE_SHARED_MEMORY and spec.needs_grad and 192 < spec.head_dim <= 224:
        return f"has no backward for head dimension {spec.head_dim} on sm_{spec.sm}"
    return None


def _flex_tiles(spec: AttentionSpec) -> str | None:
    # PyTorch picks tiles that do not fit there (pytorch/pytorch#198224).
    widest = max(spec.head_dim, spec.v_head_dim)
    if spec.sm in _LITTLE_SHARED_MEMORY and widest > 128:
        return f"takes head dimensions up to 128 on sm_{spec.sm}, not {widest}"
    return None


def _cudnn(spec: AttentionSpec) -> str | None:
    if spec.cudnn_version is None:
        return "needs cuDNN, which this PyTorch comes without"
    # Before cuDNN 9.15.1 a last tile that is not full was computed wrongly (pytorch/pytorch#169849).
    if spec.cudnn_version < 91501 and (spec.q_len % 128 != 0 or spec.kv_len % 128 != 0):
        return f"needs cuDNN 9.15.1 for lengths that are no multiples of 128, and this is {spec.cudnn_version}"
    return None


def _deterministic_products(spec: AttentionSpec) -> str | None:
    if not spec.deterministic or spec.device_type != "cuda" or spec.fixed_cublas:
        return None
    return "is deterministic with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, and it is not there"


def _deterministic_backward(spec: AttentionSpec) -> str | None:
    # By default gradients are added up in any order or, in flex, in one that is chosen by its time.
    if not spec.deterministic or not spec.needs_grad or spec.torch_deterministic:
        return None
    return "has a deterministic backward under torch.use_deterministic_algorithms(True) alone, which is not on"


def _not_deterministic(spec: AttentionSpec) -> str | None:
    """PyTorch itself takes another kernel where it may run deterministic ones alone."""
    return "is not deterministic, and that is asked for" if spec.deterministic else None
