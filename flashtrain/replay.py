"""Compute the step at which a run found a NaN or Inf once more, row by row, and say where it begins.

`python -m flashtrain.replay run=DIR [trainer.precision=fp32] [attention=NAME]`
"""

import functools
from pathlib import Path

from rich.console import Console

from flashtrain import ranks, runs
from flashtrain.assembly import assemble
from flashtrain.composition import refuse_all_but
from flashtrain.config import Config
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.model.head import summed_cross_entropy
from flashtrain.training.checkpoint import check_same_model
from flashtrain.training.replay import read_fault, replay

MOST_GRADIENTS_SAID = 3


def run(config: Config) -> None:
    """Print a line for each row of the step that is not finite, and how many are."""
    refuse_all_but(("run",), config)
    ranks.refuse_torchrun("a replay", "python -m flashtrain.replay ..., which takes one process")
    if config.run is None:
        raise UserError("which run is meant? Say run=DIR, a folder that train.py made")
    path = runs.last_fault(Path(config.run))
    if path is None:
        raise UserError(f"{config.run} has found no NaN or Inf: there is nothing in {runs.FAULT_FOLDER} to replay")
    fault = read_fault(path)
    made = assemble(config, trains=True)
    check_same_model(made.model.state_dict(), fault["weights"], path)
    made.model.load_state_dict(fault["weights"])
    head = {"vocab_size": made.model.options.vocab_size, "chunk_size": config.trainer.head_chunk_tokens}
    sum_nll = functools.partial(summed_cross_entropy, **head)
    console, num_finite = Console(), 0
    _say(console, f"step {fault['step']} of {path} in {made.device}, attention {made.variant}")
    for outcome in replay(made.model, sum_nll, fault["batch"], made.device.autocast):
        num_finite += outcome.finite
        if not outcome.finite:
            row = fault["batch"]["rows"][outcome.place].item()
            where = f"first not finite after {outcome.module}" if outcome.module else "all of the forward is finite"
            gradients = ", ".join(outcome.gradients[:MOST_GRADIENTS_SAID])
            _say(
                console,
                f"row {row}: loss {outcome.loss:.4f}; {where}; gradients of {len(outcome.gradients)} parameters are not"
                f"{f', such as {gradients}' if gradients else ''}",
            )
    _say(console, f"{num_finite} of {len(fault['batch']['inputs'])} rows are finite by themselves")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(run)
