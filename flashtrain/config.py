"""The schema of every setting, and what makes settings one run: known keys, a saved run, no contradictions.

The dataclasses are what Hydra checks each key and value against; YAML files in conf/ hold values only. `settle`
turns what Hydra composed into a `Config`, with a run's own settings where `run` or `resume` names it.
Only the verbs read a `Config`: below them code takes plain arguments. A command that makes and reads no run has
a `Root` of its own instead.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flashtrain import runs
from flashtrain.data.options import CorpusOptions, DataOptions, RecallOptions, TextOptions
from flashtrain.errors import UserError
from flashtrain.evaluation.options import EvalOptions
from flashtrain.evaluation.recall import KEYS as RECALL_KEYS
from flashtrain.model.checkpointing import MODES
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import TYPES, RopeOptions
from flashtrain.training.checkpoint import read_checkpoint
from flashtrain.training.optim import OPTIMIZERS, OptimizerOptions
from flashtrain.training.schedule import SCHEDULES, ScheduleOptions

# What a command may change on a finished or interrupted run; everything else makes it another run.
CHANGEABLE = ("attention", "trainer", "eval", "generate", "logger")

# Of what the weights are that a run starts from, which it finds out.
PRETRAINED_LENGTH = "train.pretrained_length"

MOST_SEEDS = 2**32

# Of what these count there may be none.
MAY_BE_NONE = ("keep_last", "data_workers")

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
    """none, selective (a block keeps its input and what its attention returns) or full (its input alone): what is not
    kept is computed again in the backward."""
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


def settle(composed: DictConfig, overrides: list[str]) -> Config:
    """The settings of one run from what Hydra composed and the command line that it composed them from.

    Where `resume` or `run` names a run, its settings hold, but for `CHANGEABLE` ones that are given. Where `resume`
    is a word, those of the command line hold, and are those of a run in `output` but for `CHANGEABLE` ones. Raises
    UserError for an unknown key (also one added with +), for a changed setting of a saved run and, all at once,
    for every contradiction.
    """
    _refuse_unknown_keys(composed)
    if composed.runs is not None:
        _refuse_beside_runs(overrides)
    by_word = composed.resume in runs.RESUME_WORDS
    if by_word and composed.output is None:
        raise UserError(
            f"resume={composed.resume} is for a run whose folder is given: say output=DIR too; a folder of that name "
            f"is resume=./{composed.resume}"
        )
    folders = {"output": composed.output, "resume": None if by_word else composed.resume, "run": composed.run}
    named = [key for key, folder in folders.items() if folder is not None]
    if len(named) > 1:
        raise UserError(
            f"{' and '.join(named)} are set together; output makes a run, resume continues one, run evaluates one: "
            "name one"
        )
    if folders["resume"]:
        composed = _of_saved_run(runs.folder_of(composed.resume), composed, overrides)
    elif composed.run:
        composed = _of_saved_run(Path(composed.run), composed, overrides)
    elif composed.train.init_from:
        composed.train.pretrained_length = _length_of_weights(composed.train.init_from)
    if PRETRAINED_LENGTH in given_keys(overrides) and not (folders["resume"] or composed.run):
        raise UserError(f"{PRETRAINED_LENGTH} is not to be chosen, it is that of train.init_from; leave it out")
    config = OmegaConf.to_object(composed)
    config.optimizer = config.optimizer.resolve(config.model.hidden_size)
    shortest = None
    if isinstance(config.data, RecallOptions):
        _refuse_for_recall(overrides)
        shortest = config.data.shortest
    config.eval = config.eval.resolve(config.train.sequence_length, config.model.position_limit, shortest)
    _refuse(contradictions(config))
    if by_word:
        _refuse_another_run(Path(config.output), config)
    return config


def settle_alone(composed: DictConfig, overrides: list[str]) -> Any:
    """The settings of a command that reads no run: an instance of a dataclass with a `validate`, as `settle` says."""
    _refuse_unknown_keys(composed)
    config = OmegaConf.to_object(composed)
    _refuse(config.validate())
    return config


@dataclass(frozen=True)
class Root:
    """All the settings that a command takes."""

    name: str
    """conf/NAME.yaml holds their values; `schema` is the first of its defaults."""
    schema: type
    """Their dataclass."""
    settle: Callable[[DictConfig, list[str]], Any] = settle_alone
    """(what Hydra composed, the command line it was composed from) -> an instance of `schema`, or UserError."""

    def register(self) -> None:
        """Give Hydra the schemas: the root's, and those of choices with fields of their own."""
        store = ConfigStore.instance()
        store.store(name="schema", node=self.schema)
        for group, (_, schemas) in CHOICES.items():
            for name, node in schemas.items():
                store.store(group=f"schema/{group}", name=name, node=node, package=group)


RUN = Root("config", Config, settle)


def _refuse(problems: list[str]) -> None:
    if len(problems) > 1:
        raise UserError("\n  - ".join(["these settings do not go together:", *problems]))
    if problems:
        raise UserError(problems[0])


def refuse_all_but(used: tuple[str, ...], config: Config) -> None:
    """Raise UserError for a key of `INVOCATION` that is set and that this command has no use for."""
    for name in INVOCATION:
        value = getattr(config, name)
        if name not in used and value not in (None, runs.DEFAULT_CHECKPOINT):
            raise UserError(f"{name}={value} is not for this command, which takes {' and '.join(used)}; leave it out")


def given_keys(overrides: list[str]) -> set[str]:
    """The keys that a command line gives a value, those within a dictionary too: `a={b:1}` gives a.b."""
    given = set()
    parsed = OverridesParser.create().parse_overrides(overrides)
    left = [(override.key_or_group, override.value()) for override in parsed]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            given.add(key)
    return given


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def unknown_key(full_key: str, group: type) -> str:
    """The sentence for a key that dataclass `group` does not have, with the nearest that it has."""
    prefix, _, key = full_key.rpartition(".")
    where = f"{prefix}." if prefix else ""
    names = list(group.__dataclass_fields__)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if near:
        return f"there is no setting {full_key}; did you mean {where}{near[0]}?"
    return f"there is no setting {full_key}; allowed are {', '.join(where + name for name in names)}"


def not_among(key: str, names: Sequence[str], allowed: Iterable[str]) -> list[str]:
    """Problems of a list of names: those of `once_each`, or what is not allowed, with the nearest that is."""
    allowed = list(allowed)
    problems = []
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            problems.append(f"{key} has {name}; {hint}allowed are {', '.join(allowed)}")
    return problems or once_each(key, names)


def once_each(key: str, values: Sequence[object]) -> list[str]:
    """Problems of a list of choices: that it is empty, or has one twice."""
    if not values:
        return [f"{key} is empty; give at least one"]
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    return [f"{key} has {', '.join(map(str, twice))} more than once; name each once"] if twice else []


def _refuse_unknown_keys(node: DictConfig, prefix: str = "") -> None:
    """Hydra's + adds keys that no schema has; here they are refused like any other unknown key."""
    group = OmegaConf.get_type(node)
    for key in node:
        if key not in group.__dataclass_fields__:
            raise UserError(unknown_key(f"{prefix}{key}", group))
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            _refuse_unknown_keys(node[key], f"{prefix}{key}.")


def _refuse_beside_runs(overrides: list[str]) -> None:
    """Raise UserError for what is given beside `runs`: evaluations that are made already depend on no setting."""
    given = {override.key_or_group for override in OverridesParser.create().parse_overrides(overrides)}
    if others := sorted(given - {"runs", "output"}):
        raise UserError(
            f"{', '.join(others)} cannot go with runs, which compares evaluations as they were made; leave it out, or "
            "evaluate each run with it first"
        )


def _refuse_for_recall(overrides: list[str]) -> None:
    """Raise UserError for what is given about the perplexity of text, which data=recall has not."""
    evaluation = {key for key in given_keys(overrides) if key.startswith("eval.")}
    used = [f"eval.{name}" for name in RECALL_KEYS]
    if others := sorted(key for key in evaluation if not key.startswith(tuple(used))):
        raise UserError(
            f"{', '.join(others)} is of perplexity and data=recall is evaluated by recall, which takes "
            f"{', '.join(used)}; leave it out"
        )


def _of_saved_run(folder: Path, composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The settings of a saved run, with the changeable ones of the command line; other changes are refused."""
    settings = _saved(folder)
    differences = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if key == "experiment":
            raise UserError(f"experiment=... makes a new run; leave it out: {folder} has its own settings")
        if key.split(".")[0] in CHANGEABLE:
            OmegaConf.update(settings, key, OmegaConf.select(composed, key), merge=False)
        elif key not in INVOCATION:
            differences += _differences(key, OmegaConf.select(settings, key), OmegaConf.select(composed, key))
    for key in INVOCATION:
        settings[key] = composed[key]
    if differences:
        raise UserError(
            f"{folder} was made with other settings: {'; '.join(differences)}; leave them out, or start a new "
            f"run, since only {', '.join(CHANGEABLE)} may change"
        )
    return settings


def _refuse_another_run(folder: Path, config: Config) -> None:
    """Raise UserError where `folder` is of a run with other settings, but for the changeable ones."""
    if not (folder / runs.CONFIG_FILE).exists():
        return
    saved, asked = _saved(folder), OmegaConf.structured(config)
    keys = [key for key in saved if key not in (*CHANGEABLE, *INVOCATION)]
    if differences := [line for key in keys for line in _differences(key, saved[key], asked[key])]:
        raise UserError(
            f"{folder} was made with other settings: {'; '.join(differences)}; give those that are there, or another "
            f"output, since only {', '.join(CHANGEABLE)} may change"
        )


def saved_model(folder: Path) -> ModelOptions:
    """The model of the run in `folder`. Raises UserError where there is none."""
    return OmegaConf.to_object(_saved(folder).model)


def _length_of_weights(place: str) -> int:
    """Tokens in a row that the weights of a run, or in one of its checkpoints, were trained with."""
    try:
        train = OmegaConf.to_object(_saved(runs.folder_of(place)).train)
        return train.length_after(read_checkpoint(runs.checkpoint_of(place))["global_step"])
    except UserError as error:
        raise UserError(f"train.init_from={place} has no weights to start from: {error}") from None


def _saved(folder: Path) -> DictConfig:
    path = folder / runs.CONFIG_FILE
    try:
        values = OmegaConf.load(path)
    except OSError:
        raise UserError(f"{folder} is not the folder of a run: it has no {runs.CONFIG_FILE} to read") from None
    except (UnicodeDecodeError, YAMLError):
        raise UserError(f"{path} is damaged; start a new run") from None
    try:
        settings = OmegaConf.structured(Config)
        for group, (key, schemas) in CHOICES.items():
            settings[group] = OmegaConf.structured(schemas[getattr(values[group], key)])
        settings = OmegaConf.merge(settings, values)
    except (OmegaConfBaseException, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not fit the settings of this version: {reason}") from None
    if missing := sorted(OmegaConf.missing_keys(settings)):
        raise UserError(f"{path} does not fit the settings of this version: give it {', '.join(missing)}")
    return settings


def _differences(key: str, saved: object, asked: object) -> list[str]:
    if isinstance(saved, DictConfig) and isinstance(asked, DictConfig):
        names = dict.fromkeys([*saved, *asked])
        return [line for n in names for line in _differences(f"{key}.{n}", saved.get(n), asked.get(n))]
    return [] if saved == asked else [f"{key} is {saved} there and {asked} here"]


def contradictions(config: Config) -> list[str]:
    """Every problem that the settings have together, one sentence each."""
    return [
        *_misnamed(config),
        *_too_low("train", config.train),
        *_too_low("trainer", config.trainer),
        *_sizes(config.train, config.model.position_limit),
        *_checkpointing(config.trainer.activation_checkpointing),
        *_profile(config.trainer.profile_steps, config.train.steps),
        *config.model.validate(),
        *config.optimizer.validate(),
        *config.schedule.validate(),
        *_evaluation(config),
        *_evaluated_rope(config),
        *_generation(config.generate),
        *_invocation(config),
    ]


def _misnamed(config: Config) -> list[str]:
    """A choice is made by its file, which brings its fields; its name alone would change nothing."""
    problems = []
    for group, (key, schemas) in CHOICES.items():
        options = getattr(config, group)
        if schemas.get(name := getattr(options, key)) is not type(options):
            problems.append(f"{group}.{key} is {name}, which chooses nothing; say {group}={' or '.join(schemas)}")
    return problems


def _invocation(config: Config) -> list[str]:
    problems = []
    if not 0 <= config.seed < MOST_SEEDS:
        problems.append(f"seed is {config.seed}; it must be at least 0 and below {MOST_SEEDS}")
    if config.runs is not None:
        problems += once_each("runs", config.runs)
    if config.checkpoint not in runs.CHECKPOINTS and not config.checkpoint.isdecimal():
        allowed = ", ".join(runs.CHECKPOINTS)
        problems.append(f"checkpoint is {config.checkpoint}; allowed are {allowed} and the number of a step")
    return problems


def _too_low(group: str, options: TrainConfig | TrainerConfig) -> list[str]:
    """All integers of these groups count something; of most there is at least one."""
    counts = {name: value for name, value in vars(options).items() if type(value) is int}
    least = {name: 0 if name in MAY_BE_NONE else 1 for name in counts}
    return [
        f"{group}.{name} is {value}; it must be at least {least[name]}"
        for name, value in counts.items()
        if value < least[name]
    ]


def _sizes(train: TrainConfig, position_limit: int | None) -> list[str]:
    length, tokens, problems = train.sequence_length, train.tokens_per_step, []
    if length > 0 and tokens % length:
        problems.append(
            f"train.tokens_per_step is {tokens} and no multiple of train.sequence_length {length}; the next that "
            f"is: train.tokens_per_step={(tokens // length + 1) * length}"
        )
    if position_limit is not None and length > position_limit:
        problems.append(
            f"train.sequence_length is {length} and the model's learned positions end at {position_limit}; "
            "lower it, or say model.positions=rope"
        )
    return problems


def _checkpointing(mode: str) -> list[str]:
    if mode in MODES:
        return []
    return [f"trainer.activation_checkpointing is {mode}; allowed are {', '.join(MODES)}"]


def _profile(profile_steps: list[int] | None, steps: int) -> list[str]:
    match profile_steps:
        case None:
            return []
        case [first, last] if 1 <= first <= last <= steps:
            return []
    return [
        f"trainer.profile_steps is {profile_steps}; give the first and the last step to profile, as in "
        f"trainer.profile_steps=[{max(steps - 2, 1)},{steps}], counted from 1 and none beyond train.steps={steps}"
    ]


def _evaluation(config: Config) -> list[str]:
    options, limit = config.eval, config.model.position_limit
    if not isinstance(config.data, RecallOptions):
        return options.validate(limit)
    if problems := [*config.data.validate(), *options.validate_lengths(limit)]:
        return problems
    if problems := config.data.problems_of_length("train.sequence_length", config.train.sequence_length):
        return problems
    for length in options.lengths:
        problems += config.data.problems_of_length("eval.lengths", length)
    if options.max_documents is None:
        problems.append("eval.max_documents is null and rows of data=recall have no end; give a number")
    return problems


def _evaluated_rope(config: Config) -> list[str]:
    model, rope = config.model, config.eval.rope
    if rope == RopeOptions():
        return []
    if rope.type is None:
        return [f"eval.rope has values and no type; say eval.rope.type=..., one of {', '.join(TYPES)}"]
    if model.positions != "rope":
        return [f"eval.rope.type={rope.type} is of rotary positions and the model has learned ones; leave it out"]
    if model.validate():
        return []
    length = config.train.length_after(config.train.steps)
    return rope.in_place_of(model.rope, length).validate("eval.rope", model.resolve().head_dim)


def _generation(generate: GenerateConfig) -> list[str]:
    problems = []
    if generate.num_tokens < 0:
        problems.append(f"generate.num_tokens is {generate.num_tokens}; it must be 0 or more")
    if not 0 <= generate.temperature < math.inf:
        problems.append(f"generate.temperature is {generate.temperature}; it must be 0 or more and finite")
    if generate.top_k is not None and generate.top_k < 1:
        problems.append(f"generate.top_k is {generate.top_k}; it must be at least 1, or null for all tokens")
    return problems
