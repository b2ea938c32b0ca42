"""Evaluate a finished run: perplexity at length, against context and by position.

`python -m flashtrain.evaluate run=DIR [eval.lengths=[...]] [attention=NAME]`
"""

from pathlib import Path

import numpy as np
from rich.console import Console

from flashtrain import runs
from flashtrain.assembly import Assembly, assemble_run, open_data, scorer
from flashtrain.config import Config
from flashtrain.data.corpus import Corpus
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.evaluation.options import EvalOptions
from flashtrain.evaluation.perplexity import Conditions, PerplexityCurves, perplexity_curves
from flashtrain.evaluation.report import terminal_report, write_reports
from flashtrain.evaluation.windows import reached_lengths
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions


def run(config: Config) -> None:
    """Score the validation documents with a run's weights: tables here, files in a new folder of the run."""
    console = Console()
    made, step = assemble_run(config)
    corpus = open_data(config.data, made.tokenizer)
    runs.require_same(Path(config.run), "corpus", corpus.fingerprint)
    curves = measure(made, corpus, config, step, console)
    folder = runs.stamped_folder(Path(config.run) / runs.EVALUATION_FOLDER, made.variant)
    for path in write_reports(curves, folder):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def unscorable(corpus: Corpus, options: EvalOptions) -> str | None:
    """Why no validation document can be scored, or None."""
    try:
        reached_lengths(np.diff(corpus.validation.offsets), options.lengths)
    except UserError as reason:
        return str(reason)
    return None


def evaluated_rope(model: ModelOptions, config: Config) -> RopeOptions | None:
    """What the evaluation turns heads by: the model's own, or what `eval.rope` puts in its place; None: nothing."""
    if model.positions != "rope":
        return None
    return config.eval.rope.in_place_of(model.rope, config.train.sequence_length).resolve()


def measure(made: Assembly, corpus: Corpus, config: Config, step: int, console: Console) -> PerplexityCurves:
    """The curves of the model in `made`, shown on the console."""
    rope = evaluated_rope(made.model.options, config)
    if rope and rope != made.model.options.rope:
        console.print(f"{rope.describe()} in place of {made.model.options.rope.describe()}", highlight=False)
    curves = perplexity_curves(
        scorer(made.model, made.device, config.trainer.head_chunk_tokens, rope),
        corpus.validation,
        bytes_per_token=made.tokenizer.bytes_per_token,
        options=config.eval,
        conditions=Conditions(
            model=config.model.name,
            step=step,
            training_length=config.train.sequence_length,
            positions=rope.describe() if rope else "learned positions",
            attention=made.variant,
            dtype=str(made.device.dtype).removeprefix("torch."),
            device=made.device.type,
            corpus=corpus.source,
            corpus_fingerprint=corpus.fingerprint,
            tokenizer=made.tokenizer.name,
            tokenizer_fingerprint=made.tokenizer.fingerprint,
            prefix_id=made.tokenizer.prefix_id,
        ),
        follows_length=rope is not None and rope.follows_length,
        console=console,
    )
    console.print(terminal_report(curves))
    return curves


if __name__ == "__main__":
    main(run)
