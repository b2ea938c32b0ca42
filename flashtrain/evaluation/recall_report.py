"""Recall for people and programs: a terminal table, JSON, CSV, a heat map, and the table of answers as parquet.

Nothing is computed here.
"""

import csv
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Group
from rich.text import Text

from flashtrain.charts import INK, MUTED, short_count, title
from flashtrain.evaluation.recall import KEYS, NUM_DEPTHS, Recall, RecallEvaluation
from flashtrain.evaluation.report import describe_model, marked, plain_table
from flashtrain.evaluation.table import write_table

RECALL_FILE = "recall.json"
CSV_COLUMNS = [
    "metric",
    "length",
    "depth_from",
    "depth_to",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "loss",
    "correct",
    "targets",
    "beyond_training_length",
]


def write_recall(evaluation: RecallEvaluation, folder: Path) -> list[Path]:
    """Write recall.json, .csv and .png and targets.parquet into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (RECALL_FILE, "recall.csv", "recall.png", "targets.parquet")]
    json_path, csv_path, png_path, table_path = paths
    rows, facts = rows_by_metric(evaluation), _facts(evaluation)
    report = rows | facts | {"cost": asdict(evaluation.cost)}
    json_path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with csv_path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        for metric, of_metric in rows.items():
            writer.writerows({"metric": metric} | row for row in of_metric)
    save_heat_map(evaluation, png_path)
    write_table(evaluation.table, table_path, facts)
    return paths


def rows_by_metric(evaluation: RecallEvaluation) -> dict[str, list[dict]]:
    """One row of plain values per length, and one per length and depth; low and high are of a 95 % interval."""

    def figures(recall: Recall, length: int) -> dict:
        low, high = recall.interval
        return {
            "accuracy": recall.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "loss": recall.loss,
            "correct": recall.correct,
            "targets": recall.targets,
            "beyond_training_length": evaluation.beyond_training(length),
        }

    return {
        "recall_at_length": [
            {"length": length} | figures(recall, length) for length, recall in evaluation.at_length.items()
        ],
        "recall_by_depth": [
            {"length": length, "depth_from": depth / NUM_DEPTHS, "depth_to": (depth + 1) / NUM_DEPTHS}
            | figures(recall, length)
            for (length, depth), recall in evaluation.by_depth.items()
        ],
    }


def _facts(evaluation: RecallEvaluation) -> dict:
    options = asdict(evaluation.options)
    return {
        "chance": 1 / evaluation.num_values,
        "documents_of_each_length": evaluation.documents,
        "options": {key: options[key] for key in KEYS if key in options},
        "conditions": asdict(evaluation.conditions),
    }


def terminal_recall(evaluation: RecallEvaluation) -> Group:
    """Accuracy in percent, a column for each length and a row for each depth, then how it was measured."""
    table = plain_table("Recall by depth and length, % of answers")
    table.add_column("depth")
    for length in evaluation.at_length:
        table.add_column(marked(f"{length:,}", evaluation.beyond_training(length)), justify="right")
    for depth in range(NUM_DEPTHS):
        of_lengths = (evaluation.by_depth.get((length, depth)) for length in evaluation.at_length)
        table.add_row(
            f"{depth / NUM_DEPTHS:.1f} to {(depth + 1) / NUM_DEPTHS:.1f}",
            *(_percent(recall) if recall else "-  " for recall in of_lengths),
        )
    table.add_section()
    table.add_row("all", *(_percent(recall) for recall in evaluation.at_length.values()))
    table.add_row("answers", *(f"{recall.targets:,}  " for recall in evaluation.at_length.values()))
    return Group(table, "", Text("\n".join(_sentences(evaluation)), style="dim"))


def _percent(recall: Recall) -> str:
    return f"{100 * recall.accuracy:.1f}  "


def _sentences(evaluation: RecallEvaluation) -> list[str]:
    longest = max(evaluation.at_length)
    beyond = [f"* beyond the training length of {evaluation.conditions.training_length:,} tokens"]
    return [
        *(beyond if evaluation.beyond_training(longest) else []),
        f"{evaluation.documents:,} documents of each length, L tokens fed with the answers before each query as they "
        f"should be. Depth 0 is the first pair, 1 the last before the queries. A guess is right in "
        f"{1 / evaluation.num_values:.2%}.",
        f"{describe_model(evaluation.conditions)}.",
        str(evaluation.cost),
    ]


def save_heat_map(evaluation: RecallEvaluation, path: Path) -> None:
    """Write a PNG of accuracy with a column for each length and a row for each depth."""
    lengths = list(evaluation.at_length)
    figure = Figure(figsize=(2.6 + 0.8 * len(lengths), 5.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    cells = np.full((NUM_DEPTHS, len(lengths)), np.nan)
    for (length, depth), recall in evaluation.by_depth.items():
        cells[depth, lengths.index(length)] = recall.accuracy
    image = axes.imshow(cells, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for (depth, place), accuracy in np.ndenumerate(cells):
        text = "-" if np.isnan(accuracy) else f"{100 * accuracy:.0f}"
        color = "white" if accuracy > 0.6 else INK
        axes.text(place, depth, text, ha="center", va="center", fontsize=9, color=color)
    beyond = [evaluation.beyond_training(length) for length in lengths]
    if any(beyond) and not all(beyond):
        axes.axvline(beyond.index(True) - 0.5, color=MUTED, linestyle="--")
    axes.set_xticks(range(len(lengths)), [short_count(length) for length in lengths])
    axes.set_yticks(range(NUM_DEPTHS), [f"{depth / NUM_DEPTHS:.1f}" for depth in range(NUM_DEPTHS)])
    axes.set(xlabel="L, tokens", ylabel="depth of the pair: 0 is the first")
    title(axes, "Recall", f"% of answers; a guess: {100 / evaluation.num_values:.2g}")
    figure.colorbar(image, ax=axes, label="accuracy")
    given = evaluation.conditions
    footer = f"{given.model} at step {given.step:,}   ·   {given.attention}, {given.dtype}"
    figure.supxlabel(footer, fontsize=9, color=MUTED)
    figure.savefig(path)
