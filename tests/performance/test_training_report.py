from dataclasses import replace

import pytest

from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.timing import Timing
from flashtrain.performance.training_report import Cell, Conditions, as_row, describe, markdown
from flashtrain.performance.training_steps import StepSpeed

GIVEN = Conditions(
    model="llama_1b",
    device="NVIDIA H200",
    computing="bfloat16 with float32 weights on cuda, TF32 off, compiled",
    on_gpu=True,
    tokens=32768,
    warmup=2,
    steps=8,
    rounds=3,
    relative_to="standard",
    made_with="(torch 2; `python`)",
)
RATE = 700e12


def cell(length, name, seconds, flops_per_token=None, peak=2 * 2**30):
    speed = StepSpeed(32768, Timing(seconds), peak, flops_per_token, predicted_bytes=2**30)
    return Cell(length, name, speed, RATE)


CELLS = [
    cell(2048, "flash_v2", (0.5, 0.45, 0.55), flops_per_token=7e9),
    cell(2048, "standard", (1.0, 1.0, 1.0), flops_per_token=7e9),
    cell(2048, "my_trainer:gpt", (0.25, 0.25, 0.25)),
    cell(65536, "flash_v2", (2.0, 2.0, 2.0), flops_per_token=35e9),
    Cell(65536, "standard", NoSpeed("failed: out of memory, 16.00 GiB asked for"), 2 * RATE),
    Cell(65536, "my_trainer:gpt", NoSpeed("refused", "takes no such rows"), 2 * RATE),
]


def test_a_cell_is_speed_memory_share_and_multiple():
    text = markdown(CELLS, GIVEN)
    assert "| llama_1b | 2k | 64k |\n|---|---:|---:|\n" in text
    assert "| `flash_v2` | 65,536 (2.0 GiB, 66 %, 2.00x) | 16,384 (2.0 GiB, 82 %) |" in text
    assert "| `standard` | 32,768 (2.0 GiB, 33 %, 1.00x) | failed: out of memory, 16.00 GiB asked for |" in text
    assert "| `my_trainer:gpt` | 131,072 (2.0 GiB, 4.00x) | refused |" in text
    assert "- my_trainer:gpt takes no such rows\n" in text
    assert "- TFLOP/s of a large matrix product: 700 before 2k, 1,400 before 64k\n" in text
    assert "readings lie far apart" not in text and "lie within 5.0 % of their median" in text
    assert text.endswith("\n\n(torch 2; `python`)\n")


def test_a_row_has_every_reading_and_what_it_is_divided_by():
    row = as_row(CELLS[0])
    assert row["tokens_per_second"] == 65536 and row["readings_s"] == [0.5, 0.45, 0.55] and row["median_s"] == 0.5
    assert (row["peak_gib"], row["predicted_peak_gib"], row["product_rate"]) == (2.0, 1.0, RATE)
    assert row["share_of_product_rate"] == pytest.approx(65536 * 7e9 / RATE)
    assert as_row(CELLS[4])["no_speed"] == "failed: out of memory, 16.00 GiB asked for"
    assert as_row(CELLS[5])["no_speed"] == "takes no such rows" and as_row(CELLS[5])["tokens_per_second"] is None


def test_what_the_figures_mean_is_said():
    said = describe(GIVEN)
    assert f"steps of llama_1b on random tokens, {GIVEN.computing}, on NVIDIA H200; medians of 3 interleaved" in said
    assert "A round times 8 steps, after 2 untimed; a step has 32,768 tokens, or one row where that is longer." in said
    at_once = describe(replace(GIVEN, warmup=0, steps=1, relative_to=None))
    assert "A round times 1 step, with none before to warm up; " in at_once and "1.10x" not in at_once
    assert said.endswith("1.10x is a tenth more tokens per second than standard.")
