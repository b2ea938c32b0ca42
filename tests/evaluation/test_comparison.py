import csv
import io
import json
from dataclasses import replace

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import torch
from rich.console import Console

from flashtrain.charts import LINES
from flashtrain.errors import UserError
from flashtrain.evaluation.comparison import measure_of, read_finished, terminal_comparison, write_comparison
from flashtrain.evaluation.report import write_reports


@pytest.fixture
def finish(random_stream, evaluation_of, conditions, tmp_path):
    """Write the evaluation of a model with a constant loss into a folder, and read it."""

    def build(name, loss, limit=None, conditions=conditions, **changes):
        def nll(inputs, targets):
            return torch.full(inputs.shape, loss)

        evaluation = evaluation_of(nll, random_stream(200, 300, 150), max_documents=limit, **changes)
        evaluation = replace(evaluation, curves=replace(evaluation.curves, conditions=conditions))
        write_reports(evaluation, tmp_path / name)
        return read_finished(str(tmp_path / name), "evaluation")

    return build


def printed(finished):
    console = Console(file=io.StringIO(), width=400)
    console.print(terminal_comparison(finished))
    return console.file.getvalue()


def test_figures_stand_side_by_side(finish):
    text = printed([finish("a", 1.0, window=50), finish("b", 2.0, lengths=[64, 128])])
    lines = {line.split("  ")[1].strip(): line.split() for line in text.splitlines() if line.startswith("  ")}
    assert lines["first 64 tokens"][-2:] == lines["64 tokens of context"][-2:] == ["2.718", "7.389"]
    assert lines["first 32 tokens"][-2:] == ["2.718", "-"]
    assert lines["window 50, stride 50"][-2:] == ["2.718", "-"]
    assert "not of the same targets" not in text


def test_what_differs_is_said(finish, conditions):
    other = finish("b", 2.0, limit=1, conditions=replace(conditions, attention="flash_v2"))
    text = printed([finish("a", 1.0), other])
    assert "attention: sdpa_flash in" in text and "flash_v2 in" in text
    assert "ppl_at_length: not of the same targets" in text
    assert "ppl_vs_context: not" not in text
    assert "model:" not in text


def test_other_tokenizers_are_compared_in_bits_per_byte(finish, conditions):
    finished = [
        finish("a", 1.0),
        finish("b", 2.0, conditions=replace(conditions, tokenizer="gpt2", tokenizer_fingerprint="9")),
    ]
    assert measure_of(finished) == "bits_per_byte"
    text = printed(finished)
    assert "Bits per byte" in text and "1.443" in text and "2.885" in text and "2.718" not in text


def test_another_text_is_refused(finish, conditions):
    other = finish("b", 2.0, conditions=replace(conditions, corpus="books/", text_fingerprint="2"))
    with pytest.raises(UserError, match="b of books/, or of other parts of it; figures of other text do not compare"):
        measure_of([finish("a", 1.0), other])


def test_files_have_all_rows_of_all(finish, tmp_path):
    finished = [finish("a", 1.0, window=50), finish("b", 200.0 * 5)]
    (tmp_path / "out").mkdir()
    json_path, csv_path, png_path = write_comparison(finished, tmp_path / "out")
    report = json.loads(json_path.read_text())
    assert report["measure"] == "perplexity"
    assert [one["evaluation"] for one in report["evaluations"]] == [one.name for one in finished]
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row["evaluation"] == finished[0].name]) == 3 + 3 + 7 + 1
    assert len([row for row in rows if row["evaluation"] == finished[1].name]) == 3 + 3 + 7
    assert {row["perplexity"] for row in rows if row["evaluation"] == finished[1].name} == {""}
    pixels = matplotlib.image.imread(png_path)[..., :3].reshape(-1, 3)
    shown = [(abs(pixels - np.array(matplotlib.colors.to_rgb(line))) < 0.02).all(axis=1).sum() for line in LINES[:2]]
    assert min(shown) > 200


def test_a_run_stands_for_its_newest_evaluation(finish, tmp_path):
    finish("run/evaluation/final", 1.0)
    finish("run/evaluation/2026-01-01_sdpa_flash", 2.0)
    assert read_finished(str(tmp_path / "run"), "evaluation").report["ppl_at_length"][0]["loss"] == 2.0


def test_a_folder_without_evaluation_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no evaluation and no run with one; make one with python -m"):
        read_finished(str(tmp_path), "evaluation")
    (tmp_path / "perplexity.json").write_text("{}")
    with pytest.raises(UserError, match="perplexity.json is damaged or of an older version; evaluate its run again"):
        read_finished(str(tmp_path), "evaluation")
