"""Train: assemble what the settings ask for, fit it with Lightning, then report what came out.

The run's folder is made once everything that can be refused has been checked.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from rich.console import Console

from flashtrain import device as devices
from flashtrain import evaluate, generate, ranks, runs
from flashtrain.assembly import Assembly, Data, assemble, load_initial_weights, open_data, weights_digest
from flashtrain.composition import refuse_all_but
from flashtrain.config import Config, TrainConfig
from flashtrain.data.datamodule import StepDataModule
from flashtrain.data.random_tokens import RandomCorpus
from flashtrain.device import Device
from flashtrain.entry import main
from flashtrain.errors import UserError
from flashtrain.evaluation.perplexity import Evaluation
from flashtrain.evaluation.recall import RecallEvaluation
from flashtrain.model.attention import causal_window
from flashtrain.model.gpt import GPT
from flashtrain.model.head import summed_cross_entropy, token_nll
from flashtrain.performance.flops import flops_per_token, peak_flops, visible_keys
from flashtrain.ranks import Ranks
from flashtrain.saved_settings import to_yaml
from flashtrain.training.checkpoint import Checkpoints, load_weights, step_to_resume
from flashtrain.training.loggers import build_loggers, require_wandb
from flashtrain.training.memory import MicroBatch, StepMemory, predict_peak
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.module import TrainingModule
from flashtrain.training.profiler import TraceSteps
from flashtrain.training.trainer import build_trainer

log = logging.getLogger(__name__)

FAILURES_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


@dataclass(frozen=True)
class StepShape:
    """The rows of an optimizer step, the ranks that they are divided among, and how many each has in memory at once."""

    rows: int
    ranks: int
    micro_batch_rows: int

    @property
    def micro_batches(self) -> int:
        """Of each rank."""
        return self.rows // self.ranks // self.micro_batch_rows


def run(config: Config) -> None:
    """Train to the end, or to a signal; the folder of the run then has all that the command line shows."""
    with contextlib.ExitStack() as until_the_end:
        _run(config, until_the_end)


def _run(config: Config, until_the_end: contextlib.ExitStack) -> None:
    """`run`, which keeps what `until_the_end` is given, the folder's lock, until then."""
    refuse_all_but(("output", "resume"), config)
    if config.logger.wandb:
        require_wandb()
    mine = ranks.resolve(config.trainer.devices, devices.resolve_type("trainer.device", config.trainer.device))
    console = Console(quiet=not mine.is_first)
    seen = runs.standing(config.output, config.resume)
    checkpoint = runs.checkpoint_to_resume(config.output, config.resume)
    if checkpoint is not None and (finished := _finished(config)):
        _say(console, f"{finished} has taken all its steps; evaluate it with run={finished}")
        return
    step = 0 if checkpoint is None else step_to_resume(checkpoint)
    devices.reset_peak_memory()  # that of a sweep's earlier jobs
    made = assemble(config, trains=True)
    if config.generate.num_tokens:  # or a prompt of words that a task has not would end the run after its last step
        made.tokenizer.encode(config.generate.prompt)
    if checkpoint is not None and step == 0:  # converted, or stopped before its first step: nothing else matters
        load_weights(made.model, checkpoint)
    start = f"after step {step:,}" if step else "a new run"
    if checkpoint is None and config.train.init_from is not None:
        initial_step = load_initial_weights(made, config.train.init_from)
        start += f", from the weights of {config.train.init_from} after step {initial_step:,}"
    corpus = open_data(config.data, made.tokenizer)
    shape = step_shape(config.train, config.trainer.micro_batch_tokens, mine.world_size)
    data = data_module(config, corpus, shape)
    evaluate.require_key_tokens(corpus, config.eval)
    if reason := evaluate.unscorable(corpus, config.eval):
        log.warning("perplexity by context will not be measured: %s", reason)
    folder = Path(os.devnull)
    if mine.is_first:
        folder = _folder(config, made, corpus, checkpoint)
        until_the_end.enter_context(runs.alone_in(folder))
        if runs.standing(config.output, config.resume) != seen:
            raise UserError(f"another process has trained in {folder} meanwhile; say the same again to go on with that")
        _record(folder, config, made, corpus, checkpoint is not None, mine.world_size)
    module = training_module(config, made, shape, folder / runs.FAULT_FOLDER)
    meter = SpeedMeter(config.train.tokens_per_step)
    trainer = _trainer(config, made, corpus, folder, mine, meter, console)
    log.info(_summary(config, made, corpus, shape, start))
    predicted = predicted_peak(config, made, shape)
    log.info("memory: predicted peak %s", predicted)
    with ranks.together("evaluate what is trained with run=DIR"):
        with _failures_of_the_machine_said(folder, config.trainer.data_workers):
            trainer.fit(module, data, ckpt_path=checkpoint if step else None)
        if trainer.global_step < config.train.steps:
            _say(console, f"stopped after step {trainer.global_step}; continue with resume={folder}")
            return
        if not module.validation_metrics:  # resumed after its last step, which was all but the report
            trainer.validate(module, data, verbose=False)
        result = _result(module, meter) | {"predicted_peak_memory_gib": predicted.total_gib}
        made.model.to(made.device.type).eval()  # Lightning has put it on the CPU
        if mine.is_first and config.generate.num_tokens:
            _sample(config, made, folder, console)
        evaluation = _evaluate(config, made, corpus, console)
    if mine.is_first:
        _report(folder, result, evaluation, console)


@contextlib.contextmanager
def _failures_of_the_machine_said(folder: Path, data_workers: int) -> Iterator[None]:
    """Reword what a log raises that cannot be written, as a checkpoint has its own sentence, and a killed worker."""
    try:
        yield
    except (RuntimeError, EOFError, ConnectionError) as error:
        told = str(error)
        of_a_worker = told.startswith("DataLoader worker (pid") or not isinstance(error, RuntimeError)
        if not (data_workers and of_a_worker):
            raise
        reason = told.rpartition(") ")[2].split(".")[0] or "while it sent a batch"
        raise UserError(
            f"a process that reads data ended ({reason}), often for want of memory; say resume={folder}, with fewer "
            "trainer.data_workers"
        ) from error
    except OSError as error:
        within = isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)
        if error.errno not in FAILURES_OF_A_DISK and not within:
            raise
        raise UserError(f"{folder} cannot be written ({error.strerror}); mend that and say resume={folder}") from error


def step_shape(train: TrainConfig, micro_batch_tokens: int, world_size: int) -> StepShape:
    """Each rank's part in the largest equal micro-batches of at most `micro_batch_tokens`, and of at least one row.

    Raises UserError where ranks have no equal parts.
    """
    rows = train.tokens_per_step // train.sequence_length
    share, left = divmod(rows, world_size)
    if left:
        fitting = (share + 1) * world_size * train.sequence_length
        raise UserError(
            f"train.tokens_per_step is {train.tokens_per_step}, {rows} rows of train.sequence_length, which "
            f"{world_size} ranks cannot share evenly; take trainer.devices that can or, for a new run, "
            f"train.tokens_per_step={fitting}, the next that these can"
        )
    at_most = max(micro_batch_tokens // train.sequence_length, 1)
    largest = max(part for part in range(1, share + 1) if share % part == 0 and part <= at_most)
    return StepShape(rows, world_size, largest)


def data_module(config: Config, corpus: Data | RandomCorpus, shape: StepShape) -> StepDataModule:
    """Its steps and its validation rows. Raises UserError where these are fewer than ranks."""
    train = config.train
    data = StepDataModule(
        corpus,
        sequence_length=train.sequence_length,
        rows_per_step=shape.rows,
        num_steps=train.steps,
        seed=config.seed,
        validation_rows=max(train.validation_tokens // train.sequence_length, 1),
        validation_batch_rows=shape.micro_batch_rows,
        isolate_documents=config.data.isolate_documents,
        num_workers=config.trainer.data_workers,
    )
    if (rows := len(data.validation_rows)) < shape.ranks:
        raise UserError(
            f"validation has {rows} rows of {train.sequence_length} tokens for {shape.ranks} ranks; raise "
            "train.validation_tokens, give more text or take fewer devices"
        )
    return data


def training_module(config: Config, made: Assembly, shape: StepShape, fault_folder: Path | None) -> TrainingModule:
    """What takes its steps; `fault_folder` as `TrainingModule` has it."""
    head = {"vocab_size": made.model.options.vocab_size, "chunk_size": config.trainer.head_chunk_tokens}
    return TrainingModule(
        made.model,
        functools.partial(summed_cross_entropy, **head),
        functools.partial(token_nll, **head),
        bytes_per_token=torch.from_numpy(made.tokenizer.bytes_per_token),
        optimizer=config.optimizer,
        schedule=config.schedule,
        num_steps=config.train.steps,
        micro_batch_rows=shape.micro_batch_rows,
        autocast=made.device.autocast,
        scale_loss=made.device.dtype == torch.float16,
        fault_folder=fault_folder,
    )


def _trainer(
    config: Config, made: Assembly, corpus: Data, folder: Path, mine: Ranks, meter: SpeedMeter, console: Console
) -> Trainer:
    """With loggers, a display and a trace on the first rank alone."""
    train, logs, first = config.train, folder / runs.LOG_FOLDER, mine.is_first
    named = {"run_name": folder.name, "settings": dataclasses.asdict(config)}
    of_gpu, profiled = _peak_flops(made.device), config.trainer.profile_steps
    return build_trainer(
        device_type=made.device.type,
        ranks=mine,
        num_steps=train.steps,
        validate_every=train.validate_every,
        log_every=train.log_every,
        checkpoints=Checkpoints(
            folder / runs.CHECKPOINT_FOLDER, train.checkpoint_every, train.keep_last, train.milestone_every, meter
        ),
        loggers=build_loggers(logs, **vars(config.logger), **named) if first else [],
        meter=meter,
        flops_per_token=training_flops(config, made.model, corpus),
        peak_flops=None if of_gpu is None else mine.world_size * of_gpu,
        callbacks=[TraceSteps(*profiled, logs, meter)] if profiled and first else [],
        console=console,
    )


def _peak_flops(device: Device) -> float | None:
    """Of this GPU in the precision of the run; None where it is not known, or there is none."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(), device.dtype, device.precision.tf32)


def _finished(config: Config) -> Path | None:
    """The folder of the run to continue if it has its result, unless one of its checkpoints is named to go back to."""
    folder = Path(config.output or config.resume)
    return folder if (folder / runs.RESULT_FILE).exists() else None


def _folder(config: Config, made: Assembly, corpus: Data, checkpoint: Path | None) -> Path:
    """The folder of this run; a resumed one has to have the same corpus."""
    if checkpoint is not None:
        folder = checkpoint.parent.parent
        runs.require_same(folder, "corpus", corpus.fingerprint)
        return folder
    if config.resume is None:
        return runs.new_folder(config.output, f"{config.model.name}_{made.variant}")
    return runs.folder_to_start_in(config.output)


def _record(folder: Path, config: Config, made: Assembly, corpus: Data, resumed: bool, world_size: int) -> None:
    """Save the settings of this run in its folder, or that it goes on."""
    runs.remove_partial_files(folder)
    if resumed:
        runs.remove_result(folder)
        recorded = runs.read_provenance(folder)
        recorded.setdefault("resumed", []).append(runs.provenance(attention=made.variant, ranks=world_size))
        runs.write_json(folder / runs.PROVENANCE_FILE, recorded)
        return
    runs.write_whole(folder / runs.CONFIG_FILE, to_yaml(config))
    facts = runs.provenance(
        corpus=corpus.fingerprint,
        tokenizer=made.tokenizer.fingerprint,
        attention=made.variant,
        ranks=world_size,
        parameters=made.model.num_parameters(),
    )
    if config.train.init_from is not None:
        facts["initial_weights"] = weights_digest(made.model)
    runs.write_json(folder / runs.PROVENANCE_FILE, facts)


def training_flops(config: Config, model: GPT, corpus: Data | RandomCorpus) -> dict[str, float]:
    """FLOPs of a training token: the usual count, and one of only the keys that the layers' masks show.

    Where documents are apart a step shows more or fewer keys than another; counted is the mean of the training rows.
    """
    options, length = model.options, config.train.sequence_length
    looked_up = model.position_embedding.weight.numel() if options.positions == "learned" else 0
    looked_up += 0 if options.tie_embeddings else model.token_embedding.weight.numel()
    count = functools.partial(
        flops_per_token,
        sum(parameter.numel() for parameter in model.parameters()) - looked_up,
        options.num_layers,
        options.num_heads,
        options.head_dim,
    )
    pieces = corpus.train.piece_lengths(length) if config.data.isolate_documents else [length]
    visible = visible_keys([causal_window(window) for window in options.windows], pieces)
    return {"mfu": count(length), "mfu_visible": count(visible)}


def _summary(config: Config, made: Assembly, corpus: Data, shape: StepShape, start: str) -> str:
    train = config.train
    return "\n".join(
        [
            f"data: {corpus.summary()}",
            f"model: {config.model.name}, {made.model.num_parameters():,} parameters; attention {made.variant}"
            f"{', deterministic' * config.attention.deterministic}; {made.device}",
            f"step: {train.tokens_per_step:,} tokens = {shape.rows} rows of {train.sequence_length:,}"
            f"{' with documents apart' * config.data.isolate_documents}, "
            f"{shape.micro_batches} micro-batches of {shape.micro_batch_rows}"
            f"{f' on each of {shape.ranks} ranks' * (shape.ranks > 1)}; {train.steps:,} steps",
            f"start: {start}",
        ]
    )


def predicted_peak(config: Config, made: Assembly, shape: StepShape) -> StepMemory:
    """The fullest moment of a step of that run; of the model only shapes and dtypes are read."""
    micro_batch = MicroBatch(
        shape.micro_batch_rows,
        config.train.sequence_length,
        device_type=made.device.type,
        dtype=made.device.dtype,
        compiled=made.device.compile,
        variant=made.variant,
        activation_checkpointing=config.trainer.activation_checkpointing,
        head_chunk_tokens=config.trainer.head_chunk_tokens,
        accumulated=shape.micro_batches > 1 or shape.ranks > 1,
    )
    return predict_peak(made.model, config.optimizer, micro_batch)


def _result(module: TrainingModule, meter: SpeedMeter) -> dict[str, float]:
    """What the training came to; read before anything else uses the device's memory."""
    result = {"validation_loss": module.validation_metrics["val/loss"]}
    if "val/bits_per_byte" in module.validation_metrics:
        result["bits_per_byte"] = module.validation_metrics["val/bits_per_byte"]
    if speed := meter.average():
        result["tokens_per_second"] = speed
    if (memory := devices.peak_memory_gib()) is not None:
        result["peak_memory_gib"] = float(ranks.largest({"memory": memory}, torch.device("cuda"))["memory"])
    return result


def _sample(config: Config, made: Assembly, folder: Path, console: Console) -> None:
    text = generate.sample(made, config.generate, config.train.sequence_length, config.seed)
    runs.write_whole(folder / runs.SAMPLE_FILE, text)
    console.rule("sample")
    _say(console, text)


def _evaluate(config: Config, made: Assembly, corpus: Data, console: Console) -> Evaluation | RecallEvaluation | None:
    """By all ranks together; None where no document is long enough."""
    if evaluate.unscorable(corpus, config.eval):
        return None
    console.rule("evaluation")
    conditions = evaluate.conditions_of(made, corpus, config, config.train.steps)
    return evaluate.measure(made, corpus, config, conditions, console)


def _report(
    folder: Path, result: dict[str, float], evaluation: Evaluation | RecallEvaluation | None, console: Console
) -> None:
    """The result and where everything lies; the file of the result, written last, says that all is there."""
    reports = evaluate.write(evaluation, folder / runs.EVALUATION_FOLDER / "final") if evaluation else []
    runs.write_json(folder / runs.RESULT_FILE, result)
    console.rule("result")
    _say(console, f"validation loss: {result['validation_loss']:.4f} nats per token")
    if "bits_per_byte" in result:
        _say(console, f"bits per byte: {result['bits_per_byte']:.2f}")
    if "tokens_per_second" in result:
        _say(console, f"speed: {result['tokens_per_second']:,.0f} tokens/s")
    if "peak_memory_gib" in result:
        used, predicted = result["peak_memory_gib"], result["predicted_peak_memory_gib"]
        _say(console, f"peak memory: {used:.2f} GiB, predicted {predicted:.2f}")
    _say(console, "wrote:")
    for path in [*runs.written(folder), *reports]:
        _say(console, f"  {path}")


def _say(console: Console, text: str) -> None:
    """Print text as it is: brackets are no markup, and paths stay whole."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main(run)
