"""Perplexity curves for people and programs: terminal tables, JSON, CSV, and the table of targets as parquet.

Nothing is computed here. A figure that is not finite is null in JSON and empty in CSV.
"""

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashtrain.evaluation.key_tokens import LEAST_GAIN, MOST_NLL, KeyScore, write_keys
from flashtrain.evaluation.metrics import Score, byte_perplexity, word_perplexity
from flashtrain.evaluation.perplexity import Conditions, Evaluation, PerplexityCurves, Strided
from flashtrain.evaluation.plot import save_plot
from flashtrain.evaluation.table import write_table

JSON_FILE = "perplexity.json"
PREFIX_PLACES = {
    "document": "in front of every document",
    "window": "in front of every document and in place of each window's first token",
    "none": "nowhere: a document's first token is not scored",
}

CSV_COLUMNS = [
    "metric",
    "length",
    "window",
    "stride",
    "start",
    "stop",
    "perplexity",
    "perplexity_macro",
    "loss",
    "bits_per_byte",
    "word_perplexity",
    "byte_perplexity",
    "targets",
    "bytes",
    "words",
    "documents",
    "scored_targets",
    "evaluator_keys",
    "evaluator_keys_in_scored",
    "evaluator",
    "beyond_training_length",
]


def write_reports(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write perplexity.json, .csv and .png, targets.parquet, and key_tokens.parquet where there are any, into `folder`.

    Returns their paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curves = evaluation.curves
    json_path, csv_path, png_path = folder / JSON_FILE, folder / "perplexity.csv", folder / "perplexity.png"
    json_path.write_text(json.dumps(as_json(curves), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with csv_path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        for metric, rows in rows_by_metric(curves).items():
            writer.writerows({"metric": metric} | row for row in rows)
    save_plot(curves, png_path)
    table_path = folder / "targets.parquet"
    write_table(evaluation.table, table_path, facts(curves))
    paths = [json_path, csv_path, png_path, table_path]
    if evaluation.keys:
        paths.append(folder / "key_tokens.parquet")
        write_keys(evaluation.keys, paths[-1])
    return paths


def as_json(curves: PerplexityCurves) -> dict:
    """All figures with their counts, what was scored, under which conditions and at what cost; plain values only."""
    unreached = {"unreached_lengths": list(curves.unreached)}
    return rows_by_metric(curves) | unreached | facts(curves) | {"cost": asdict(curves.cost)}


def facts(curves: PerplexityCurves) -> dict:
    """What was scored, how, and of which model, as plain values."""
    return {
        "scored": asdict(curves.coverage) | {"description": describe_scored(curves)},
        "options": asdict(curves.options),
        "conditions": asdict(curves.conditions),
    }


def rows_by_metric(curves: PerplexityCurves) -> dict[str, list[dict]]:
    """One row of plain values per point of each curve."""

    def figures(score: Score, length: int) -> dict:
        return {
            "perplexity": _finite(score.perplexity),
            "loss": _finite(score.loss),
            "bits_per_byte": _finite(score.bits_per_byte),
            "targets": score.targets,
            "bytes": score.bytes,
            "documents": score.documents,
            "beyond_training_length": curves.beyond_training(length),
        }

    options, strided, keys = curves.options, curves.strided, curves.key_tokens
    rows = {
        "ppl_at_length": [
            {"length": length} | figures(score, length) | {"perplexity_macro": _finite(curves.at_length_macro[length])}
            for length, score in curves.at_length.items()
        ],
        "ppl_vs_context": [{"length": length} | figures(score, length) for length, score in curves.vs_context.items()],
        "loss_by_position": [
            {"start": start, "stop": stop} | figures(score, stop) for (start, stop), score in curves.by_position.items()
        ],
    }
    if strided:
        windows = {"window": options.window, "stride": options.stride}
        rows["ppl_strided"] = [windows | figures(strided.score, options.window) | _compatible(strided)]
    if keys:
        in_scored = {
            "length": curves.longest,
            "scored_targets": keys.scored,
            "evaluator": keys.choice.evaluator,
            "evaluator_keys": keys.chosen,
            "evaluator_keys_in_scored": keys.reached,
        }
        scored = figures(keys.score, curves.longest) if keys.score else {"perplexity": None, "targets": 0}
        rows["key_ppl"] = [in_scored | scored]
    return rows


def _compatible(strided: Strided) -> dict:
    """What lm-eval reports, of the same windows where stride == window; nothing where a first token is not scored."""
    if strided.words is None:
        return {}
    return {
        "word_perplexity": _finite(word_perplexity(strided.score, strided.words)),
        "byte_perplexity": _finite(byte_perplexity(strided.score)),
        "words": strided.words,
    }


def terminal_report(curves: PerplexityCurves) -> Group:
    """The curves as tables, then what was scored and under which conditions."""
    sentences = [describe_scored(curves), describe_conditions(curves), str(curves.cost)]
    if curves.beyond_training(curves.longest):
        sentences.insert(0, f"* beyond the training length of {curves.conditions.training_length:,} tokens")
    tables = [_length_table(curves), "", _position_table(curves), ""]
    if curves.strided:
        tables += [_strided_table(curves, curves.strided), ""]
    if curves.key_tokens:
        tables += [_key_table(curves.key_tokens), ""]
    return Group(*tables, Text("\n".join(sentences), style="dim"))


def describe_scored(curves: PerplexityCurves) -> str:
    """Which tokens the figures are about, and which lengths have none."""
    coverage, options = curves.coverage, curves.options
    sentences = [
        f"Length and position: the first {curves.longest:,} tokens of {coverage.documents:,} documents, of "
        f"{coverage.documents_long_enough:,} that long among {coverage.documents_in_corpus:,} in validation.",
        f"Context: the {options.targets_per_anchor:,} tokens before each of {coverage.anchors:,} anchors, of "
        f"{coverage.anchors_in_corpus:,} that lie {curves.longest:,} tokens apart in documents."
        if curves.vs_context
        else "Context: not scored, for there are no anchors.",
    ]
    if curves.strided:
        sentences.append(
            f"Windows: {coverage.whole_documents:,} whole documents of {coverage.whole_documents_in_corpus:,}, each "
            f"target once with up to {options.window:,} tokens before it"
            f"{f'; {coverage.too_short:,} documents have nothing to predict' if coverage.too_short else ''}."
        )
    if (keys := curves.key_tokens) is not None:
        sentences.append(
            f"Key tokens: of {keys.choice.evaluator}, {keys.chosen:,} of them in the first {keys.choice.longest:,} "
            f"tokens of its documents, of which {keys.reached:,} are in what was scored here; each gains over "
            f"{LEAST_GAIN:g} nats on a context of {keys.choice.short_context:,} tokens and a few more, and keeps less "
            f"than {MOST_NLL:g}."
        )
    shares = [
        (coverage.documents, coverage.documents_long_enough),
        (coverage.anchors, coverage.anchors_in_corpus if curves.vs_context else 0),
        (coverage.whole_documents, coverage.whole_documents_in_corpus if curves.strided else 0),
    ]
    if any(scored < there for scored, there in shares):
        sentences.append("Those scored are evenly spaced in corpus order.")
    if curves.unreached:
        lengths = ", ".join(f"{length:,}" for length in curves.unreached)
        sentences.append(f"Not scored: {lengths}; the longest document has {coverage.longest_document:,} tokens.")
    return " ".join(sentences)


def describe_conditions(curves: PerplexityCurves) -> str:
    """What the figures depend on."""
    given = curves.conditions
    return (
        f"{describe_model(given)}, {given.prefix_id} "
        f"{PREFIX_PLACES[curves.options.prefix]}; positions count from 0 in each window."
    )


def describe_model(given: Conditions) -> str:
    """Which model was evaluated, how it was computed and on what data; without a full stop."""
    return (
        f"{given.model} at step {given.step:,}, trained on {given.training_length:,} tokens in a row; "
        f"{given.positions}; "
        f"{given.attention} attention, {given.precision}; {given.corpus} corpus "
        f"{given.corpus_fingerprint[:8]}; {given.tokenizer} tokens"
    )


def _length_table(curves: PerplexityCurves) -> Table:
    table = plain_table("Perplexity of the first L tokens, and against L tokens of context")
    for heading in ("L", "ppl at length", "macro ppl", "bits/byte", "ppl vs context", "bits/byte"):
        table.add_column(heading, justify="right")
    for length, score in curves.at_length.items():
        in_context = curves.vs_context.get(length)
        table.add_row(
            marked(f"{length:,}", curves.beyond_training(length)),
            figure_text(score.perplexity),
            figure_text(curves.at_length_macro[length]),
            figure_text(score.bits_per_byte),
            *((figure_text(in_context.perplexity), figure_text(in_context.bits_per_byte)) if in_context else "--"),
        )
    for length in curves.unreached:
        table.add_row(marked(f"{length:,}", False), "not scored", style="dim")
    return table


def _position_table(curves: PerplexityCurves) -> Table:
    table = plain_table("Loss by position in the document")
    for heading in ("position", "loss", "ppl", "bits/byte", "targets"):
        table.add_column(heading, justify="right")
    for (start, stop), score in curves.by_position.items():
        positions = f"{start:,}" if stop == start + 1 else f"{start:,} to {stop - 1:,}"
        table.add_row(
            marked(positions, curves.beyond_training(stop)),
            figure_text(score.loss),
            figure_text(score.perplexity),
            figure_text(score.bits_per_byte),
            f"{score.targets:,}",
        )
    return table


def _strided_table(curves: PerplexityCurves, strided: Strided) -> Table:
    options, score = curves.options, strided.score
    table = plain_table(f"Whole documents, window {options.window:,}, stride {options.stride:,}")
    for heading in ("ppl", "bits/byte", "word ppl", "byte ppl", "targets", "documents"):
        table.add_column(heading, justify="right")
    compatible = _compatible(strided)
    table.add_row(
        figure_text(score.perplexity),
        figure_text(score.bits_per_byte),
        figure_text(word_perplexity(score, strided.words)) if compatible else "-",
        figure_text(byte_perplexity(score)) if compatible else "-",
        f"{score.targets:,}",
        f"{score.documents:,}",
    )
    return table


def _key_table(keys: KeyScore) -> Table:
    table = plain_table("Key tokens, which need long context")
    for heading in ("key ppl", "key targets", "share"):
        table.add_column(heading, justify="right")
    perplexity = figure_text(keys.score.perplexity) if keys.score else "no key target"
    table.add_row(perplexity, f"{keys.keys:,}", f"{keys.fraction:.2%}")
    return table


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)


def marked(text: str, beyond_training: bool) -> str:
    return f"{text} *" if beyond_training else f"{text}  "


def figure_text(value: float) -> str:
    """Four significant digits, from 1000 on whole numbers; inf and nan by name."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
