import csv
import io
import json
import math
from dataclasses import asdict, replace

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import torch
from eval_options import OPTIONS
from rich.console import Console

from flashtrain.charts import BLUE, GREEN, ORANGE
from flashtrain.evaluation.perplexity import evaluate_perplexity
from flashtrain.evaluation.report import as_json, rows_by_metric, terminal_report, write_reports
from flashtrain.evaluation.scoring import Documents
from flashtrain.evaluation.table import read_table

REPORTED = replace(OPTIONS, lengths=[128, 512, 1024, 65536], max_documents=2, max_anchors=3)


@pytest.fixture
def evaluation_of(random_stream, byte_counts, conditions):
    """Build evaluations of a model whose answer depends on the number of tokens it saw alone."""

    def build(nll_at, **changes):
        def nll(inputs, targets):
            return nll_at(torch.arange(1.0, inputs.shape[1] + 1)).expand(inputs.shape)

        return evaluate_perplexity(
            nll,
            Documents(random_stream(1100, 2048, 3000, 200), "document"),
            bytes_per_token=byte_counts,
            count_words=lambda tokens: len(tokens) // 5,
            options=replace(REPORTED, **changes),
            conditions=conditions,
            follows_length=False,
            console=Console(file=io.StringIO()),
        )

    return build


@pytest.fixture
def evaluation(evaluation_of):
    return evaluation_of(lambda position: 1 + 4 * position**-0.5)


@pytest.fixture
def curves(evaluation):
    return evaluation.curves


def printed(curves, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_report(curves))
    return console.file.getvalue()


def test_json_holds_every_figure_and_what_it_depends_on(evaluation, curves, conditions, tmp_path):
    json_path, *_ = write_reports(evaluation, tmp_path / "evaluation")
    report = json.loads(json_path.read_text())
    assert report["conditions"] == asdict(conditions)
    assert report["options"] == asdict(REPORTED)
    assert report["unreached_lengths"] == [65536]
    assert report["scored"]["documents"] == 2
    assert report["scored"]["anchors_in_corpus"] == 5
    assert [row["length"] for row in report["ppl_at_length"]] == [128, 512, 1024]
    for row in report["ppl_at_length"]:
        score = curves.at_length[row["length"]]
        assert row["perplexity"] == score.perplexity
        assert row["bits_per_byte"] == score.bits_per_byte
        assert row["perplexity_macro"] == curves.at_length_macro[row["length"]]
        assert row["targets"] == row["bytes"] == 2 * (row["length"] - 1)
        assert row["beyond_training_length"] is (row["length"] > 512)
    assert [row["targets"] for row in report["ppl_vs_context"]] == [3 * 64] * 3
    assert [row["beyond_training_length"] for row in report["loss_by_position"]] == [False] * 9 + [True]


def test_csv_and_json_agree(evaluation, tmp_path):
    json_path, csv_path, *_ = write_reports(evaluation, tmp_path)
    report = json.loads(json_path.read_text())
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 + 3 + 10
    for row in rows:
        metric = report[row["metric"]]
        (same,) = [
            other for other in metric if all(str(other.get(key, "")) == row[key] for key in ("length", "start", "stop"))
        ]
        assert all(str(value) == row[key] for key, value in same.items())


def test_figures_that_are_not_finite_are_null(evaluation_of, tmp_path):
    evaluation = evaluation_of(lambda position: torch.where(position > 512, 1e6, 1.0))
    json_path, csv_path, png_path, _ = write_reports(evaluation, tmp_path)
    report = json.loads(json_path.read_text())
    assert [row["perplexity"] is None for row in report["ppl_at_length"]] == [False, False, True]
    assert all(math.isfinite(row["loss"]) for row in report["ppl_at_length"])
    assert "inf" in printed(evaluation.curves)
    assert "inf" not in csv_path.read_text()
    assert png_path.stat().st_size > 10_000


def test_a_broken_model_is_reported_not_hidden(evaluation_of, tmp_path):
    evaluation = evaluation_of(lambda position: torch.full_like(position, torch.nan))
    write_reports(evaluation, tmp_path)
    assert as_json(evaluation.curves)["ppl_at_length"][0]["loss"] is None
    assert "nan" in printed(evaluation.curves)


def test_the_table_shows_figures_flags_and_what_was_scored(curves):
    text = printed(curves)
    row = next(line for line in text.splitlines() if line.lstrip().startswith("1,024"))
    assert f"{curves.at_length[1024].perplexity:#.4g}" in row
    assert f"{curves.vs_context[1024].perplexity:#.4g}" in row
    assert "1,024 *" in row
    assert "* beyond the training length of 512 tokens" in text
    assert "Not scored: 65,536; the longest document has 3,000 tokens." in text
    assert "first 1,024 tokens of 2 documents, of 3 that long among 4" in text
    assert "64 tokens before each of 3 anchors, of 5" in text
    assert "evenly spaced" in text
    assert "learned positions; sdpa_flash attention, float32 on cpu" in text.replace("\n", " ")


def test_the_table_fits_eighty_columns(curves):
    lines = printed(curves, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_rows_are_plain_values(curves):
    rows = [row for rows in rows_by_metric(curves).values() for row in rows]
    assert {type(value) for row in rows for value in row.values()} == {int, float, bool}


def test_the_plot_is_a_wide_picture_with_three_curves(evaluation, tmp_path):
    _, _, png_path, _ = write_reports(evaluation, tmp_path)
    pixels = matplotlib.image.imread(png_path)
    height, width, _ = pixels.shape
    assert width > 1500 and 2 < width / height < 4
    thirds = [pixels[:, third * width // 3 : (third + 1) * width // 3, :3].reshape(-1, 3) for third in range(3)]
    colours = [matplotlib.colors.to_rgb(code) for code in (BLUE, ORANGE, GREEN)]
    for third, colour in zip(thirds, colours, strict=True):
        assert (abs(third - np.array(colour)) < 0.02).all(axis=1).sum() > 300


def test_windows_key_tokens_and_lm_evals_figures_are_reported(evaluation_of, tmp_path):
    evaluation = evaluation_of(
        lambda position: 1 + 4 * position**-0.5, lengths=[1024], window=256, stride=128, key_tokens="self"
    )
    json_path, csv_path, _, table_path, keys_path = write_reports(evaluation, tmp_path)
    report = json.loads(json_path.read_text())
    (row,) = report["ppl_strided"]
    assert (row["window"], row["stride"]) == (256, 128)
    assert row["targets"] == row["bytes"] == 1099 + 2999  # of 4 documents 2, evenly spaced
    assert row["words"] == 1099 // 5 + 2999 // 5
    assert row["byte_perplexity"] == pytest.approx(2 ** row["bits_per_byte"])
    assert row["word_perplexity"] == pytest.approx(math.exp(row["loss"] * row["targets"] / row["words"]))
    assert row["beyond_training_length"] is False
    (keys,) = report["key_ppl"]
    assert (keys["perplexity"], keys["targets"], keys["scored_targets"]) == (None, 0, 2 * 1023)
    assert report["options"]["prefix"] == "document"
    with csv_path.open(newline="") as file:
        assert {line["metric"] for line in csv.DictReader(file)} >= {"ppl_strided", "key_ppl"}
    text = printed(evaluation.curves, width=80)
    assert "window 256, stride 128" in text and "no key target" in text
    assert "2 whole documents of 4, each target once with up to 256 tokens" in " ".join(text.split())
    _, facts = read_table(table_path)
    assert facts["conditions"]["corpus_fingerprint"] == "3f9a12cd" and facts["options"]["stride"] == 128
    assert keys_path.exists()
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_prefix_lm_evals_figures_are_left_out(random_stream, byte_counts, conditions):
    """They are of whole texts, whose first token is then not scored."""
    options = replace(REPORTED, lengths=[128], window=64, stride=64, prefix="none")
    curves = evaluate_perplexity(
        lambda inputs, targets: torch.ones(inputs.shape),
        Documents(random_stream(200), "none"),
        bytes_per_token=byte_counts,
        count_words=len,
        options=options,
        conditions=conditions,
        follows_length=False,
        console=Console(file=io.StringIO()),
    ).curves
    (row,) = rows_by_metric(curves)["ppl_strided"]
    assert row["targets"] == row["bytes"] == 198
    assert "word_perplexity" not in row
    assert "nowhere: a document's first token is not scored" in " ".join(printed(curves).split())


def test_what_was_fed_and_how_long_it_took_is_reported(evaluation, tmp_path):
    json_path, *_ = write_reports(evaluation, tmp_path)
    cost = json.loads(json_path.read_text())["cost"]
    assert cost["tokens"] == 2 * 1024 + 3 * (128 + 512 + 1024)
    assert cost["seconds"] > 0 and cost["peak_memory_gib"] is None
    assert f"{cost['tokens']:,} tokens went through the model in" in printed(evaluation.curves)


def test_without_anchors_nothing_is_said_of_context(evaluation_of, tmp_path):
    evaluation = evaluation_of(lambda position: 1 + 4 * position**-0.5, max_anchors=0)
    json_path, *_ = write_reports(evaluation, tmp_path)
    report = json.loads(json_path.read_text())
    assert report["ppl_vs_context"] == [] and len(report["ppl_at_length"]) == 3
    assert report["cost"]["tokens"] == 2 * 1024
    text = printed(evaluation.curves)
    assert "Context: not scored, for there are no anchors." in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("1,024"))
    assert row.split()[-2:] == ["-", "-"]
