"""Tables of speeds, for a terminal and in markdown: a row for each variant or peer, a column for each heading."""

from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

FAR_APART = 0.1
"""The spread above which a table warns."""


@dataclass(frozen=True)
class SpeedTable:
    title: str
    headings: list[str]
    rows: dict[str, list[list[str]]]
    """variant or peer -> for each heading the figures of a cell, the first before the others, or a word for them."""
    notes: list[str]
    """Who cannot do what, and how far readings lie apart."""
    unit: str = "TFLOP/s, ms"
    """Of the figures in a cell."""


def terminal_table(table: SpeedTable) -> Group:
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False)
    drawn.add_column(table.unit, overflow="fold")
    for heading in table.headings:
        drawn.add_column(heading, justify="right")
    for variant, cells in table.rows.items():
        drawn.add_row(variant, *(escape("\n".join(lines)) for lines in cells))
    return Group(Text(table.title, style="bold"), drawn, *(Text(note, style="dim") for note in table.notes))


def markdown_parts(table: SpeedTable) -> list[str]:
    """The table and, where it has notes, their list."""
    lines = [
        f"| {table.title} | {' | '.join(table.headings)} |",
        "|---|" + "---:|" * len(table.headings),
        *(
            f"| `{variant}` | {' | '.join(_beside(lines) for lines in cells)} |"
            for variant, cells in table.rows.items()
        ),
    ]
    return ["\n".join(lines), *(["\n".join(f"- {note}" for note in table.notes)] if table.notes else [])]


def spread_note(spread: float) -> str:
    """What the largest spread of a table says about it."""
    if spread > FAR_APART:
        return (
            f"readings lie far apart: up to {100 * spread:.0f} % from their median, the outer quarters left out; "
            "run again on a quiet machine"
        )
    return f"at least half of the readings of each lie within {100 * spread:.1f} % of their median"


def figure(value: float) -> str:
    """Three significant digits, from 100 on whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _beside(lines: list[str]) -> str:
    """A cell of a markdown table."""
    first, *rest = lines
    return (f"{first} ({', '.join(rest)})" if rest else first).replace("|", r"\|")
