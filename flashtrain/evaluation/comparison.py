"""Finished evaluations side by side, of several runs or of one under several conditions: a table, files, a picture.

Nothing is scored here: figures are those of each evaluation's perplexity.json. Perplexities compare where text and
tokenizer are the same; with other tokenizers bits per byte do, and other text is refused.
"""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashtrain.charts import LINES, title
from flashtrain.errors import UserError
from flashtrain.evaluation.plot import shade_beyond, style_curve, style_stairs, three_panels
from flashtrain.evaluation.recall_report import RECALL_FILE
from flashtrain.evaluation.report import CSV_COLUMNS, JSON_FILE, figure_text

PERPLEXITY, LOSS, BITS_PER_BYTE = "perplexity", "loss", "bits_per_byte"
UNITS = {PERPLEXITY: "perplexity", LOSS: "loss, nats per token", BITS_PER_BYTE: "bits per byte"}
# metric -> the fields that say which of its rows one is
KEYS = {
    "ppl_at_length": ("length",),
    "ppl_vs_context": ("length",),
    "loss_by_position": ("start", "stop"),
    "ppl_strided": ("window", "stride"),
    "key_ppl": ("length", "evaluator"),
}


@dataclass(frozen=True)
class Finished:
    """One evaluation that was made."""

    name: str
    """The folder as the user named it."""
    report: dict
    """Its perplexity.json."""

    @property
    def conditions(self) -> dict:
        return self.report["conditions"]

    def values(self, metric: str, measure: str) -> dict[tuple, float]:
        """A measure of each row of a metric, NaN where it is not finite."""
        return {
            tuple(row.get(key) for key in KEYS[metric]): math.nan if row.get(measure) is None else row[measure]
            for row in self.report.get(metric, [])
        }


def read_finished(folder: str, evaluations: str) -> Finished:
    """The evaluation in `folder`, or the newest of the run there, whose evaluations lie in its folder `evaluations`.

    Raises UserError where there is none, or one of an older version.
    """
    found = [Path(folder) / JSON_FILE, *(Path(folder) / evaluations).glob(f"*/{JSON_FILE}")]
    found = [path for path in found if path.is_file()]
    if not found and [*Path(folder).glob(RECALL_FILE), *(Path(folder) / evaluations).glob(f"*/{RECALL_FILE}")]:
        raise UserError(f"{folder} has an evaluation of recall, and comparisons are of perplexity; leave it out")
    if not found:
        raise UserError(
            f"{folder} is no evaluation and no run with one; make one with python -m flashtrain.evaluate run={folder}"
        )
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    try:
        report = json.loads(newest.read_text(encoding="utf-8"))
        report["conditions"]["text_fingerprint"], report["conditions"]["tokenizer_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{newest} is damaged or of an older version; evaluate its run again") from None
    return Finished(folder, report)


def measure_of(finished: list[Finished]) -> str:
    """What compares them: perplexity, or bits per byte where tokenizers differ. Raises UserError for other text."""
    first = finished[0]
    for other in finished[1:]:
        if other.conditions["text_fingerprint"] != first.conditions["text_fingerprint"]:
            raise UserError(
                f"{first.name} is of the text {first.conditions['corpus']} and {other.name} of "
                f"{other.conditions['corpus']}, or of other parts of it; figures of other text do not compare"
            )
    tokenizers = {one.conditions["tokenizer_fingerprint"] for one in finished}
    return PERPLEXITY if len(tokenizers) == 1 else BITS_PER_BYTE


def terminal_comparison(finished: list[Finished]) -> Group:
    """A table with a column for each evaluation, then what it is about and in what they differ."""
    measure = measure_of(finished)
    table = Table(title=UNITS[measure].capitalize(), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for one in finished:
        table.add_column(one.name, justify="right", overflow="fold")
    for metric, words in (
        ("ppl_at_length", "first {:,} tokens"),
        ("ppl_vs_context", "{:,} tokens of context"),
        ("ppl_strided", "window {:,}, stride {:,}"),
        ("key_ppl", "key tokens in {:,}, of {}"),
    ):
        columns = [one.values(metric, measure) for one in finished]
        for key in sorted({key for values in columns for key in values}):
            table.add_row(words.format(*key), *(_cell(values, key) for values in columns))
        table.add_section()
    return Group(table, Text("\n".join(_sentences(finished, measure)), style="dim"))


def write_comparison(finished: list[Finished], folder: Path) -> list[Path]:
    """Write comparison.json, .csv (a row for each figure of each evaluation) and .png; return their paths."""
    measure = measure_of(finished)
    paths = [folder / f"comparison.{suffix}" for suffix in ("json", "csv", "png")]
    reports = [{"evaluation": one.name} | one.report for one in finished]
    paths[0].write_text(json.dumps({"measure": measure, "evaluations": reports}, indent=2) + "\n", encoding="utf-8")
    with paths[1].open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["evaluation", *CSV_COLUMNS])
        writer.writeheader()
        for one in finished:
            for metric in KEYS:
                rows = one.report.get(metric, [])
                writer.writerows({"evaluation": one.name, "metric": metric} | row for row in rows)
    save_overlay(finished, paths[2])
    return paths


def save_overlay(finished: list[Finished], path: Path) -> None:
    """Write a PNG of the three panels with a line for each evaluation."""
    measure = measure_of(finished)
    by_position = LOSS if measure == PERPLEXITY else measure
    figure, (length_axes, context_axes, position_axes) = three_panels()
    for axes, metric in ((length_axes, "ppl_at_length"), (context_axes, "ppl_vs_context")):
        columns = [one.values(metric, measure) for one in finished]
        for number, values in enumerate(columns):
            lengths = [length for (length,) in values]
            axes.plot(lengths, list(values.values()), **_line(number), marker="o", markersize=5)
        ticks = sorted({length for values in columns for (length,) in values})
        style_curve(axes, ticks, [value for values in columns for value in values.values()], UNITS[measure])
    edges = set()
    for number, one in enumerate(finished):
        values = one.values("loss_by_position", by_position)
        own_edges = sorted({edge for positions in values for edge in positions})
        position_axes.stairs(list(values.values()), own_edges, baseline=None, **_line(number), label=one.name)
        edges |= set(own_edges)
    style_stairs(position_axes, sorted(edges), UNITS[by_position])
    title(length_axes, "At length", "first L tokens")
    title(context_axes, "Against context", "L tokens fed, the same targets")
    title(position_axes, "By position", "mean over the targets in each range of positions")
    lengths = {one.conditions["training_length"] for one in finished}
    if len(lengths) == 1:
        for axes in (length_axes, context_axes, position_axes):
            shade_beyond(axes, *lengths)
    figure.legend(loc="outside lower center", ncols=min(len(finished), 3), frameon=False, fontsize=9)
    figure.savefig(path)


def _line(number: int) -> dict:
    style = ("-", "--", ":")[number // len(LINES) % 3]
    return {"color": LINES[number % len(LINES)], "linestyle": style, "linewidth": 2}


def _cell(values: dict[tuple, float], key: tuple) -> str:
    """A figure; - where it was not scored, n/a where it is not finite or there was no target."""
    if key not in values:
        return "-"
    return "n/a" if math.isnan(values[key]) else figure_text(values[key])


def _sentences(finished: list[Finished], measure: str) -> list[str]:
    """How they were made differently, and which figures are not of the same targets."""
    sentences = []
    named = [(one.name, one.conditions | {"prefix": one.report["options"]["prefix"]}) for one in finished]
    for key in named[0][1]:
        given = {name: conditions.get(key) for name, conditions in named}
        if len(set(given.values())) > 1 and not key.endswith("fingerprint"):
            sentences.append(f"{key}: {'; '.join(f'{value} in {name}' for name, value in given.items())}.")
    if measure == BITS_PER_BYTE:
        sentences.append("Tokenizers differ, and so do what L tokens are; bits per byte compare, perplexities do not.")
    for metric in KEYS:
        counts = [one.values(metric, "bytes") for one in finished]
        shared = set.intersection(*(set(values) for values in counts))
        if any(len({values[key] for values in counts}) > 1 for key in shared):
            sentences.append(
                f"{metric}: not of the same targets; evaluate with the same eval.max_documents and lengths."
            )
    return sentences
