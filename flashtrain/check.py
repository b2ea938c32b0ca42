"""Hold every attention variant that this device can run to the one tolerance rule; exit 1 where one fails.

`python -m flashtrain.check [variants=[NAME,...]] [masks=[...]] [dtypes=[...]] [output=FILE]`
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from flashtrain import runs
from flashtrain.accuracy.cases import MASKS, covering
from flashtrain.accuracy.measurement import measure
from flashtrain.accuracy.report import as_row, support_report, terminal_report
from flashtrain.config import MOST_SEEDS, Root, not_among, once_each
from flashtrain.device import DTYPES, resolve_type
from flashtrain.entry import main
from flashtrain.kernels.attention import VARIANT_NAMES

WIDTH = 120
"""Columns of a report that goes to a file."""


@dataclass
class CheckConfig:
    device: str
    """auto (CUDA where there is one), cpu or cuda."""
    variants: list[str] | None
    """Variants of attention; null: all. One that cannot do a case says why."""
    masks: list[str]
    """full, causal, window, documents (causal), chunked (causal), prefix_lm."""
    dtypes: list[str]
    """bfloat16, float16, float32."""
    lengths: list[list[int]]
    """Pairs of queries and keys."""
    long_lengths: list[list[int]]
    """More of them, on a GPU only."""
    heads: list[list[int]]
    """Pairs of query heads and KV heads."""
    head_dims: list[int]
    """Of q, k and v."""
    softcap: float
    """Each mask comes once more with scores capped at this; 0: not."""
    v_head_dim: int | None
    """Each mask comes once more with this head dimension of v; null: not."""
    seed: int
    """Of the inputs and the documents."""
    output: str | None
    """A JSON file for all numbers; null: none."""

    def validate(self) -> list[str]:
        """Return every problem, one sentence each."""
        problems = [
            *not_among("variants", self.variants if self.variants is not None else VARIANT_NAMES, VARIANT_NAMES),
            *not_among("masks", self.masks, MASKS),
            *not_among("dtypes", self.dtypes, DTYPES),
            *_pairs("lengths", self.lengths),
            *(_pairs("long_lengths", self.long_lengths) if self.long_lengths else []),
            *_pairs("heads", self.heads),
            *(f"heads has {pair}; query heads must be a multiple of KV heads" for pair in self._uneven_heads()),
            *(f"head_dims has {dim}; all must be at least 1" for dim in self.head_dims if dim < 1),
            *once_each("head_dims", self.head_dims),
        ]
        if self.softcap < 0:
            problems.append(f"softcap is {self.softcap}; it must be above 0, or 0 for no such case")
        if self.v_head_dim is not None and self.v_head_dim < 1:
            problems.append(f"v_head_dim is {self.v_head_dim}; it must be at least 1, or null for no such case")
        if not 0 <= self.seed < MOST_SEEDS:
            problems.append(f"seed is {self.seed}; it must be at least 0 and below {MOST_SEEDS}")
        if self.output is not None and not Path(self.output).parent.is_dir():
            problems.append(f"output is {self.output} and there is no folder {Path(self.output).parent}; make it first")
        return problems

    def _uneven_heads(self) -> list[list[int]]:
        return [pair for pair in self.heads if not _pairs("heads", [pair]) and pair[0] % pair[1]]


ROOT = Root("check", CheckConfig)


def run(config: CheckConfig) -> None:
    """Measure every case with every variant: tables here, all numbers in `output`; SystemExit(1) where one fails."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    device = resolve_type("device", config.device)
    cases = covering(
        config.masks,
        config.dtypes,
        config.lengths + (config.long_lengths if device == "cuda" else []),
        config.heads,
        config.head_dims,
        softcap=config.softcap,
        v_head_dim=config.v_head_dim,
        seed=config.seed,
    )
    variants = VARIANT_NAMES if config.variants is None else config.variants
    console.print(support_report(variants), "")
    outcomes = []
    description = f"{len(cases)} cases on {device}"
    for case in track(cases, description, console=console, transient=True, disable=not console.is_terminal):
        outcomes += measure(case, variants, device)
    outcomes.sort(key=lambda outcome: variants.index(outcome.variant))
    facts = runs.provenance()
    console.print(terminal_report(outcomes), f"{facts['device']}, {runs.versions(facts)}", highlight=False)
    if config.output is not None:
        rows = [as_row(outcome) for outcome in outcomes]
        runs.write_json(Path(config.output), {"settings": asdict(config), "provenance": facts, "results": rows})
        console.print(f"wrote {config.output}", markup=False, highlight=False, soft_wrap=True)
    if any(outcome.fails for outcome in outcomes):
        sys.exit(1)


def _pairs(key: str, values: list[list[int]]) -> list[str]:
    wrong = [value for value in values if len(value) != 2 or min(value) < 1]
    return [f"{key} has {value}; each must be two numbers of at least 1" for value in wrong] or once_each(key, values)


if __name__ == "__main__":
    main(run, ROOT)
