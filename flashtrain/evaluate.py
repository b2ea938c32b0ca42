"""Evaluate a finished run: perplexity at length, against context and by position; of data=recall by what it recalls.

`python -m flashtrain.evaluate run=DIR [eval.lengths=[...]] [attention=NAME]` scores; `python -m flashtrain.evaluate
runs=[A,B]` compares what was scored.
"""

import re
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from flashtrain import device as devices
from flashtrain import ranks, runs
from flashtrain.assembly import Assembly, Data, assemble_run, open_data, scorer, weights_digest
from flashtrain.composition import refuse_all_but
from flashtrain.config import Config
from flashtrain.data.digest import record_digest
from flashtrain.data.recall import RecallCorpus
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.evaluation.comparison import read_finished, terminal_comparison, write_comparison
from flashtrain.evaluation.journal import Journal
from flashtrain.evaluation.key_tokens import read_keys
from flashtrain.evaluation.options import SELF, EvalOptions
from flashtrain.evaluation.perplexity import Conditions, Evaluation, evaluate_perplexity
from flashtrain.evaluation.recall import RecallEvaluation, evaluate_recall
from flashtrain.evaluation.recall_report import terminal_recall, write_recall
from flashtrain.evaluation.report import terminal_report, write_reports
from flashtrain.evaluation.scoring import Documents
from flashtrain.evaluation.windows import reached_lengths
from flashtrain.model.head import token_hits
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions


def run(config: Config) -> None:
    """Score the validation documents with a run's weights: tables here, files in a new folder of the run.

    Ranks share the windows, and the first writes. With `runs`, put evaluations that are made side by side instead.
    """
    if config.runs is not None:
        compare(config, Console())
        return
    mine = ranks.resolve(config.trainer.devices, devices.resolve_type("trainer.device", config.trainer.device))
    console = Console(quiet=not mine.is_first)
    made, step = assemble_run(config)
    corpus = open_data(config.data, made.tokenizer)
    runs.require_same(Path(config.run), "corpus", corpus.fingerprint)
    require_key_tokens(corpus, config.eval)
    if reason := unscorable(corpus, config.eval):
        raise UserError(reason)
    conditions = conditions_of(made, corpus, config, step)
    journal = _journal(config, conditions) if mine.is_first else None
    if journal and journal.num_known:
        _say(console, f"going on after {journal.num_known:,} targets that are scored already ({journal.path})")
    if mine.world_size > 1:
        _say(console, f"windows are shared by {mine.world_size} ranks")
    with ranks.together("the same command goes on where they were"):
        ranks.start(mine)
        evaluation = measure(made, corpus, config, conditions, console, journal)
    if mine.is_first:
        for path in write(evaluation, runs.stamped_folder(journal.path.parent, made.variant)):
            _say(console, f"wrote {path}")
        journal.remove()


def _journal(config: Config, conditions: Conditions) -> Journal:
    """What is kept of this evaluation in the folder of the run's evaluations until it is whole."""
    folder = runs.evaluation_folder(Path(config.run))
    return Journal(folder / f"unfinished-{record_digest(asdict(config.eval), asdict(conditions))}.f32")


def compare(config: Config, console: Console) -> None:
    """Show the evaluations that `runs` names in one table, and write them to `output`."""
    refuse_all_but(("runs", "output"), config)
    ranks.refuse_torchrun("a comparison", "python -m flashtrain.evaluate ..., which takes one process")
    finished = [read_finished(folder, runs.EVALUATION_FOLDER) for folder in config.runs]
    console.print(terminal_comparison(finished))
    for path in write_comparison(finished, runs.new_folder(config.output, "comparison")):
        _say(console, f"wrote {path}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def unscorable(corpus: Data, options: EvalOptions) -> str | None:
    """Why no validation document can be scored, or None."""
    if isinstance(corpus, RecallCorpus):  # it has documents of every length
        return None
    try:
        reached_lengths(Documents(corpus.validation, options.prefix).num_tokens, options.lengths)
    except UserError as reason:
        return str(reason)
    return None


def require_key_tokens(corpus: Data, options: EvalOptions) -> None:
    """Raise UserError where the file of key tokens that is named cannot be used on this corpus."""
    if options.key_tokens not in (None, SELF):
        read_keys(Path(options.key_tokens), corpus.text_fingerprint)


def evaluated_rope(model: ModelOptions, rope: RopeOptions, training_length: int) -> RopeOptions | None:
    """What the evaluation turns heads by: the model's own, or what `rope` puts in its place; None: nothing."""
    if model.positions != "rope":
        return None
    return rope.in_place_of(model.rope, training_length).resolve()


def count_words(text: str) -> int:
    """Words as lm-eval counts them for its word perplexity: pieces between white space, empty ones at the ends too."""
    return len(re.split(r"\s+", text))


def conditions_of(made: Assembly, corpus: Data, config: Config, step: int) -> Conditions:
    """What an evaluation of the model in `made`, trained for `step` steps, depends on beside its options."""
    training_length = config.train.length_after(step)
    rope = evaluated_rope(made.model.options, config.eval.rope, training_length)
    return Conditions(
        model=config.model.name,
        weights=weights_digest(made.model),
        step=step,
        training_length=training_length,
        positions=rope.describe() if rope else "learned positions",
        attention=made.variant,
        dtype=str(made.device.dtype).removeprefix("torch."),
        device=made.device.type,
        precision=str(replace(made.device, compile=False)),
        corpus=corpus.source,
        corpus_fingerprint=corpus.fingerprint,
        text_fingerprint=corpus.text_fingerprint,
        tokenizer=made.tokenizer.name,
        tokenizer_fingerprint=made.tokenizer.fingerprint,
        prefix_id=made.tokenizer.prefix_id,
    )


def measure(
    made: Assembly,
    corpus: Data,
    config: Config,
    conditions: Conditions,
    console: Console,
    journal: Journal | None = None,
) -> Evaluation | RecallEvaluation:
    """The evaluation of the model in `made`, shown on the console.

    Ranks make it together. Of recall, which is scored soon, there is no journal.
    """
    rope = evaluated_rope(made.model.options, config.eval.rope, conditions.training_length)
    if rope and rope != made.model.options.rope:
        console.print(f"{rope.describe()} in place of {made.model.options.rope.describe()}", highlight=False)
    of_model = (made.model, made.device, config.trainer.head_chunk_tokens, rope, config.eval.prefill_tokens)
    if isinstance(corpus, RecallCorpus):
        recall = evaluate_recall(
            scorer(*of_model, token_hits),
            corpus.validation,
            num_values=corpus.options.num_values,
            options=config.eval,
            conditions=conditions,
            console=console,
        )
        console.print(terminal_recall(recall))
        return recall
    evaluation = evaluate_perplexity(
        scorer(*of_model),
        Documents(corpus.validation, config.eval.prefix),
        bytes_per_token=made.tokenizer.bytes_per_token,
        count_words=lambda tokens: count_words(made.tokenizer.decode(tokens)),
        options=config.eval,
        conditions=conditions,
        follows_length=rope is not None and rope.follows_length,
        console=console,
        journal=journal,
    )
    console.print(terminal_report(evaluation.curves))
    return evaluation


def write(evaluation: Evaluation | RecallEvaluation, folder: Path) -> list[Path]:
    """Write the files of an evaluation into `folder`; return their paths. Raises UserError where the disk refuses."""
    writer = write_recall if isinstance(evaluation, RecallEvaluation) else write_reports
    try:
        return writer(evaluation, folder)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{folder} cannot be written ({reason}); make room and evaluate the run again") from error


if __name__ == "__main__":
    main(run)
