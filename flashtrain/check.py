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
from flashtrain.composition import Root
from flashtrain.contradictions import MOST_SEEDS, not_among, once_each
from flashtrain.device import DTYPES, resolve_type
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.kernels.attention import VARIANT_NAMES, Intervals

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
    """A group of cases has scores capped at this; 0: none."""
    v_head_dim: int | None
    """A group of cases has this head dimension of v; null: none."""
    lse_gradient: bool
    """Whether a group of cases has a gradient of the LSE; variants that return none skip it."""
    seed: int
    """Of the inputs and the documents."""
    output: str | None
    """A new JSON file for all numbers; null: none."""

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
        if self.output == "":
            problems.append("output is empty; name a file, or say output=null for none")
        elif self.output is not None and not Path(self.output).parent.is_dir():
            problems.append(f"output is {self.output} and there is no folder {Path(self.output).parent}; make it first")
        return problems

    def _uneven_heads(self) -> list[list[int]]:
        return [pair for pair in self.heads if not _pairs("heads", [pair]) and pair[0] % pair[1]]


ROOT = Root("check", CheckConfig)


def run(config: CheckConfig) -> None:
    """Measure every case with every variant: tables here, all numbers in `output`; SystemExit(1) where one fails.

    Raises UserError where no file can be made at `output`, before anything is measured, and, after all else, where
    a variant that `variants` names could do none of the cases.
    """
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    device = resolve_type("device", config.device)
    if config.output is not None:
        runs.require_new_file(config.output)
    cases = covering(
        config.masks,
        config.dtypes,
        config.lengths + (config.long_lengths if device == "cuda" else []),
        config.heads,
        config.head_dims,
        softcap=config.softcap,
        v_head_dim=config.v_head_dim,
        lse_gradient=config.lse_gradient,
        seed=config.seed,
    )
    variants = VARIANT_NAMES if config.variants is None else config.variants
    console.print(support_report(variants), "")
    outcomes = []
    description = f"{len(cases)} cases on {device}"
    for case in track(cases, description, console=console, transient=True, disable=not console.is_terminal):
        outcomes += measure(case, variants, device)
    outcomes.sort(key=lambda outcome: variants.index(outcome.variant))
    interpreted = cases[0].spec(Intervals.full(), device, needs_lse=False).interpreted
    facts = runs.provenance(device=runs.device_name(device), interpreted=interpreted)
    measured_on = facts["device"] + ", Triton interpreted" * interpreted
    console.print(terminal_report(outcomes), f"{measured_on}, {runs.versions(facts)}", highlight=False)
    if config.output is not None:
        settings = asdict(config) | {"device": device}
        rows = [as_row(outcome) for outcome in outcomes]
        runs.write_json(Path(config.output), {"settings": settings, "provenance": facts, "results": rows})
        console.print(f"wrote {config.output}", markup=False, highlight=False, soft_wrap=True)
    idle = [name for name in variants if all(outcome.refused for outcome in outcomes if outcome.variant == name)]
    if idle and config.variants is not None:
        raise UserError(
            f"variants has {', '.join(idle)}, and none of the cases ran with it: the reasons are under skipped; "
            "name others, or other cases"
        )
    if any(outcome.fails for outcome in outcomes):
        sys.exit(1)


def _pairs(key: str, values: list[list[int]]) -> list[str]:
    wrong = [value for value in values if len(value) != 2 or min(value) < 1]
    return [f"{key} has {value}; each must be two numbers of at least 1" for value in wrong] or once_each(key, values)


if __name__ == "__main__":
    main(run, ROOT)
