"""Speeds of optimizer steps for people and programs: one table, a row a variant or peer, a column a length.

Nothing is timed here.
"""

from dataclasses import dataclass

from flashtrain.charts import short_count
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.tables import SpeedTable, figure, markdown_parts, spread_note
from flashtrain.performance.training_steps import StepSpeed


@dataclass(frozen=True)
class Conditions:
    """What all speeds of one report have in common."""

    model: str
    device: str
    computing: str
    """Dtypes and compilation, in words."""
    on_gpu: bool
    tokens: int
    """Of a step, but for longer rows, each of which is one."""
    warmup: int
    steps: int
    rounds: int
    relative_to: str | None
    """The variant or peer that the others' speed is given as a multiple of; None: of none."""
    made_with: str
    """Versions, commit and command, in words."""


@dataclass(frozen=True)
class Cell:
    length: int
    """Tokens in a row."""
    name: str
    """Of the variant or peer."""
    result: StepSpeed | NoSpeed
    product_rate: float | None
    """FLOP per second of a large matrix product, measured before; None where it was not."""

    @property
    def tokens_per_second(self) -> float | None:
        return None if isinstance(self.result, NoSpeed) else self.result.tokens_per_second

    @property
    def share(self) -> float | None:
        """Of the product rate, by the FLOPs of what the masks show."""
        flops = None if isinstance(self.result, NoSpeed) else self.result.flops
        return None if None in (flops, self.product_rate) else flops / self.product_rate


def describe(given: Conditions) -> str:
    """What the figures mean and depend on."""
    before = f"after {given.warmup} untimed" if given.warmup else "with none before to warm up"
    sentences = [
        f"Tokens per second of whole optimizer steps of {given.model} on random tokens, {given.computing}, on "
        f"{given.device}; medians of {given.rounds} interleaved rounds.",
        f"A round times {given.steps} step{'s' * (given.steps > 1)}, {before}; a step has {given.tokens:,} tokens, or "
        "one row where that is longer.",
    ]
    if given.on_gpu:
        sentences.append(
            "GiB: the peak of what tensors take. %: the share of the speed of a large matrix product, counting the "
            "operations of a step that masks show."
        )
    if given.relative_to is not None:
        sentences.append(f"1.10x is a tenth more tokens per second than {given.relative_to}.")
    return " ".join(sentences)


def speed_table(cells: list[Cell], given: Conditions) -> SpeedTable:
    baselines = {cell.length: cell.tokens_per_second for cell in cells if cell.name == given.relative_to}
    headings = {cell.length: short_count(cell.length) for cell in cells}
    rows: dict[str, list[list[str]]] = {}
    for cell in cells:
        rows.setdefault(cell.name, []).append(_figures(cell, baselines.get(cell.length)))
    return SpeedTable(given.model, list(headings.values()), rows, _notes(cells, given), unit="tokens/s")


def markdown(cells: list[Cell], given: Conditions) -> str:
    """The table, what its figures mean and what they were made with, to be read as a file or pasted."""
    return "\n\n".join([describe(given), *markdown_parts(speed_table(cells, given)), given.made_with]) + "\n"


def as_row(cell: Cell) -> dict[str, object]:
    """One cell in plain values; a reading is the mean seconds of a step in a round, in the order of the rounds."""
    row = {"length": cell.length, "name": cell.name, "product_rate": cell.product_rate}
    if isinstance(cell.result, NoSpeed):
        return row | {"tokens_per_second": None, "no_speed": str(cell.result)}
    result = cell.result
    return row | {
        "tokens_per_second": result.tokens_per_second,
        "no_speed": None,
        "tokens_per_step": result.tokens,
        "median_s": result.timing.median,
        "quartiles_s": list(result.timing.quartiles),
        "readings_s": list(result.timing.seconds),
        "peak_gib": _gib(result.peak_bytes),
        "predicted_peak_gib": _gib(result.predicted_bytes),
        "flops_per_token": result.flops_per_token,
        "share_of_product_rate": cell.share,
    }


def _figures(cell: Cell, baseline: float | None) -> list[str]:
    if isinstance(cell.result, NoSpeed):
        return [cell.result.word]
    peak, share = _gib(cell.result.peak_bytes), cell.share
    return [
        f"{cell.tokens_per_second:,.0f}",
        *([] if peak is None else [f"{peak:.1f} GiB"]),
        *([] if share is None else [f"{100 * share:.0f} %"]),
        *([] if baseline is None else [f"{cell.tokens_per_second / baseline:.2f}x"]),
    ]


def _notes(cells: list[Cell], given: Conditions) -> list[str]:
    notes = dict.fromkeys(
        f"{cell.name} {cell.result.reason}"
        for cell in cells
        if isinstance(cell.result, NoSpeed) and cell.result.reason is not None
    )
    rates = {cell.length: cell.product_rate for cell in cells if cell.product_rate is not None}
    if rates:
        told = ", ".join(f"{figure(rate / 1e12)} before {short_count(length)}" for length, rate in rates.items())
        notes[f"TFLOP/s of a large matrix product: {told}"] = None
    spreads = [cell.result.timing.spread for cell in cells if isinstance(cell.result, StepSpeed)]
    if spreads:
        notes[spread_note(max(spreads)) if given.rounds > 1 else "one reading of each"] = None
    return list(notes)


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30
