"""The model of attention's traffic as one picture of three panels: bytes over length, the roofline, time over length.

A variant has one colour in all panels; what is measured or counted is a cross. Over length, passes are added up.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flashtrain.charts import BLUE, GREEN, INK, MUTED, ORANGE, short_count, title, token_axis
from flashtrain.performance.explanation import Case, Counted, Setting, at_length

COLORS = {"standard": ORANGE, "flash_v1": GREEN, "flash_v2": BLUE}

# How a kind of number is drawn.
MODEL = {"marker": "o", "markersize": 4, "linewidth": 2}
ASKED = {"linestyle": ":", "linewidth": 1}
CROSS = {"marker": "x", "markersize": 7, "markeredgewidth": 1.5, "linestyle": ""}
MEASURED = CROSS | {"linestyle": ":", "linewidth": 1}
HOLLOW = {"markersize": 9, "markeredgewidth": 1.8, "fillstyle": "none", "linestyle": ""}
PASSES = {"forward": HOLLOW | {"marker": "o"}, "backward": HOLLOW | {"marker": "s"}}


def save_plot(cases: list[Case], counted: list[Counted], setting: Setting, path: Path) -> None:
    """Write a PNG."""
    lengths = list(dict.fromkeys(case.length for case in cases))
    passes = list(dict.fromkeys(case.pass_name for case in cases))
    figure = Figure(figsize=(17, 5), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    moved, roofline, time = figure.subplots(1, 3)
    _bytes(moved, cases, counted, passes)
    _roofline(roofline, at_length(cases, setting.shape.q_len), setting)
    _time(time, cases, passes)
    for axes in (moved, time):
        axes.set(xlabel="length, tokens", yscale="log")
        token_axis(axes, lengths)
    figure.supxlabel(setting.title, fontsize=9, color=MUTED)
    figure.savefig(path)


def _bytes(axes: Axes, cases: list[Case], counted: list[Counted], passes: list[str]) -> None:
    """From HBM and asked for, by the model, and as the hardware counted them where it counted all passes."""
    dram: dict[tuple[str, int], list[int]] = {}
    for one in counted:
        dram.setdefault((one.counters.variant, one.counters.length), []).append(one.counters.dram)
    for variant, groups in _by_variant(cases).items():
        _curve(axes, variant, {length: _sum(group, "hbm_bytes") for length, group in groups.items()}, MODEL)
        _curve(axes, variant, {length: _sum(group, "asked_bytes") for length, group in groups.items()}, ASKED)
        whole = {
            length: sum(found)
            for (name, length), found in dram.items()
            if name == variant and len(found) == len(passes)
        }
        _curve(axes, variant, whole, CROSS)
    kinds = {"from HBM, model": MODEL, "asked for": ASKED} | ({"DRAM, counted": CROSS} if counted else {})
    _legend(axes, cases, kinds, "upper left")
    axes.set_ylabel("bytes")
    title(axes, "Bytes moved", f"{_summed(passes)}; what L2 serves is asked for, not from HBM")


def _time(axes: Axes, cases: list[Case], passes: list[str]) -> None:
    """The floor, and what was measured where all passes were."""
    for variant, groups in _by_variant(cases).items():
        _curve(axes, variant, {length: _sum(group, "seconds") for length, group in groups.items()}, MODEL)
        taken = {
            length: sum(case.seconds for case in group)
            for length, group in groups.items()
            if all(case.seconds for case in group)
        }
        _curve(axes, variant, taken, MEASURED)
    measured = any(case.seconds for case in cases)
    _legend(axes, cases, {"least": MODEL} | ({"measured": MEASURED} if measured else {}), "upper left")
    axes.set_ylabel("seconds")
    text = "Time, least and measured" if measured else "Least time"
    title(axes, text, f"{_summed(passes)}; least: larger of FLOPs / rate and bytes / bandwidth")


def _roofline(axes: Axes, here: list[Case], setting: Setting) -> None:
    """Each case at its FLOPs per byte of HBM: the speed that its floor allows, and below it the one measured."""
    rates = setting.rates
    found = [case.estimate for case in here]
    low = min([rates.ridge, *(one.intensity for one in found)]) / 4
    high = max([rates.ridge, *(one.intensity for one in found)]) * 4
    intensity = np.geomspace(low, high, 200)
    axes.plot(intensity, np.minimum(rates.flops, intensity * rates.bandwidth) / 1e12, color=INK, linewidth=1.5)
    for case in here:
        one, color = case.estimate, COLORS[case.variant]
        least = one.flops / one.seconds / 1e12
        axes.plot(one.intensity, least, color=color, **PASSES[case.pass_name])
        if case.seconds:
            reached = one.flops / case.seconds / 1e12
            axes.plot([one.intensity] * 2, [least, reached], color=color, **ASKED)
            axes.plot(one.intensity, reached, color=color, **CROSS)
    kinds = {f"{case.pass_name}, model": PASSES[case.pass_name] for case in here}
    kinds |= {"measured": CROSS} if any(case.seconds for case in here) else {}
    _legend(axes, here, kinds, "lower right")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs for each byte of HBM", ylabel="TFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=9)
    kind = "measured" if rates.measured else "data sheet"
    title(axes, f"Roofline at {short_count(setting.shape.q_len)}", f"{setting.device.label}, {kind}")


def _by_variant(cases: list[Case]) -> dict[str, dict[int, list[Case]]]:
    """variant -> length -> its passes."""
    groups: dict[str, dict[int, list[Case]]] = {}
    for case in cases:
        groups.setdefault(case.variant, {}).setdefault(case.length, []).append(case)
    return groups


def _curve(axes: Axes, variant: str, points: dict[int, float], style: dict[str, object]) -> None:
    axes.plot(list(points), list(points.values()), color=COLORS[variant], **style)


def _legend(axes: Axes, cases: list[Case], kinds: dict[str, dict[str, object]], place: str) -> None:
    """The variants by their colours, and kinds of numbers, name -> style, by how they are drawn."""
    variants = dict.fromkeys(case.variant for case in cases)
    entries = [Line2D([], [], color=COLORS[name], linewidth=4, label=name) for name in variants]
    entries += [Line2D([], [], color=MUTED, label=name, **style) for name, style in kinds.items()]
    axes.legend(handles=entries, loc=place, frameon=False, fontsize=9)


def _sum(group: list[Case], name: str) -> float:
    return sum(getattr(case.estimate, name) for case in group)


def _summed(passes: list[str]) -> str:
    return " and ".join(passes).capitalize()
