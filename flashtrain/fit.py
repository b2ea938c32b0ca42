"""Train: assemble what the settings ask for, fit it with Lightning, then report what came out.

The run's folder is made once everything that can be refused has been checked.
"""

import functools
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer
from rich.console import Console

from flashtrain import evaluate, generate, runs
from flashtrain.assembly import CAUSAL, Assembly, assemble
from flashtrain.config import Config, TrainConfig, to_yaml
from flashtrain.data.datamodule import StepDataModule
from flashtrain.errors import UserError
from flashtrain.evaluation.windows import reached_lengths
from flashtrain.model.gpt import GPT
from flashtrain.model.head import summed_cross_entropy, token_nll
from flashtrain.performance.flops import flops_per_token, peak_flops
from flashtrain.training.loggers import build_loggers
from flashtrain.training.meter import SpeedMeter
from flashtrain.training.module import TrainingModule
from flashtrain.training.trainer import build_trainer

log = logging.getLogger(__name__)

PRECISIONS = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}


@dataclass(frozen=True)
class StepShape:
    """The rows of an optimizer step, and how many of them are in memory at once."""

    rows: int
    micro_batch_rows: int


def run(config: Config) -> None:
    """Train to the end, or to a signal; the folder of the run then has all that the command line shows."""
    console = Console()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # those of a sweep's earlier jobs
    made = assemble(config, trains=True)
    reached_lengths(np.diff(made.corpus.validation.offsets), config.eval.lengths)  # refused now, not after training
    shape = step_shape(config.train, config.trainer.micro_batch_tokens)
    data = _data_module(config, made, shape)
    module = _training_module(config, made, shape)
    folder = _folder(config, made)
    meter = SpeedMeter(config.train.tokens_per_step)
    trainer = _trainer(config, made, folder, meter, console)
    log.info(_summary(config, made, shape))
    trainer.fit(module, data, ckpt_path=_checkpoint_to_resume(config))
    if trainer.global_step < config.train.steps:
        console.print(f"stopped after step {trainer.global_step}; continue with resume={folder}", highlight=False)
        return
    if not module.validation_metrics:  # a finished run was resumed
        trainer.validate(module, data, verbose=False)
    _report(config, made, folder, _result(module, meter), console)


def step_shape(train: TrainConfig, micro_batch_tokens: int) -> StepShape:
    """The largest equal micro-batches of at most `micro_batch_tokens`, and of at least one row."""
    rows = train.tokens_per_step // train.sequence_length
    at_most = max(micro_batch_tokens // train.sequence_length, 1)
    return StepShape(rows, max(part for part in range(1, rows + 1) if rows % part == 0 and part <= at_most))


def _data_module(config: Config, made: Assembly, shape: StepShape) -> StepDataModule:
    train = config.train
    # Whole micro-batches, so that a compiled model meets one shape.
    validation_batches = math.ceil(train.validation_tokens / (train.sequence_length * shape.micro_batch_rows))
    return StepDataModule(
        made.corpus,
        sequence_length=train.sequence_length,
        rows_per_step=shape.rows,
        num_steps=train.steps,
        seed=config.seed,
        validation_rows=validation_batches * shape.micro_batch_rows,
        validation_batch_rows=shape.micro_batch_rows,
    )


def _training_module(config: Config, made: Assembly, shape: StepShape) -> TrainingModule:
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
    )


def _trainer(config: Config, made: Assembly, folder: Path, meter: SpeedMeter, console: Console) -> Trainer:
    train, logger = config.train, config.logger
    return build_trainer(
        device_type=made.device.type,
        precision=PRECISIONS[made.device.dtype],
        num_steps=train.steps,
        validate_every=train.validate_every,
        checkpoint_every=train.checkpoint_every,
        log_every=train.log_every,
        checkpoint_folder=folder / runs.CHECKPOINT_FOLDER,
        loggers=build_loggers(folder / runs.LOG_FOLDER, csv=logger.csv, tensorboard=logger.tensorboard),
        meter=meter,
        flops_per_token=_flops(made.model, train.sequence_length),
        peak_flops=peak_flops(torch.cuda.get_device_name()) if made.device.type == "cuda" else None,
        console=console,
    )


def _folder(config: Config, made: Assembly) -> Path:
    """The folder of this run, with its settings saved; a resumed one has to have the same corpus."""
    if config.resume is not None:
        folder = Path(config.resume)
        trained_on = runs.read_provenance(folder)["corpus"]
        if trained_on != made.corpus.fingerprint:
            raise UserError(
                f"{folder} was trained on corpus {trained_on} and the data is now {made.corpus.fingerprint}; "
                "bring the old files and tokenizer back, or start a new run"
            )
        return folder
    folder = runs.new_folder(config.output, f"{config.model.name}_{made.variant}")
    facts = runs.provenance(
        corpus=made.corpus.fingerprint,
        tokenizer=made.tokenizer.fingerprint,
        attention=made.variant,
        parameters=made.model.num_parameters(),
    )
    runs.write_json(folder / runs.PROVENANCE_FILE, facts)
    runs.write_whole(folder / runs.CONFIG_FILE, to_yaml(config))
    return folder


def _checkpoint_to_resume(config: Config) -> Path | None:
    if config.resume is None:
        return None
    return runs.checkpoint(Path(config.resume), "last")


def _flops(model: GPT, sequence_length: int) -> dict[str, float]:
    """FLOPs of a training token: the usual count, and one of only the keys that the causal mask shows."""
    options = model.options
    looked_up = model.position_embedding.weight.numel() if options.positions == "learned" else 0
    looked_up += 0 if options.tie_embeddings else model.token_embedding.weight.numel()
    count = functools.partial(
        flops_per_token,
        sum(parameter.numel() for parameter in model.parameters()) - looked_up,
        options.num_layers,
        options.num_heads,
        options.head_dim,
    )
    visible = CAUSAL.visible(sequence_length, sequence_length) / sequence_length
    return {"mfu": count(sequence_length), "mfu_visible": count(visible)}


def _summary(config: Config, made: Assembly, shape: StepShape) -> str:
    device, train = made.device, config.train
    return "\n".join(
        [
            f"data: {made.corpus.summary()}",
            f"model: {config.model.name}, {made.model.num_parameters():,} parameters; attention {made.variant}; "
            f"{str(device.dtype).removeprefix('torch.')} on {device.type}{', compiled' * device.compile}",
            f"step: {train.tokens_per_step:,} tokens = {shape.rows} rows of {train.sequence_length:,}, "
            f"{shape.rows // shape.micro_batch_rows} micro-batches of {shape.micro_batch_rows}; {train.steps:,} steps",
        ]
    )


def _result(module: TrainingModule, meter: SpeedMeter) -> dict[str, float]:
    """What the training came to; read before anything else uses the device's memory."""
    result = {
        "validation_loss": module.validation_metrics["val/loss"],
        "bits_per_byte": module.validation_metrics["val/bits_per_byte"],
    }
    if speed := meter.average():
        result["tokens_per_second"] = speed
    if torch.cuda.is_initialized():
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def _report(config: Config, made: Assembly, folder: Path, result: dict[str, float], console: Console) -> None:
    """A sample, the perplexity curves, the result and where everything lies."""
    made.model.to(made.device.type).eval()  # Lightning has put it on the CPU
    text = generate.sample(made, config.generate, config.train.sequence_length, config.seed)
    runs.write_whole(folder / runs.SAMPLE_FILE, text)
    console.rule("sample")
    console.print(text, markup=False, highlight=False)
    console.rule("perplexity")
    reports = evaluate.report(made, config, config.train.steps, folder / runs.EVALUATION_FOLDER / "final", console)
    runs.write_json(folder / runs.RESULT_FILE, result)
    console.rule("result")
    lines = [
        f"validation loss: {result['validation_loss']:.4f} nats per token",
        f"bits per byte: {result['bits_per_byte']:.2f}",
    ]
    if "tokens_per_second" in result:
        lines.append(f"speed: {result['tokens_per_second']:,.0f} tokens/s")
    if "peak_memory_gib" in result:
        lines.append(f"peak memory: {result['peak_memory_gib']:.2f} GiB")
    for line in [*lines, "wrote:", *(f"  {path}" for path in [*runs.written(folder), *reports])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
