"""What the model of traffic says about one setting, for people and programs: tables, and rows of plain values.

Nothing is computed here but sums of what came. walk_through.py says it in words.
"""

from dataclasses import asdict, dataclass

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flashtrain.charts import short_count
from flashtrain.kernels.attention import Intervals
from flashtrain.performance.attention import Measurement
from flashtrain.performance.counters import Counters
from flashtrain.performance.counting import Comparison
from flashtrain.performance.devices import Device
from flashtrain.performance.io import Launch, Shape, Work
from flashtrain.performance.operators import Operator
from flashtrain.performance.roofline import Estimate, Rates
from flashtrain.performance.timing import Timing
from flashtrain.performance.traffic import DIRECTIONS, bytes_by_matrix


@dataclass(frozen=True)
class Case:
    """One pass of a variant at one length."""

    variant: str
    pass_name: str
    length: int
    work: Work
    estimate: Estimate
    visible_flops: int
    """Of the pairs that the mask shows, as speeds are given in."""
    measurement: Measurement | None

    @property
    def seconds(self) -> float | None:
        """Measured."""
        timed = self.measurement is not None and isinstance(self.measurement.result, Timing)
        return self.measurement.result.median if timed else None


@dataclass(frozen=True)
class Counted:
    """The bytes of a case by the model, and by the hardware's counters."""

    estimate: Estimate
    counters: Counters

    @property
    def name(self) -> str:
        return f"{self.counters.variant} {self.counters.pass_name}"

    @property
    def ratio(self) -> float:
        """DRAM's bytes, counted over modelled."""
        return self.counters.dram / self.estimate.hbm_bytes


@dataclass(frozen=True)
class Setting:
    """What all cases of one explanation have in common."""

    device: Device
    rates: Rates
    nominal: Rates
    dtype: torch.dtype
    mask: str
    """In words."""
    shape: Shape
    """At the length that is walked through."""
    intervals: Intervals
    launch: Launch

    @property
    def title(self) -> str:
        shape = self.shape
        heads = noun("head", shape.num_q_heads)
        kv = "" if shape.group_size == 1 else f" over {shape.num_kv_heads} KV {noun('head', shape.num_kv_heads)}"
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.mask}, {shape.num_q_heads} {heads}{kv} of {shape.head_dim}, batch {shape.batch}, {name}, "
            f"{self.device.label}"
        )


def at_length(cases: list[Case], length: int) -> list[Case]:
    return [case for case in cases if case.length == length]


@dataclass(frozen=True)
class Sheet:
    title: str
    headings: list[str]
    """The first is that of the names of the rows."""
    rows: list[list[str]]
    """A cell may hold several lines."""


def sheets(cases: list[Case], setting: Setting, operators: list[Operator]) -> list[Sheet]:
    """All tables of one explanation."""
    length = setting.shape.q_len
    here = at_length(cases, length)
    return [
        Sheet(f"{short_count(length)} {noun('token', length)}: {setting.title}", *_overview(here)),
        Sheet("Bytes asked for, by matrix and direction", *_by_matrix(here)),
        Sheet("Over lengths: GiB asked for, GiB from HBM, and the least time", *_over_lengths(cases)),
        Sheet("Operators of a transformer block, forward, each alone", *_operators(operators, setting.rates)),
    ]


def count_sheet(found: list[Comparison], length: int) -> Sheet:
    """What programs moved when they ran, beside the model; the title says the length."""
    rows = [
        [
            f"{one.variant} {one.pass_name}",
            f"{one.counted.total():,}",
            f"{one.model.total():,}",
            "yes" if one.counted == one.model else "no",
        ]
        for one in found
    ]
    title = f"Elements at {length:,} {noun('token', length)}, counted as each runs in fp32, in the interpreter's tiles"
    return Sheet(title, ["", "counted", "model", "equal by matrix"], rows)


def counter_sheet(found: list[Counted]) -> Sheet:
    """What the hardware counted, beside the model."""
    headings = ["DRAM, model", "read", "written", "both", "both / model", "asked for", "through L2"]
    rows = [
        [
            f"{one.name}, {short_count(one.counters.length)}",
            data_size(one.estimate.hbm_bytes),
            data_size(one.counters.dram_read),
            data_size(one.counters.dram_written),
            data_size(one.counters.dram),
            figure(one.ratio),
            data_size(one.estimate.asked_bytes),
            data_size(one.counters.l2),
        ]
        for one in found
    ]
    return Sheet("DRAM bytes, counted by the hardware, beside the model", ["", *headings], rows)


def terminal_table(sheet: Sheet) -> Group:
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for index, heading in enumerate(sheet.headings):
        drawn.add_column(heading, justify="right" if index else "left")
    for row in sheet.rows:
        drawn.add_row(*row)
    return Group(Text(sheet.title, style="bold"), drawn)


def markdown(all_sheets: list[Sheet], text: list[str], made_with: str) -> str:
    """All tables, the text and what they were made with, to be read as a file or pasted."""
    parts = []
    for sheet in all_sheets:
        first, *headings = sheet.headings
        lines = [
            f"| {first} | {' | '.join(headings)} |",
            "|---|" + "---:|" * len(headings),
            *(f"| {' | '.join(cell.replace(chr(10), ', ') for cell in row)} |" for row in sheet.rows),
        ]
        parts += [sheet.title, "\n".join(lines)]
    return "\n\n".join([*parts, *text, made_with]) + "\n"


def _overview(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    measured = any(case.measurement for case in cases)
    headings = ["", "GFLOP", "asked for", "once each", "from HBM", "FLOP/byte", "bound", "least time"]
    rows = [
        [
            f"{case.variant} {case.pass_name}",
            figure(found.flops / 1e9),
            data_size(found.asked_bytes),
            data_size(found.compulsory_bytes),
            data_size(found.hbm_bytes),
            figure(found.intensity),
            found.bound + (f", {found.share_of_sms:.0%} of SMs" if found.share_of_sms < 1 else ""),
            duration(found.seconds),
            *(_measured(case) if measured else []),
        ]
        for case in cases
        for found in [case.estimate]
    ]
    return headings + (["measured", "TFLOP/s", "GB/s"] if measured else []), rows


def _measured(case: Case) -> list[str]:
    """Time, speed on the visible area, and the bytes that the model gives HBM, over that time."""
    if case.seconds is None:
        result = case.measurement.result if case.measurement else None
        return [getattr(result, "word", "-"), "-", "-"]
    speed, bandwidth = case.visible_flops / case.seconds, case.estimate.hbm_bytes / case.seconds
    return [duration(case.seconds), figure(speed / 1e12), figure(bandwidth / 1e9)]


def _by_matrix(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    columns = {f"{case.variant} {case.pass_name}": bytes_by_matrix(case.work.transfers) for case in cases}
    matrices = dict.fromkeys(matrix for moved in columns.values() for matrix, _ in moved)
    rows = [
        [
            f"{matrix} {direction}",
            *(data_size(moved[matrix, direction]) if moved[matrix, direction] else "-" for moved in columns.values()),
        ]
        for matrix in matrices
        for direction in DIRECTIONS
        if any(moved[matrix, direction] for moved in columns.values())
    ]
    return ["", *columns], rows


def _over_lengths(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    lengths = list(dict.fromkeys(case.length for case in cases))
    found = {(case.variant, case.pass_name, case.length): case for case in cases}
    rows = []
    for variant, pass_name in dict.fromkeys((case.variant, case.pass_name) for case in cases):
        row = [found[variant, pass_name, length] for length in lengths]
        lines = [
            f"{figure(case.estimate.asked_bytes / 2**30)}\n{figure(case.estimate.hbm_bytes / 2**30)}\n"
            f"{duration(case.estimate.seconds)}" + (f"\n{duration(case.seconds)} measured" if case.seconds else "")
            for case in row
        ]
        rows.append([f"{variant} {pass_name}", *lines])
    return ["", *map(short_count, lengths)], rows


def _operators(operators: list[Operator], rates: Rates) -> tuple[list[str], list[list[str]]]:
    return ["", "GFLOP", "moved", "FLOP/byte", "bound", "least time"], [
        [
            one.name,
            figure(one.flops / 1e9),
            data_size(one.bytes),
            figure(one.intensity),
            one.bound(rates),
            duration(one.seconds(rates)),
        ]
        for one in operators
    ]


def as_row(case: Case) -> dict[str, object]:
    """One case in plain values; times in seconds."""
    found = case.estimate
    return {
        "variant": case.variant,
        "pass": case.pass_name,
        "length": case.length,
        "flops": found.flops,
        "visible_flops": case.visible_flops,
        "asked_bytes": found.asked_bytes,
        "compulsory_bytes": found.compulsory_bytes,
        "touched_bytes": found.touched_bytes,
        "stays_in_l2": found.stays_in_l2,
        "passes": [asdict(one) for one in found.passes],
        "hbm_bytes": found.hbm_bytes,
        "flops_per_byte": found.intensity,
        "share_of_sms": found.share_of_sms,
        "bound": found.bound,
        "least_seconds": found.seconds,
        "measured_seconds": case.seconds,
        "transfers": [asdict(one) | {"bytes": one.bytes} for one in case.work.transfers],
    }


def as_counted_row(found: Counted) -> dict[str, object]:
    """One case that the hardware counted, in plain values, in bytes."""
    counters, model = found.counters, found.estimate
    return {
        "variant": counters.variant,
        "pass": counters.pass_name,
        "length": counters.length,
        "hbm_bytes": model.hbm_bytes,
        "dram_read_bytes": counters.dram_read,
        "dram_written_bytes": counters.dram_written,
        "dram_bytes": counters.dram,
        "dram_over_hbm": found.ratio,
        "asked_bytes": model.asked_bytes,
        "l2_bytes": counters.l2,
    }


def data_size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds / 1e-6)} us"


def noun(word: str, count: int) -> str:
    """The word, in the plural but for one."""
    return word if count == 1 else f"{word}s"


def figure(value: float) -> str:
    """Three significant digits, from 100 on whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
