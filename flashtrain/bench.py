"""Measure the attention variants that this device can run, forward and backward; exit 1 where none has a speed.

`python -m flashtrain.bench [variants=[...]] [peers=[module:function]] [masks=[causal,full,window,documents]]
[lengths=[...]]`
"""

import sys
from dataclasses import asdict, dataclass

from rich.console import Console

from flashtrain import runs
from flashtrain.composition import Root
from flashtrain.contradictions import MOST_SEEDS, not_among, not_counts, not_found, not_measured, not_new
from flashtrain.device import DTYPES, resolve_type
from flashtrain.entry import main
from flashtrain.kernels.attention import VARIANT_NAMES, Intervals
from flashtrain.performance.attention import FLOPS_PER_VISIBLE_PAIR, PASSES, Measurement, Problem, measure
from flashtrain.performance.hardware import gpu_state
from flashtrain.performance.masks import MASKS, Masks
from flashtrain.performance.no_speed import NoSpeed
from flashtrain.performance.peers import Peer, versions_of
from flashtrain.performance.plot import save_plot
from flashtrain.performance.report import (
    Conditions,
    as_multiples_row,
    as_row,
    describe,
    markdown,
    multiples,
    multiples_tables,
    speed_tables,
)
from flashtrain.performance.tables import terminal_table
from flashtrain.performance.timing import Clock, CudaClock, HostClock, Timing


@dataclass
class BenchConfig:
    device: str
    """auto (CUDA where there is one), cpu or cuda."""
    dtype: str
    """bfloat16, float16 or float32."""
    variants: list[str] | None
    """Variants of attention; null: all. One that cannot do a problem says why."""
    peers: list[str]
    """Functions of other packages to measure beside the variants, as MODULE:FUNCTION: called as (q, k, v, causal=...)
    with the layout and the convention of flash-attention."""
    masks: list[str]
    """causal, full, window (causal, `window` keys) or documents (causal, `longest_document`)."""
    head_dims: list[int]
    lengths: list[int]
    """Tokens in a row."""
    passes: list[str]
    """forward, backward."""
    tokens: int
    """Tokens in a call: rows times length."""
    hidden_size: int
    """Query heads times head dimension."""
    num_kv_heads: int | None
    """null: as many as query heads."""
    window: int
    """Keys that a query sees with the mask `window`, its own included."""
    longest_document: int
    """With the mask `documents`, rows hold documents of 1 to this many tokens, each length as likely."""
    warmup: int
    """Calls of each variant before the first reading."""
    rounds: int
    """Readings of each variant, one a round, in an order shuffled anew for each round."""
    seed: int
    """Of the inputs, the documents and the orders."""
    relative_to: str | None
    """The variant or peer that the others' speed is also given as a multiple of; null: of none."""
    output: str | None
    """Folder for the files; null: runs/ with the time."""

    def validate(self) -> list[str]:
        """Return every problem, one sentence each."""
        problems = [
            f"{name} is {value}; it must be at least 1"
            for name in ("tokens", "hidden_size", "num_kv_heads", "window", "longest_document", "rounds")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        problems += [
            *not_among("variants", self.variant_names, VARIANT_NAMES),
            *not_found("peers", self.peers, Peer.named),
            *not_among("masks", self.masks, MASKS),
            *not_among("passes", self.passes, PASSES),
            *not_among("dtype", [self.dtype], DTYPES),
            *not_counts("head_dims", self.head_dims),
            *not_counts("lengths", self.lengths),
        ]
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup}; it must be 0 or more")
        if not 0 <= self.seed < MOST_SEEDS:
            problems.append(f"seed is {self.seed}; it must be at least 0 and below {MOST_SEEDS}")
        problems += not_measured("relative_to", self.relative_to, self.variant_names, self.peers)
        problems += not_new("output", self.output)
        return problems or self._sizes()

    def _sizes(self) -> list[str]:
        problems = [
            f"tokens is {self.tokens} and no multiple of the length {length}; the next that is: "
            f"tokens={(self.tokens // length + 1) * length}"
            for length in self.lengths
            if self.tokens % length
        ]
        for head_dim in self.head_dims:
            heads = self.hidden_size // head_dim
            if self.hidden_size % head_dim:
                problems.append(f"hidden_size is {self.hidden_size} and no multiple of the head dim {head_dim}")
            elif self.num_kv_heads is not None and heads % self.num_kv_heads:
                problems.append(
                    f"num_kv_heads is {self.num_kv_heads} and does not divide the {heads} heads of head dim {head_dim}"
                )
        return problems

    @property
    def variant_names(self) -> list[str]:
        return list(VARIANT_NAMES) if self.variants is None else self.variants

    @property
    def names(self) -> list[str]:
        """Of all that is measured."""
        return [*self.variant_names, *self.peers]


ROOT = Root("bench", BenchConfig)


def run(config: BenchConfig) -> None:
    """Measure every problem: tables here as they are done, files in a new folder; SystemExit(1) where no variant and
    no peer has a speed on any."""
    console = Console()
    device = resolve_type("device", config.device)
    folder = runs.new_folder(config.output, "bench")
    peers = [Peer.named(name) for name in config.peers]
    facts = runs.provenance(device=runs.device_name(device), peers={name: versions_of(name) for name in config.peers})
    masks = Masks(config.window, config.longest_document, config.seed)
    clock: Clock = CudaClock() if device == "cuda" else HostClock()
    given = _conditions(config, device, masks, facts)
    console.print(describe(given), highlight=False)

    measurements: list[Measurement] = []
    states = [{"after": None, "gpu": gpu_state()}]
    for panel in _panels(config):
        done = []
        for problem in panel:
            done += measure(
                problem,
                masks.intervals(problem.mask, problem.batch, problem.length, device),
                config.variant_names,
                config.passes,
                clock,
                device=device,
                dtype=DTYPES[config.dtype],
                warmup=config.warmup,
                rounds=config.rounds,
                seed=config.seed,
                peers=peers,
            )
            states.append({"after": asdict(problem), "gpu": gpu_state()})
            # Whole after each problem, so that an interrupted command leaves what it has measured.
            runs.write_json(
                folder / "bench.json",
                {
                    "settings": asdict(config) | {"device": device},
                    "interpreted": given.interpreted,
                    "flops_per_visible_pair": FLOPS_PER_VISIBLE_PAIR,
                    "provenance": facts,
                    "gpu_states": states,
                    "measurements": [as_row(found) for found in measurements + done],
                    "multiples": [as_multiples_row(one) for one in multiples(measurements + done, config.relative_to)],
                },
            )
        measurements += done
        for table in speed_tables(done, given):
            console.print("", terminal_table(table))
    for table in multiples_tables(measurements, given):
        console.print("", terminal_table(table))
    runs.write_whole(folder / "bench.md", markdown(measurements, given))
    save_plot(measurements, given, folder / "bench.png")
    for path in sorted(folder.iterdir()):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    without = _without_speed(measurements)
    for name in [*(config.variants or []), *config.peers]:
        if name in without:
            console.print(f"{name} has no speed: {without[name]}", markup=False, highlight=False, soft_wrap=True)
    if len(without) == len(config.names):
        sys.exit(1)


def _without_speed(measurements: list[Measurement]) -> dict[str, NoSpeed]:
    """The variants and peers that have no speed on any problem, and why on the first."""
    timed = {found.variant for found in measurements if isinstance(found.result, Timing)}
    why: dict[str, NoSpeed] = {}
    for found in measurements:
        if found.variant not in timed:
            why.setdefault(found.variant, found.result)
    return why


def _panels(config: BenchConfig) -> list[list[Problem]]:
    """The problems of each table."""
    return [
        [
            Problem(
                mask,
                length,
                batch=config.tokens // length,
                head_dim=head_dim,
                num_q_heads=config.hidden_size // head_dim,
                num_kv_heads=config.num_kv_heads or config.hidden_size // head_dim,
            )
            for length in config.lengths
        ]
        for head_dim in config.head_dims
        for mask in config.masks
    ]


def _conditions(config: BenchConfig, device: str, masks: Masks, facts: dict) -> Conditions:
    problem = _panels(config)[0][0]
    spec = problem.spec(Intervals.full(), device, DTYPES[config.dtype])
    return Conditions(
        device=facts["device"],
        dtype=config.dtype,
        tokens=config.tokens,
        rounds=config.rounds,
        interpreted=spec.interpreted,
        masks=masks,
        relative_to=config.relative_to,
        made_with=runs.made_with("bench", facts),
    )


if __name__ == "__main__":
    main(run, ROOT)
