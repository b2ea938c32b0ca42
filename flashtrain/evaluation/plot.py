"""The perplexity curves as one picture: against length, against context, and loss by position."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter

from flashtrain.charts import BLUE, GREEN, INK, MUTED, ORANGE, title, token_axis
from flashtrain.evaluation.metrics import Score
from flashtrain.evaluation.perplexity import PerplexityCurves


def save_plot(curves: PerplexityCurves, path: Path) -> None:
    """Write a PNG of three panels over log2 axes of tokens, shaded beyond the training length."""
    figure, (length_axes, context_axes, position_axes) = three_panels()

    _perplexity_line(length_axes, curves.at_length, BLUE)
    documents = curves.coverage.documents
    title(length_axes, "Perplexity at length", f"first L tokens of the same documents ({documents:,})")

    _perplexity_line(context_axes, curves.vs_context, ORANGE)
    targets = curves.vs_context[curves.longest].targets if curves.vs_context else 0
    title(context_axes, "Perplexity against context", f"L tokens fed, the same targets ({targets:,})")

    _loss_stairs(position_axes, curves.by_position, GREEN)
    title(position_axes, "Loss by position", "mean over the targets in each range of positions")

    for axes in (length_axes, context_axes, position_axes):
        shade_beyond(axes, curves.conditions.training_length)
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
    style_curve(axes, list(scores), perplexities, "perplexity")


def _loss_stairs(axes: Axes, scores: dict[tuple[int, int], Score], color: str) -> None:
    edges = sorted({edge for positions in scores for edge in positions})
    axes.stairs([score.loss for score in scores.values()], edges, baseline=None, color=color, linewidth=2)
    style_stairs(axes, edges, "loss, nats per token")


def three_panels() -> tuple[Figure, list[Axes]]:
    """A wide picture: against length, against context, by position."""
    figure = Figure(figsize=(13, 4.4), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure, list(figure.subplots(1, 3))


def style_curve(axes: Axes, lengths: list[int], values: list[float], unit: str) -> None:
    """Label a panel of curves over numbers of tokens; a collapse leaves the rest of them readable."""
    axes.margins(x=0.09, y=0.15)
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) > 10 * min(finite):
        axes.set_yscale("log")
    axes.set(xlabel="L, tokens", ylabel=unit)
    token_axis(axes, lengths)


def style_stairs(axes: Axes, edges: list[int], unit: str) -> None:
    """Label a panel of stairs over ranges of positions."""
    axes.margins(x=0.04, y=0.1)
    axes.set(xlabel="position in the document, tokens", ylabel=unit)
    token_axis(axes, edges)


def shade_beyond(axes: Axes, training_length: int) -> None:
    left, right = axes.get_xlim()
    if training_length < right:
        axes.axvspan(max(left, training_length), right, color=MUTED, alpha=0.1, linewidth=0)
        axes.set_xlim(left, right)


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
