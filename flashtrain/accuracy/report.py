"""The outcomes of a check for people and programs: terminal tables, and rows of plain values.

Nothing is measured here. A figure that is not finite is null in JSON.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashtrain.accuracy.measurement import Outcome
from flashtrain.kernels.attention import Deviation, support_table

TENSORS = ("out", "lse", "dq", "dk", "dv")

# Field of Support -> a heading short enough for a terminal.
SUPPORT_HEADINGS = {
    "name": "variant",
    "runs_on": "runs on",
    "dtypes": "dtypes",
    "head_dim": "head dim",
    "own_v_head_dim": "own V",
    "masks": "masks",
    "unequal_lengths": "Sq ≠ Sk",
    "grouped_heads": "GQA",
    "softcap": "softcap",
    "lse": "LSE",
    "deterministic": "deterministic",
}


def support_report(variants: Sequence[str]) -> Table:
    """What each of the variants can do, on this device or another."""
    table = _table("What each variant supports")
    for field, heading in SUPPORT_HEADINGS.items():
        table.add_column(heading, no_wrap=field == "name", overflow="fold")
    for row in support_table():
        if row.name in variants:
            table.add_row(*(getattr(row, field).replace("`", "") for field in SUPPORT_HEADINGS))
    return table


def terminal_report(outcomes: Sequence[Outcome]) -> Group:
    """The errors of each variant, how near they come to what is allowed, what was skipped and what failed."""
    parts = [_error_table(outcomes), "", _ratio_table(outcomes)]
    for heading, lines in (("skipped", _skipped(outcomes)), ("failed", _failed(outcomes))):
        if lines:
            parts += ["", Text(heading, style="bold"), *(Text(line) for line in lines)]
    return Group(*parts, "", summary(outcomes))


def summary(outcomes: Sequence[Outcome]) -> Text:
    passed, failed = sum(o.passes for o in outcomes), sum(o.fails for o in outcomes)
    skipped = len(outcomes) - passed - failed
    return Text(f"{passed} passed, {failed} failed, {skipped} skipped", style="bold red" if failed else "bold green")


def as_row(outcome: Outcome) -> dict:
    """Everything about an outcome as plain values."""
    return {
        "variant": outcome.variant,
        "case": asdict(outcome.case),
        "result": "skipped" if outcome.refused else "passed" if outcome.passes else "failed",
        "reason": outcome.refused or outcome.raised,
        "tensors": {name: _figures(deviation) for name, deviation in outcome.deviations.items()},
    }


def _figures(deviation: Deviation) -> dict:
    figures = {name: getattr(deviation, name) for name in ("error", "baseline", "allowed", "ratio")}
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return finite | {"passes": deviation.passes, "what": deviation.what}


def _error_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Largest error of each tensor / that of standard in the same dtype")
    for heading in ("variant", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("passed", *TENSORS):
        table.add_column(heading, justify="right", no_wrap=True)
    for (variant, dtype), group in _grouped(outcomes, lambda o: (o.variant, o.case.dtype)).items():
        ran = [outcome for outcome in group if outcome.refused is None]
        if ran:
            passed = Text(f"{sum(o.passes for o in ran)}/{len(ran)}", style="red" if any(o.fails for o in ran) else "")
            table.add_row(variant, dtype, passed, *(_errors(ran, name) for name in TENSORS))
    return table


def _errors(outcomes: Iterable[Outcome], name: str) -> str:
    found = [outcome.deviations[name] for outcome in outcomes if name in outcome.deviations]
    if not found:
        return "-"
    return f"{_short(max(d.error for d in found))}/{_short(max(d.baseline for d in found))}"


def _ratio_table(outcomes: Sequence[Outcome]) -> Table:
    table = _table("Largest error as a part of what is allowed (above 1 fails; - is refused)")
    table.add_column("variant", no_wrap=True)
    masks_first = sorted(outcomes, key=lambda outcome: outcome.case.group != outcome.case.mask)
    groups = list(dict.fromkeys(outcome.case.group for outcome in masks_first))
    for heading in groups:
        table.add_column(heading, justify="right", no_wrap=True)
    for variant, of_variant in _grouped(outcomes, lambda o: o.variant).items():
        if all(outcome.refused for outcome in of_variant):
            continue
        by_group = _grouped(of_variant, lambda o: o.case.group)
        table.add_row(variant, *(_ratio(by_group[group]) for group in groups))
    return table


def _ratio(outcomes: Sequence[Outcome]) -> Text:
    if any(outcome.raised for outcome in outcomes):
        return Text("raised", style="red")
    ran = [outcome for outcome in outcomes if outcome.refused is None]
    if not ran:
        return Text("-")
    return Text(f"{max(o.ratio for o in ran):.2f}", style="red" if any(o.fails for o in ran) else "")


def _skipped(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each variant and kind of reason, with the number of cases that it holds for.

    Of a reason as in "takes lengths from 2, not 1" the kind is what comes before ", not".
    """
    lines = []
    for variant, of_variant in _grouped(outcomes, lambda o: o.variant).items():
        refused = [outcome.refused for outcome in of_variant if outcome.refused is not None]
        kinds = Counter(reason.split(", not ")[0] for reason in refused)
        lines += [f"{variant} {kind} ({count} of {len(of_variant)} cases)" for kind, count in kinds.items()]
    return lines


def _failed(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each tensor that is beyond the rule, and for each call that raised."""
    lines = []
    for outcome in (outcome for outcome in outcomes if outcome.fails):
        wrong = [str(deviation) for deviation in outcome.deviations.values() if not deviation.passes]
        lines += [f"{outcome.variant}, {outcome.case}: {reason}" for reason in [*wrong, outcome.raised] if reason]
    return lines


def _grouped(outcomes: Iterable[Outcome], key) -> dict:
    groups: dict = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups


def _short(value: float) -> str:
    """Two digits, as in 3.1e-3."""
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
