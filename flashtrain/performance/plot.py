"""Speeds of attention as one picture: TFLOP/s over length, a panel for each head dimension, mask and pass."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashtrain.charts import BLUE, GREEN, MUTED, ORANGE, title, token_axis
from flashtrain.performance.attention import Measurement
from flashtrain.performance.report import Conditions, by_panel, panel_title

COLORS = (BLUE, ORANGE, GREEN, "#8a4fa3", "#b08a1f", "#c23b5e", "#3a9aa8", MUTED)
STYLES = ("-", "--", ":")
"""The lines of the first colours, of the same colours again, and again."""


def save_plot(measurements: list[Measurement], given: Conditions, path: Path) -> None:
    """Write a PNG. A variant or peer has one colour and style in all panels, and no point where it has no speed."""
    panels = list(by_panel(measurements).values())
    passes = list(dict.fromkeys(found.pass_name for found in measurements))
    variants = list(dict.fromkeys(found.variant for found in measurements if found.tflops is not None))
    figure = Figure(figsize=(6 * len(passes), 3.6 * len(panels) + 1), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    grid = figure.subplots(len(panels), len(passes), squeeze=False)
    for panel, row in zip(panels, grid, strict=True):
        for pass_name, axes in zip(passes, row, strict=True):
            _draw(axes, [found for found in panel if found.pass_name == pass_name], variants)
            title(axes, pass_name.capitalize(), panel_title(panel[0].problem, given))
    if variants:
        figure.legend(
            grid[0, 0].lines, variants, loc="outside upper left", ncols=2 * len(passes), frameon=False, fontsize=9
        )
    figure.supxlabel(f"{given.device}   ·   {given.dtype}   ·   {given.tokens:,} tokens", fontsize=9, color=MUTED)
    figure.savefig(path)


def _draw(axes: Axes, measurements: list[Measurement], variants: list[str]) -> None:
    lengths = sorted({found.problem.length for found in measurements})
    speeds = {(found.variant, found.problem.length): found.tflops for found in measurements}
    for index, variant in enumerate(variants):
        curve = [math.nan if (speed := speeds[variant, length]) is None else speed for length in lengths]
        again, place = divmod(index, len(COLORS))
        style = STYLES[again % len(STYLES)]
        axes.plot(lengths, curve, color=COLORS[place], linestyle=style, linewidth=2, marker="o", markersize=5)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="length, tokens", ylabel="TFLOP/s")
    token_axis(axes, lengths)
