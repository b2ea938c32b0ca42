"""The schema of every setting: the dataclasses that Hydra checks each key and value against.

YAML files in conf/ hold values only. `composition` makes a `Config` of what Hydra composed, `contradictions` says what
cannot be in one. Only the verbs read a `Config`: below them code takes plain arguments. A command that makes and
reads no run has a dataclass of its own instead.
"""

from dataclasses import dataclass

from flashtrain.data.options import CorpusOptions, DataOptions, RecallOptions, TextOptions
from flashtrain.evaluation.options import EvalOptions
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions
from flashtrain.training.optim import OPTIMIZERS, OptimizerOptions
from flashtrain.training.schedule import SCHEDULES, ScheduleOptions

# What one command does, not what a run is: never taken from a saved run.
INVOCATION = ("output", "resume", "run", "runs", "checkpoint")


@dataclass
class AttentionConfig:
    variant: str
    """A name of `flashtrain.kernels.attention.NAMES`; auto is the fastest that can do it, and is said."""
    deterministic: bool
    """Whether output and gradients have the same bits every run; what cannot promise that is refused."""


@dataclass
class TrainConfig:
    sequence_length: int
    """Tokens in a row: the context that the model is trained with."""
    tokens_per_step: int
    """Tokens whose loss makes one optimizer step."""
    steps: int
    """Optimizer steps in the run."""
    validate_every: int
    """Optimizer steps between validations; the best one's weights are kept."""
    validation_tokens: int
    """Validation tokens scored each time, at most."""
    checkpoint_every: int
    """Optimizer steps between saves of the last checkpoint."""
    keep_last: int
    """How many of these are kept beside it, with names by step; 0: only the last, and the best."""
    milestone_every: int | None
    """Optimizer steps between weights that are kept for ever, without what resuming takes; null: none."""
    log_every: int
    """Optimizer steps between logged rows."""
    init_from: str | None = None
    """Folder of a run whose weights this one starts from, or one of its checkpoints; the optimizer starts anew. null:
    weights are drawn."""
    pretrained_length: int | None = None
    """Tokens in a row that the weights were trained with before this run, not to be chosen; null: they were drawn."""

    def length_after(self, steps: int) -> int:
        """Tokens in a row that the weights after `steps` steps of this run were trained with, the longest."""
        if self.pretrained_length is None:
            return self.sequence_length
        return max(self.pretrained_length, self.sequence_length) if steps else self.pretrained_length


@dataclass
class TrainerConfig:
    device: str
    """auto (CUDA where there is one), cpu or cuda."""
    devices: int | None
    """The processes of this machine, each with a GPU or all on the CPU, which share the rows of a training step and
    the windows of an evaluation; null: as many as torchrun has started, or one."""
    precision: str
    """auto (bf16 on CUDA, fp32 on CPU); fp32; tf32 (fp32 but for products); bf16, fp16 (by autocast over fp32 weights,
    fp16 with loss scaling); bf16-true (weights, gradients and moments in bf16 too)."""
    compile: bool | None
    """Whether torch.compile compiles the model; null: on CUDA only."""
    micro_batch_tokens: int
    """Tokens in memory at once, at most; a step with more is accumulated, with the same result."""
    activation_checkpointing: str
    """none, mlp (a block keeps all but what its MLP's activation function returns), pointwise (its input and what its
    matrix products and its attention return), selective (its input and what its attention returns) or full (its input
    alone): what is not kept is computed again in the backward."""
    head_chunk_tokens: int
    """Tokens whose logits exist at once in the head and its cross-entropy."""
    data_workers: int
    """Processes that read training batches ahead; 0: the trainer reads them itself."""
    profile_steps: list[int] | None
    """First and last optimizer step, counted from 1, of a Chrome trace in the run's logs; null: none."""


@dataclass
class EvalConfig(EvalOptions):
    rope: RopeOptions
    """Rotary positions in place of the model's, for the evaluation alone; a type of null is the model's."""


@dataclass
class GenerateConfig:
    prompt: str
    num_tokens: int
    temperature: float
    """0 takes the most probable token each time."""
    top_k: int | None
    """Sample among this many most probable tokens; null: among all."""


@dataclass
class LoggerConfig:
    csv: bool
    tensorboard: bool
    wandb: bool
    """Weights & Biases; its environment variables hold: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY."""


@dataclass
class Config:
    model: ModelOptions
    attention: AttentionConfig
    data: DataOptions
    optimizer: OptimizerOptions
    schedule: ScheduleOptions
    trainer: TrainerConfig
    train: TrainConfig
    eval: EvalConfig
    generate: GenerateConfig
    logger: LoggerConfig
    seed: int
    output: str | None
    """Folder of the new run; null: runs/ with the time, the model and the attention."""
    resume: str | None
    """Folder of an interrupted run to continue, or one of its checkpoints to go back to. With `output`, for a command
    that is run again: auto (continue where there is a checkpoint, or start), must (continue) or never (start)."""
    run: str | None
    """Folder of a finished run to evaluate or to sample from."""
    runs: list[str] | None
    """Folders of evaluations to compare, or of runs, each for its newest evaluation."""
    checkpoint: str
    """Which weights of that run: last, best (of the lowest validation loss), or the number of a step that are kept."""


# Groups whose choices have fields of their own -> the field that names the choice, and the dataclass of each name.
CHOICES = {
    "data": ("source", {"stdlib": CorpusOptions, "text": TextOptions, "recall": RecallOptions}),
    "optimizer": ("name", OPTIMIZERS),
    "schedule": ("name", SCHEDULES),
}
