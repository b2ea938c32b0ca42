"""The model of attention's traffic as one picture of three panels: bytes over length, the roofline, time over length.

A variant has one colour in all panels. The passes asked for are added up.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashtrain.charts import BLUE, GREEN, INK, MUTED, ORANGE, short_count, title, token_axis
from flashtrain.performance.explanation import Case, Setting, at_length

COLORS = {"standard": ORANGE, "flash_v1": GREEN, "flash_v2": BLUE}


def save_plot(cases: list[Case], setting: Setting, path: Path) -> None:
    """Write a PNG."""
    lengths = list(dict.fromkeys(case.length for case in cases))
    variants = list(dict.fromkeys(case.variant for case in cases))
    passes = " and ".join(dict.fromkeys(case.pass_name for case in cases))
    figure = Figure(figsize=(17, 5), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    moved, roofline, time = figure.subplots(1, 3)
    for variant in variants:
        own = [[case for case in at_length(cases, length) if case.variant == variant] for length in lengths]
        style = {"color": COLORS[variant], "linewidth": 2, "marker": "o", "markersize": 4}
        moved.plot(lengths, [_sum(group, "hbm_bytes") for group in own], label=f"{variant}, from HBM", **style)
        asked = [_sum(group, "asked_bytes") for group in own]
        dots = style | {"linewidth": 1, "linestyle": ":", "marker": ""}
        moved.plot(lengths, asked, label=f"{variant}, asked for", **dots)
        time.plot(lengths, [_sum(group, "seconds") for group in own], label=variant, **style)
        taken = [
            (length, sum(case.seconds for case in group))
            for length, group in zip(lengths, own, strict=True)
            if all(case.seconds for case in group)
        ]
        if taken:
            crosses = style | {"linestyle": ":", "marker": "x"}
            time.plot(*zip(*taken, strict=True), label=f"{variant}, measured", **crosses)
    for axes, label, text, subtitle in (
        (moved, "bytes", "Bytes moved", f"{passes.capitalize()}; what L2 serves is asked for, not from HBM"),
        (time, "seconds", "Least time", f"{passes.capitalize()}; larger of FLOPs / rate and bytes / bandwidth"),
    ):
        axes.set_yscale("log")
        axes.set(xlabel="length, tokens", ylabel=label)
        token_axis(axes, lengths)
        title(axes, text, subtitle)
        axes.legend(frameon=False, fontsize=9)
    _roofline(roofline, at_length(cases, setting.shape.q_len), setting)
    figure.supxlabel(setting.title, fontsize=9, color=MUTED)
    figure.savefig(path)


def _sum(group: list[Case], name: str) -> float:
    return sum(getattr(case.estimate, name) for case in group)


def _roofline(axes: Axes, here: list[Case], setting: Setting) -> None:
    """Each case at its FLOPs per byte of HBM: the speed that its floor allows, and a cross at the one measured."""
    rates = setting.rates
    found = [case.estimate for case in here]
    low = min([rates.ridge, *(one.intensity for one in found)]) / 4
    high = max([rates.ridge, *(one.intensity for one in found)]) * 4
    intensity = np.geomspace(low, high, 200)
    axes.plot(intensity, np.minimum(rates.flops, intensity * rates.bandwidth) / 1e12, color=INK, linewidth=1.5)
    for case in here:
        one, color = case.estimate, COLORS[case.variant]
        marker = "o" if case.pass_name == "forward" else "s"
        axes.plot(one.intensity, one.flops / one.seconds / 1e12, marker, color=color, markersize=8)
        if case.seconds:
            axes.plot(one.intensity, one.flops / case.seconds / 1e12, "x", color=color, markersize=8)
        axes.annotate(
            f"{case.variant} {case.pass_name}",
            (one.intensity, one.flops / one.seconds / 1e12),
            xytext=(6, -12 if case.pass_name == "forward" else 8),
            textcoords="offset points",
            fontsize=8,
            color=color,
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte of HBM", ylabel="TFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    kind = "measured" if rates.measured else "data sheet"
    title(axes, f"Roofline at {short_count(setting.shape.q_len)}", f"{setting.device.label}, {kind}")
