"""Train: assemble what the settings ask for, fit it with Lightning, then report what came out.

The run's folder is made once everything that can be refused has been checked.
"""

import functools
import logging
import math
from pathlib import Path

import numpy as np
import torch
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


def run(config: Config) -> None:
    """Train to the end, or to a signal; the folder of the run then has all that the command line shows."""
    console = Console()
    train, trainer_config = config.train, config.trainer
    made = assemble(config, trains=True)
    model = made.model
    rows_per_step = train.tokens_per_step // train.sequence_length
    micro_batch_rows = largest_part(rows_per_step, trainer_config.micro_batch_tokens // train.sequence_length)
    data = StepDataModule(
        made.corpus,
        sequence_length=train.sequence_length,
        rows_per_step=rows_per_step,
        num_steps=train.steps,
        seed=config.seed,
        validation_rows=_validation_batches(train, micro_batch_rows) * micro_batch_rows,
        validation_batch_rows=micro_batch_rows,
    )
    reached_lengths(np.diff(made.corpus.validation.offsets), config.eval.lengths)  # refused now, not after training
    head = {"vocab_size": model.options.vocab_size, "chunk_size": trainer_config.head_chunk_tokens}
    module = TrainingModule(
        model,
        functools.partial(summed_cross_entropy, **head),
        functools.partial(token_nll, **head),
        bytes_per_token=torch.from_numpy(made.tokenizer.bytes_per_token),
        optimizer=config.optimizer,
        schedule=config.schedule,
        num_steps=train.steps,
        micro_batch_rows=micro_batch_rows,
    )
    folder = _folder(config, made)
    meter = SpeedMeter(train.tokens_per_step)
    trainer = build_trainer(
        device_type=made.device.type,
        precision=PRECISIONS[made.device.dtype],
        num_steps=train.steps,
        validate_every=train.validate_every,
        checkpoint_every=train.checkpoint_every,
        log_every=train.log_every,
        checkpoint_folder=folder / runs.CHECKPOINT_FOLDER,
        loggers=build_loggers(
            folder / runs.LOG_FOLDER, csv=config.logger.csv, tensorboard=config.logger.tensorboard
        ),
        meter=meter,
        flops_per_token=_flops(model, train.sequence_length),
        peak_flops=peak_flops(torch.cuda.get_device_name()) if made.device.type == "cuda" else None,
        console=console,
    )
    log.info(_summary(config, made, rows_per_step, micro_batch_rows))
    trainer.fit(module, data, ckpt_path=_checkpoint_to_resume(config))
    if trainer.global_step < train.steps:
        console.print(f"stopped after step {trainer.global_step}; continue with resume={folder}", highlight=False)
        return
    if not module.validation_metrics:  # a finished run was resumed
        trainer.validate(module, data, verbose=False)
    _report(config, made, folder, module, meter, console)


def largest_part(total: int, at_most: int) -> int:
    """The largest divisor of `total` that is no more than `at_most`, and at least 1."""
    return max(part for part in range(1, total + 1) if total % part == 0 and part <= max(at_most, 1))


def _validation_batches(train: TrainConfig, micro_batch_rows: int) -> int:
    """Whole micro-batches, so that a compiled model meets one shape."""
    return math.ceil(train.validation_tokens / (train.sequence_length * micro_batch_rows))


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
    runs.write_provenance(folder, facts)
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


def _summary(config: Config, made: Assembly, rows_per_step: int, micro_batch_rows: int) -> str:
    device, train = made.device, config.train
    return "\n".join(
        [
            f"data: {made.corpus.summary()}",
            f"model: {config.model.name}, {made.model.num_parameters():,} parameters; attention {made.variant}; "
            f"{str(device.dtype).removeprefix('torch.')} on {device.type}{', compiled' * device.compile}",
            f"step: {train.tokens_per_step:,} tokens = {rows_per_step} rows of {train.sequence_length:,}, "
            f"{rows_per_step // micro_batch_rows} micro-batches of {micro_batch_rows}; {train.steps:,} steps",
        ]
    )


def _report(
    config: Config, made: Assembly, folder: Path, module: TrainingModule, meter: SpeedMeter, console: Console
) -> None:
    """The last validation, a sample, the perplexity curves and where everything lies."""
    made.model.to(made.device.type).eval()
    metrics = module.validation_metrics
    text = generate.sample(made, config.generate, config.train.sequence_length, config.seed)
    (folder / runs.SAMPLE_FILE).write_text(text, encoding="utf-8")
    console.rule("sample")
    console.print(text, markup=False, highlight=False)
    console.rule("perplexity")
    reports = evaluate.report(
        made, config, config.train.steps, folder / runs.EVALUATION_FOLDER / "final", console
    )
    console.rule("result")
    lines = [
        f"validation loss: {metrics['val/loss']:.4f} nats per token",
        f"bits per byte: {metrics['val/bits_per_byte']:.2f}",
    ]
    if speed := meter.average():
        lines.append(f"speed: {speed:,.0f} tokens/s")
    if made.device.type == "cuda":
        lines.append(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    paths = [folder / name for name in (runs.CONFIG_FILE, runs.PROVENANCE_FILE, runs.SAMPLE_FILE)]
    paths += sorted((folder / runs.CHECKPOINT_FOLDER).iterdir())
    paths += sorted((folder / runs.LOG_FOLDER).iterdir()) if (folder / runs.LOG_FOLDER).exists() else []
    for line in [*lines, "wrote:", *(f"  {path}" for path in [*paths, *reports])]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
