"""Evaluate a finished run: perplexity at length, against context and by position.

`python -m flashtrain.evaluate run=DIR [eval.lengths=[...]] [attention=NAME]`
"""

from pathlib import Path

from rich.console import Console

from flashtrain import runs
from flashtrain.assembly import Assembly, assemble_run, scorer
from flashtrain.config import Config
from flashtrain.entry import main
from flashtrain.evaluation.perplexity import Conditions, perplexity_curves
from flashtrain.evaluation.report import terminal_report, write_reports


def run(config: Config) -> None:
    """Score the validation documents with a run's weights: tables here, files in a new folder of the run."""
    console = Console()
    made, step = assemble_run(config)
    folder = runs.stamped_folder(Path(config.run) / runs.EVALUATION_FOLDER, made.variant)
    for path in report(made, config, step, folder, console):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def report(made: Assembly, config: Config, step: int, folder: Path, console: Console) -> list[Path]:
    """Show the curves of the model in `made` and write them to `folder`; return the files."""
    curves = perplexity_curves(
        scorer(made.model, made.device, config.trainer.head_chunk_tokens),
        made.corpus.validation,
        bytes_per_token=made.tokenizer.bytes_per_token,
        options=config.eval,
        conditions=Conditions(
            model=config.model.name,
            step=step,
            training_length=config.train.sequence_length,
            attention=made.variant,
            dtype=str(made.device.dtype).removeprefix("torch."),
            device=made.device.type,
            corpus=made.corpus.source,
            corpus_fingerprint=made.corpus.fingerprint,
            tokenizer=made.tokenizer.name,
            tokenizer_fingerprint=made.tokenizer.fingerprint,
            prefix_id=made.tokenizer.prefix_id,
        ),
        console=console,
    )
    console.print(terminal_report(curves))
    return write_reports(curves, folder)


if __name__ == "__main__":
    main(run)
