"""Speeds of attention for people and programs: terminal and markdown tables, and rows of plain values.

Nothing is timed here. A table holds one mask and head dimension, a row a variant or peer, a column a length and a
pass; the last, where speeds are relative to one of them, the geometric means of all cells, a column a pass.
"""

import math
from dataclasses import asdict, dataclass
from statistics import geometric_mean

from flashtrain.charts import short_count
from flashtrain.performance.attention import FLOPS_PER_VISIBLE_PAIR, Check, Measurement, Problem
from flashtrain.performance.masks import Masks
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.tables import SpeedTable, figure, markdown_parts, spread_note
from flashtrain.performance.timing import Timing


@dataclass(frozen=True)
class Conditions:
    """What all speeds of one report have in common."""

    device: str
    dtype: str
    tokens: int
    rounds: int
    interpreted: bool
    masks: Masks
    relative_to: str | None
    """The variant or peer that the others' speed is given as a multiple of; None: of none."""
    made_with: str
    """Versions, commit and command, in words."""


@dataclass(frozen=True)
class Multiples:
    """The speed of a variant or peer as a multiple of another's, in all cells of one pass where both have a speed."""

    variant: str
    pass_name: str
    values: dict[Problem, float]
    """cell -> multiple; there is at least one."""
    num_cells: int
    """Cells that were measured."""

    @property
    def mean(self) -> float:
        """Geometric."""
        return geometric_mean(self.values.values())

    @property
    def smallest(self) -> Problem:
        """The cell of the smallest multiple."""
        return min(self.values, key=self.values.__getitem__)


def multiples(measurements: list[Measurement], relative_to: str | None) -> list[Multiples]:
    """Those of all but `relative_to` itself, by pass, in the order of the measurements."""
    cells: dict[str, set[Problem]] = {}
    values: dict[tuple[str, str], dict[Problem, float]] = {}
    baselines = {(one.problem, one.pass_name): one.tflops for one in measurements if one.variant == relative_to}
    for found in measurements:
        cells.setdefault(found.pass_name, set()).add(found.problem)
        baseline = baselines.get((found.problem, found.pass_name))
        if None not in (found.tflops, baseline) and found.variant != relative_to:
            values.setdefault((found.variant, found.pass_name), {})[found.problem] = found.tflops / baseline
    return [Multiples(variant, name, some, len(cells[name])) for (variant, name), some in values.items()]


def speed_tables(measurements: list[Measurement], given: Conditions) -> list[SpeedTable]:
    """A table for each mask and head dimension, in the order of the measurements."""
    return [_speed_table(group, given) for group in by_panel(measurements).values()]


def multiples_tables(measurements: list[Measurement], given: Conditions) -> list[SpeedTable]:
    """One table of the geometric means and smallest of all cells' multiples; none where there are no multiples."""
    found = multiples(measurements, given.relative_to)
    if not found:
        return []
    passes = list(dict.fromkeys(one.pass_name for one in found))
    cells = {(one.variant, one.pass_name): _multiples_cell(one) for one in found}
    rows = {
        variant: [cells.get((variant, name), ["-"]) for name in passes]
        for variant in dict.fromkeys(one.variant for one in found)
    }
    title = f"geometric means over head dims, masks and lengths, relative to {given.relative_to}"
    return [SpeedTable(title, passes, rows, [], unit="mean, smallest")]


def by_panel(measurements: list[Measurement]) -> dict[tuple[int, str], list[Measurement]]:
    """The measurements that belong together, by head dimension and mask."""
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.problem.head_dim, measurement.problem.mask), []).append(measurement)
    return groups


def panel_title(problem: Problem, given: Conditions) -> str:
    """What the problems of a table or a panel have in common."""
    heads = f"{problem.num_q_heads} heads"
    if problem.num_kv_heads != problem.num_q_heads:
        heads += f" over {problem.num_kv_heads} KV heads"
    parts = [given.masks.label(problem.mask), f"head dim {problem.head_dim}", heads]
    return ", ".join(parts + ["interpreted"] * given.interpreted)


def describe(given: Conditions) -> str:
    """What the figures mean and depend on."""
    forward, backward = (FLOPS_PER_VISIBLE_PAIR[name] for name in ("forward", "backward"))
    sentences = [
        f"TFLOP/s on the visible area, and milliseconds: {forward} operations forward and {backward} backward for each "
        "pair of query and key that the mask shows, each head and each element of its dimension.",
        f"{given.tokens:,} tokens of {given.dtype} a call on {given.device}; medians of {given.rounds} interleaved "
        "rounds.",
    ]
    if given.interpreted:
        sentences.append("Triton's kernels were interpreted: their figures say nothing about a GPU.")
    if given.relative_to is not None:
        sentences.append(f"1.10x is a tenth more TFLOP/s than {given.relative_to}.")
    return " ".join(sentences)


def markdown(measurements: list[Measurement], given: Conditions) -> str:
    """All tables, what their figures mean and what they were made with, to be read as a file or pasted."""
    parts = [describe(given)]
    for table in speed_tables(measurements, given) + multiples_tables(measurements, given):
        parts += markdown_parts(table)
    return "\n\n".join([*parts, given.made_with]) + "\n"


def as_row(measurement: Measurement) -> dict[str, object]:
    """One measurement in plain values; times in milliseconds, in the order they were taken."""
    result = measurement.result
    timed = isinstance(result, Timing)
    return asdict(measurement.problem) | {
        "variant": measurement.variant,
        "pass": measurement.pass_name,
        "flops": measurement.flops,
        "tflops": measurement.tflops,
        "median_ms": 1e3 * result.median if timed else None,
        "quartiles_ms": [1e3 * seconds for seconds in result.quartiles] if timed else None,
        "readings_ms": [1e3 * seconds for seconds in result.seconds] if timed else None,
        "no_speed": None if timed else str(result),
        "detached": measurement.detached,
        "check": None if measurement.check is None else _check_row(measurement.check),
    }


def as_multiples_row(found: Multiples) -> dict[str, object]:
    """The multiples of one pass in plain values."""
    return {
        "variant": found.variant,
        "pass": found.pass_name,
        "geometric_mean": found.mean,
        "smallest": found.values[found.smallest],
        "smallest_at": asdict(found.smallest),
        "cells": len(found.values),
        "cells_measured": found.num_cells,
    }


def _check_row(check: Check) -> dict[str, object]:
    deviations = {
        name: {
            "error": _finite(deviation.error),
            "baseline": deviation.baseline,
            "allowed": deviation.allowed,
            "passes": deviation.passes,
        }
        for name, deviation in check.deviations.items()
    }
    return {"compared": check.compared, "not_finite": check.not_finite, "deviations": deviations}


def _speed_table(group: list[Measurement], given: Conditions) -> SpeedTable:
    baselines = {
        (found.problem.length, found.pass_name): found.tflops for found in group if found.variant == given.relative_to
    }
    can_do_some = {found.variant for found in group if _refusal(found) is None}
    headings, rows, notes = {}, {}, {}
    for found in group:
        column = (found.problem.length, found.pass_name)
        headings[column] = f"{short_count(found.problem.length)} {found.pass_name}"
        if found.variant in can_do_some:
            rows.setdefault(found.variant, []).append(_cell(found, baselines.get(column)))
        if (refusal := _refusal(found)) is not None:
            notes[f"{found.variant} {refusal}"] = None
        if found.detached:
            notes[f"{found.variant} takes no inputs that require gradients: it is timed on others"] = None
    spreads = [found.result.spread for found in group if isinstance(found.result, Timing)]
    if spreads:
        notes[spread_note(max(spreads))] = None
    return SpeedTable(panel_title(group[0].problem, given), list(headings.values()), rows, list(notes))


def _refusal(found: Measurement) -> str | None:
    return found.result.reason if isinstance(found.result, NoSpeed) else None


def _cell(found: Measurement, baseline: float | None) -> list[str]:
    if isinstance(found.result, NoSpeed):
        return [found.result.word]
    lines = [figure(found.tflops), f"{figure(1e3 * found.result.median)} ms"]
    return lines if baseline is None else [*lines, f"{found.tflops / baseline:.2f}x"]


def _multiples_cell(found: Multiples) -> list[str]:
    count, missing = len(found.values), found.num_cells - len(found.values)
    cells = f"{count} of {found.num_cells} cells" if missing else f"{count} cell{'s' * (count != 1)}"
    return [f"{found.mean:.3f}x", f"smallest {found.values[found.smallest]:.3f}x", cells]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
