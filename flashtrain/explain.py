"""Explain attention in bytes and FLOPs: what each algorithm moves and computes, and the least time that it can take.

`python -m flashtrain.explain [device=h200] [length=8192] [head_dim=64] [mask=causal]`
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from flashtrain import runs
from flashtrain.composition import Root
from flashtrain.contradictions import MOST_SEEDS, not_among, once_each
from flashtrain.device import DTYPES
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.kernels.attention import Intervals, refusal, tiles
from flashtrain.performance.achievable import achievable
from flashtrain.performance.attention import PASSES, Problem, measure
from flashtrain.performance.counters import count
from flashtrain.performance.counting import Comparison, compare
from flashtrain.performance.devices import DEVICES, Device, key_of
from flashtrain.performance.explanation import (
    Case,
    Counted,
    Setting,
    as_counted_row,
    as_row,
    count_sheet,
    counter_sheet,
    markdown,
    noun,
    sheets,
    terminal_table,
)
from flashtrain.performance.io import VARIANTS, Launch, Shape, compulsory, predict
from flashtrain.performance.io_plot import save_plot
from flashtrain.performance.masks import MASKS, Masks
from flashtrain.performance.operators import block
from flashtrain.performance.roofline import Estimate, Rates, estimate, nominal
from flashtrain.performance.timing import CudaClock
from flashtrain.performance.walk_through import walk_through

MOST = {
    "head_dim": 256,  # where the kernels and the table of their tiles end
    "batch": 2**24,
    "window": 2**24,
    "longest_document": 2**24,
    "count_length": 2**12,
}
"""The largest values of some settings."""

MOST_TOKENS = 2**24
"""In a call, rows times length."""


@dataclass
class ExplainConfig:
    device: str
    """auto (the GPU here), or one of `flashtrain.performance.devices.DEVICES`; measured only where it is here."""
    dtype: str
    """bfloat16, float16 or float32."""
    variants: list[str]
    """standard, flash_v1, flash_v2. One that cannot do the mask says why."""
    mask: str
    """causal, full, window (causal, `window` keys) or documents (causal, `longest_document`)."""
    length: int
    """Tokens in a row, for the tables, the text and the roofline."""
    lengths: list[int]
    """Tokens in a row, for the curves over length."""
    passes: list[str]
    """forward, backward."""
    batch: int
    num_heads: int
    num_kv_heads: int | None
    """null: as many as query heads."""
    head_dim: int
    window: int
    """Keys that a query sees with the mask `window`, its own included."""
    longest_document: int
    """With the mask `documents`, rows hold documents of 1 to this many tokens, each length as likely."""
    count_length: int | None
    """Tokens in a row of calls whose elements are counted as they run, against the model; null: none. Triton's kernels
    are counted in its interpreter (TRITON_INTERPRET=1), a second or more for each hundred tokens."""
    counter_lengths: list[int] | None
    """Tokens in a row of calls whose bytes the hardware counts, against the model, where the device is here; null or
    []: none. Nsight Compute's ncu reads the counters."""
    longest: float
    """Seconds: a variant of which a pass must take longer at some length is not measured there."""
    warmup: int
    """Calls of each before the first reading, where there is a GPU."""
    rounds: int
    """Readings of each."""
    seed: int
    """Of the inputs, the documents and the orders."""
    output: str | None
    """Folder for the files; null: runs/ with the time."""

    def validate(self) -> list[str]:
        """Return every problem, one sentence each."""
        counts = ("length", "count_length", "batch", "num_heads", "num_kv_heads", "head_dim")
        counts += ("window", "longest_document", "rounds")
        problems = [
            f"{name} is {value}; it must be at least 1"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        problems += [
            *not_among("device", [self.device], ("auto", *DEVICES)),
            *not_among("dtype", [self.dtype], DTYPES),
            *not_among("variants", self.variants, VARIANTS),
            *not_among("mask", [self.mask], MASKS),
            *not_among("passes", self.passes, PASSES),
        ]
        for name, lengths in (("lengths", self.lengths), ("counter_lengths", self.counter_lengths or [])):
            if small := [length for length in lengths if length < 1]:
                problems.append(f"{name} has {', '.join(map(str, small))}; all must be at least 1")
        problems += [
            f"{name} is {value}; it must be at most {most}"
            for name, most in MOST.items()
            if (value := getattr(self, name)) is not None and value > most
        ]
        problems += once_each("lengths", self.lengths)
        problems += once_each("counter_lengths", self.counter_lengths) if self.counter_lengths else []
        if not self.longest >= 0:  # so that NaN is refused too
            problems.append(f"longest is {self.longest}; it must be 0 or more")
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup}; it must be 0 or more")
        if not 0 <= self.seed < MOST_SEEDS:
            problems.append(f"seed is {self.seed}; it must be at least 0 and below {MOST_SEEDS}")
        if self.output == "":
            problems.append("output is empty; name a new folder, or leave it out for runs/ with the time")
        elif self.output is not None and Path(self.output).exists():
            problems.append(f"output={self.output} exists; name another")
        if problems:
            return problems
        longest = max(self.length, *self.lengths, *(self.counter_lengths or []))
        if longest * self.batch > MOST_TOKENS:
            problems.append(
                f"the longest length is {longest} and batch {self.batch}; a call must have at most {MOST_TOKENS} tokens"
            )
        if self.num_heads % self.kv_heads:
            problems.append(f"num_kv_heads is {self.num_kv_heads} and does not divide the {self.num_heads} heads")
        return problems

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


ROOT = Root("explain", ExplainConfig)


def run(config: ExplainConfig) -> None:
    """Tables and a text here, files in a new folder."""
    console = Console()
    device, is_here = _device(config.device)
    dtype, masks = DTYPES[config.dtype], Masks(config.window, config.longest_document, config.seed)
    refused = _refused(config, device, masks)
    if len(refused) == len(config.variants):
        raise UserError("; ".join(f"{name} {reason}" for name, reason in refused.items()))
    folder = runs.new_folder(config.output, "explain")
    for name, reason in refused.items():
        console.print(f"{name} {reason}", highlight=False)

    setting = _setting(config, device, masks, _rates(config, device, is_here))
    variants = [name for name in config.variants if name not in refused]
    cases: list[Case] = []
    for length in sorted({*config.lengths, config.length}):
        predicted = _cases(config, variants, length, device, masks, setting.rates)
        if is_here:
            console.print(f"measuring at {length:,} {noun('token', length)}", highlight=False)
        cases += _measured(config, predicted, masks) if is_here else predicted
    forward = {name: _forward(name, setting) for name in variants}
    operators = block(setting.shape, dtype, forward)
    by_hardware, remarks = _by_hardware(config, variants, masks, setting) if is_here else ([], [])
    counted, uncounted = _counted(config, variants, masks) if config.count_length else ([], [])
    text = walk_through(cases, setting, by_hardware)
    all_sheets = sheets(cases, setting, operators)
    if by_hardware:
        all_sheets.append(counter_sheet(by_hardware))
    if counted:
        all_sheets.append(count_sheet(counted, config.count_length))
    for sheet in all_sheets:
        console.print("", terminal_table(sheet))
    for remark in [*remarks, *uncounted]:
        console.print(remark, markup=False, highlight=False)
    console.print("", "\n\n".join(text), markup=False, highlight=False)

    facts = runs.provenance()
    runs.write_json(
        folder / "explain.json",
        {
            "settings": asdict(config),
            "device": asdict(device),
            "rates": asdict(setting.rates),
            "nominal": asdict(setting.nominal),
            "sram_elements": setting.launch.sram_elements,
            "refused": refused,
            "cases": [as_row(case) for case in cases],
            "operators": [
                asdict(one) | {"bound": one.bound(setting.rates), "least_seconds": one.seconds(setting.rates)}
                for one in operators
            ],
            "counted": [
                {"variant": one.variant, "pass": one.pass_name, "equal": one.counted == one.model}
                | {"counted_elements": one.counted.total(), "model_elements": one.model.total()}
                for one in counted
            ],
            "counted_by_hardware": [as_counted_row(one) for one in by_hardware],
            "counted_by_hardware_remarks": remarks,
            "text": text,
            "provenance": facts,
        },
    )
    runs.write_whole(folder / "explain.md", markdown(all_sheets, text, runs.made_with("explain", facts)))
    save_plot(cases, by_hardware, setting, folder / "explain.png")
    for path in sorted(folder.iterdir()):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _device(word: str) -> tuple[Device, bool]:
    """The device that is meant, and whether it is here."""
    here = key_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if word != "auto":
        return DEVICES[word], word == here
    if here is None:
        raise UserError(f"device is auto and no GPU that is known is here; say which to explain: {', '.join(DEVICES)}")
    return DEVICES[here], True


def _rates(config: ExplainConfig, device: Device, is_here: bool) -> Rates:
    dtype = DTYPES[config.dtype]
    if not is_here:
        return nominal(device, dtype)
    return achievable(CudaClock(), dtype, device="cuda", warmup=config.warmup, rounds=config.rounds, seed=config.seed)


def _shape(config: ExplainConfig, length: int) -> Shape:
    return Shape(config.batch, length, length, config.num_heads, config.kv_heads, config.head_dim)


def _launch(config: ExplainConfig, device: Device, intervals: Intervals) -> Launch:
    launch = tiles(device.architecture, config.head_dim, DTYPES[config.dtype])
    return Launch(launch, device.sram_elements)


def _setting(config: ExplainConfig, device: Device, masks: Masks, rates: Rates) -> Setting:
    intervals = masks.intervals(config.mask, config.batch, config.length, "cpu")
    return Setting(
        device=device,
        rates=rates,
        nominal=nominal(device, DTYPES[config.dtype]),
        dtype=DTYPES[config.dtype],
        mask=masks.label(config.mask),
        shape=_shape(config, config.length),
        intervals=intervals,
        launch=_launch(config, device, intervals),
    )


def _refused(config: ExplainConfig, device: Device, masks: Masks) -> dict[str, str]:
    """variant -> why that device could not run it with this mask."""
    intervals = masks.intervals(config.mask, config.batch, config.length, "cpu")
    spec = _problem(config, config.length).spec(intervals, "cpu", DTYPES[config.dtype])
    there = replace(spec, device_type="cuda", sm=device.sm, triton=306, interpreted=False)
    return {name: reason for name in config.variants if (reason := refusal(name, there)) is not None}


def _problem(config: ExplainConfig, length: int) -> Problem:
    return Problem(config.mask, length, config.batch, config.head_dim, config.num_heads, config.kv_heads)


def _forward(variant: str, setting: Setting) -> Estimate:
    work = predict(variant, "forward", setting.shape, setting.intervals, setting.dtype, setting.launch)
    return estimate(work, compulsory("forward", setting.shape, setting.dtype), setting.device, setting.rates)


def _cases(
    config: ExplainConfig, variants: list[str], length: int, device: Device, masks: Masks, rates: Rates
) -> list[Case]:
    """All variants and passes at one length, not measured."""
    dtype, shape, problem = DTYPES[config.dtype], _shape(config, length), _problem(config, length)
    intervals = masks.intervals(config.mask, config.batch, length, "cpu")
    launch = _launch(config, device, intervals)
    visible = intervals.visible(config.batch, length, length)
    cases = []
    for pass_name in config.passes:
        once = compulsory(pass_name, shape, dtype)
        for variant in variants:
            work = predict(variant, pass_name, shape, intervals, dtype, launch)
            cases.append(
                Case(
                    variant,
                    pass_name,
                    length,
                    work,
                    estimate(work, once, device, rates),
                    problem.flops(pass_name, visible),
                    measurement=None,
                )
            )
    return cases


def _measured(config: ExplainConfig, cases: list[Case], masks: Masks) -> list[Case]:
    """The cases of one length with what variants took, but for those that must take longer than `longest`."""
    length = cases[0].length
    too_long = {case.variant for case in cases if case.estimate.seconds > config.longest}
    found = measure(
        _problem(config, length),
        masks.intervals(config.mask, config.batch, length, "cuda"),
        list(dict.fromkeys(case.variant for case in cases if case.variant not in too_long)),
        config.passes,
        CudaClock(),
        device="cuda",
        dtype=DTYPES[config.dtype],
        warmup=config.warmup,
        rounds=config.rounds,
        seed=config.seed,
    )
    measurements = {(one.variant, one.pass_name): one for one in found}
    return [replace(case, measurement=measurements.get((case.variant, case.pass_name))) for case in cases]


def _counted(config: ExplainConfig, variants: list[str], masks: Masks) -> tuple[list[Comparison], list[str]]:
    """What variants moved when they ran, and why some cannot be counted."""
    length = config.count_length
    intervals = masks.intervals(config.mask, config.batch, length, "cpu")
    spec = _problem(config, length).spec(intervals, "cpu", torch.float32)
    refused = {name: reason for name in variants if (reason := refusal(name, spec)) is not None}
    found = [
        one for name in variants if name not in refused for one in compare(name, _shape(config, length), intervals)
    ]
    return found, [f"{name} {reason}" for name, reason in refused.items()]


def _by_hardware(
    config: ExplainConfig, variants: list[str], masks: Masks, setting: Setting
) -> tuple[list[Counted], list[str]]:
    """What the counters of this device say, and remarks on it."""
    lengths = config.counter_lengths or []
    estimates = {
        (case.variant, case.pass_name, length): case.estimate
        for length in lengths
        for case in _cases(config, variants, length, setting.device, masks, setting.rates)
    }
    problems = [_problem(config, length) for length in lengths]
    found, remarks = count(problems, masks, variants, config.passes, dtype=setting.dtype, seed=config.seed)
    return [Counted(estimates[one.variant, one.pass_name, one.length], one) for one in found], remarks


if __name__ == "__main__":
    main(run, ROOT)
