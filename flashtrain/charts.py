"""What all pictures share: their ink, an axis of tokens, a title with a line below it."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

MAX_TICKS = 9  # labels that fit under a panel

INK, MUTED, GRID = "#1f2933", "#66727f", "#e6eaee"
BLUE, ORANGE, GREEN = "#1f66b0", "#c4551b", "#2c8053"
LINES = (BLUE, ORANGE, GREEN, "#7b4ba8", "#a8862b", "#b3386b")  # of a panel, in this order


def token_axis(axes: Axes, ticks: list[int]) -> None:
    """Make the horizontal axis one of tokens, log2 with labels at `ticks`, and the panel plain."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: max(1, math.ceil(len(ticks) / MAX_TICKS))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_count(int(tokens))))
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9.5)


def title(axes: Axes, text: str, subtitle: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
    axes.text(0, 1.04, subtitle, transform=axes.transAxes, fontsize=9, color=MUTED)


def short_count(count: int) -> str:
    """Multiples of 1,048,576 as 1M, 2M, ..., others of 1,024 as 1k, 2k, ...; any other count in full."""
    if count and count % 1024**2 == 0:
        return f"{count // 1024**2}M"
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
