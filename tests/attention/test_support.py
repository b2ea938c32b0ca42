"""The table of what each variant supports: every cell follows a limit."""

import pytest
import torch

from flashtrain.kernels.attention import Support, limits, markdown, support_table
from flashtrain.kernels.attention.variants import VARIANTS, Variant

WHOLE = Support(
    "made_up", "a test", "any device", "fp16, bf16, fp32, fp64", "any", "yes", "all", "yes", "yes", "yes", "yes", "yes"
)


def row_of(unsupported, monkeypatch) -> Support:
    """The row of a variant with these limits, the only one there is."""
    made_up = {"made_up": Variant("a test", unsupported, None)}
    for module in ("support", "variants"):
        monkeypatch.setattr(f"flashtrain.kernels.attention.{module}.VARIANTS", made_up)
    (row,) = support_table()
    return row


def on_cpu(spec) -> bool:
    return spec.device_type == "cpu"


LIMITS = {
    "none": (lambda spec: None, {}),
    "cuda": (lambda spec: limits._device(spec, "cuda") or limits._sm(spec, 70), {"runs_on": "CUDA sm_70 and later"}),
    "sm": (
        lambda spec: limits._device(spec, "cuda", "cpu") or limits._sm(spec, 89),
        {"runs_on": "CUDA sm_89 and later; CPU"},
    ),
    "sm-alone": (lambda spec: limits._device(spec, "cuda") or limits._sm_alone(spec, 90), {"runs_on": "CUDA sm_90"}),
    "interpreter": (
        lambda spec: limits._device_of_triton(spec) or limits._sm(spec, 80) or limits._no_interpreted_bf16(spec),
        {
            "runs_on": "CUDA sm_80 and later; CPU with `TRITON_INTERPRET=1`",
            "dtypes": "fp16, bf16, fp32, fp64; on CPU fp16, fp32, fp64",
        },
    ),
    "dtypes": (lambda spec: limits._dtype(spec, (torch.float16, torch.float32)), {"dtypes": "fp16, fp32"}),
    "head-dims": (
        lambda spec: limits._head_dims(spec, multiple=4, least=16, most=256),
        {"head_dim": "16 to 256, multiples of 4"},
    ),
    "rows-of-16-bytes": (limits._rows_of_16_bytes, {"head_dim": "multiples of 8"}),
    "head-dims-on-gpu": (
        lambda spec: None if on_cpu(spec) else limits._head_dims(spec, multiple=32, least=32, most=512),
        {"head_dim": "32 to 512, multiples of 32; on CPU any"},
    ),
    "one-head-dim": (limits._one_head_dim, {"own_v_head_dim": "no"}),
    "narrow-v": (lambda spec: "narrow" if spec.v_head_dim > spec.head_dim else None, {"own_v_head_dim": "no"}),
    "dense-mask": (limits._dense_mask, {"masks": "full, causal; window, documents up to 8,192 keys"}),
    "no-bounds": (lambda spec: spec.intervals.bounds and "bounds", {"masks": "full, causal, window"}),
    "no-dense-mask": (limits._no_dense_mask, {"masks": "full, causal", "unequal_lengths": "full only"}),
    "fewer-queries": (lambda spec: "more" if spec.q_len > spec.kv_len else None, {"unequal_lengths": "no"}),
    "one-kv-head-each": (
        lambda spec: "grouped" if spec.num_q_heads != spec.num_kv_heads else None,
        {"grouped_heads": "no"},
    ),
    "no-softcap": (limits._no_softcap, {"softcap": "no"}),
    "no-lse": (limits._no_lse, {"lse": "no"}),
    "deterministic-products": (
        limits._deterministic_products,
        {"deterministic": "with cuBLAS set; on CPU yes"},
    ),
    "deterministic-backward": (limits._deterministic_backward, {"deterministic": "with PyTorch's switch"}),
    "not-deterministic": (limits._not_deterministic, {"deterministic": "no"}),
    "no-lse-on-cpu": (lambda spec: limits._no_lse(spec) if on_cpu(spec) else None, {"lse": "yes; on CPU no"}),
}


@pytest.mark.parametrize(("unsupported", "cells"), LIMITS.values(), ids=LIMITS)
def test_a_limit_changes_its_cells_alone(unsupported, cells, monkeypatch):
    row = row_of(unsupported, monkeypatch)
    changed = {name: cell for name, cell in vars(row).items() if cell != getattr(WHOLE, name)}
    assert changed == cells


def test_every_variant_has_its_row():
    rows = support_table()
    assert [(row.name, row.description) for row in rows] == [(name, x.description) for name, x in VARIANTS.items()]


def test_markdown():
    lines = markdown((WHOLE,)).splitlines(keepends=True)
    assert lines[0].startswith("| `attention=` | what it is | runs on |")
    assert lines[1] == "|" + "---|" * 12 + "\n"
    assert lines[2] == (
        "| `made_up` | a test | any device | fp16, bf16, fp32, fp64 | any | yes | all | yes | yes | yes | yes | yes |\n"
    )
    assert len(lines) == 3
