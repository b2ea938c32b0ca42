"""The perplexity curves as one picture: against length, against context, and loss by position."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from flashtrain.evaluation.metrics import Score
from flashtrain.evaluation.perplexity import PerplexityCurves

MAX_TICKS = 9  # labels that fit under a panel

INK, MUTED, GRID = "#1f2933", "#66727f", "#e6eaee"
BLUE, ORANGE, GREEN = "#1f66b0", "#c4551b", "#2c8053"


def save_plot(curves: PerplexityCurves, path: Path) -> None:
    """Write a PNG of three panels over log2 axes of tokens, shaded beyond the training length."""
    figure = Figure(figsize=(13, 4.4), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    length_axes, context_axes, position_axes = figure.subplots(1, 3)

    _perplexity_line(length_axes, curves.at_length, BLUE)
    documents = curves.coverage.documents
    _title(length_axes, "Perplexity at length", f"first L tokens of the same documents ({documents:,})")

    _perplexity_line(context_axes, curves.vs_context, ORANGE)
    targets = curves.vs_context[curves.longest].targets
    _title(context_axes, "Perplexity against context", f"L tokens fed, the same targets ({targets:,})")

    _loss_stairs(position_axes, curves.by_position, GREEN)
    _title(position_axes, "Loss by position", "mean over the targets in each range of positions")

    for axes in (length_axes, context_axes, position_axes):
        _shade_beyond(axes, curves.conditions.training_length)
    figure.supxlabel(_footer(curves), fontsize=9, color=MUTED)
    figure.savefig(path)


def _perplexity_line(axes: Axes, scores: dict[int, Score], color: str) -> None:
    perplexities = [score.perplexity for score in scores.values()]
    axes.plot(list(scores), perplexities, color=color, linewidth=2, marker="o", markersize=5)
    for length, perplexity in zip(scores, perplexities, strict=True):
        if not math.isfinite(perplexity):
            continue
        label = axes.annotate(
            _figure(perplexity), (length, perplexity), (0, 8), textcoords="offset points", ha="center"
        )
        label.set(fontsize=8, color=INK, path_effects=[withStroke(linewidth=3, foreground="white")])
    axes.margins(x=0.09, y=0.15)
    if max(perplexities) > 10 * min(perplexities):  # so that a collapse leaves the rest of the curve readable
        axes.set_yscale("log")
    axes.set(xlabel="L, tokens", ylabel="perplexity")
    _token_axis(axes, list(scores))


def _loss_stairs(axes: Axes, scores: dict[tuple[int, int], Score], color: str) -> None:
    edges = sorted({edge for positions in scores for edge in positions})
    axes.stairs([score.loss for score in scores.values()], edges, baseline=None, color=color, linewidth=2)
    axes.margins(x=0.04, y=0.1)
    axes.set(xlabel="position in the document, tokens", ylabel="loss, nats per token")
    _token_axis(axes, edges)


def _token_axis(axes: Axes, ticks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: math.ceil(len(ticks) / MAX_TICKS)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(int(tokens))))
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, fontsize=9.5)


def _shade_beyond(axes: Axes, training_length: int) -> None:
    left, right = axes.get_xlim()
    if training_length < right:
        axes.axvspan(max(left, training_length), right, color=MUTED, alpha=0.1, linewidth=0)
        axes.set_xlim(left, right)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
    axes.text(0, 1.04, subtitle, transform=axes.transAxes, fontsize=9, color=MUTED)


def _footer(curves: PerplexityCurves) -> str:
    given = curves.conditions
    parts = [
        f"{given.model} at step {given.step:,}",
        f"{given.corpus}, {given.tokenizer} tokens",
        f"{given.attention}, {given.dtype}",
    ]
    if curves.beyond_training(curves.longest):
        parts.append(f"shaded: beyond the training length of {given.training_length:,} tokens")
    return "   ·   ".join(parts)


def _figure(perplexity: float) -> str:
    """Three significant digits below 1000; above, 1.4k, 58.6k, 12.2M."""
    if perplexity < 1000:
        return f"{perplexity:#.3g}".rstrip(".")
    return EngFormatter(places=1, sep="")(perplexity)


def _short(count: int) -> str:
    """1024 and its multiples as 1k, 2k, ...; any other count in full."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
