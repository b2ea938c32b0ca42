"""What settings cannot be, alone or together, one sentence each: of a run, and of the lists that other commands take.

A group with a `validate` of its own says its problems itself; here are those of the others, and between groups.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flashtrain import runs
from flashtrain.config import CHOICES, Config, GenerateConfig, TrainConfig, TrainerConfig
from flashtrain.data.options import RecallOptions
from flashtrain.errors import UserError
from flashtrain.model.checkpointing import MODES
from flashtrain.model.rope_options import TYPES, RopeOptions

MOST_SEEDS = 2**32

# Of what these count there may be none.
MAY_BE_NONE = ("keep_last", "data_workers")


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
    return [f"{key} has {_words(twice)} more than once; name each once"] if twice else []


def not_counts(key: str, values: Sequence[int]) -> list[str]:
    """Problems of a list of numbers that count something."""
    small = [value for value in values if value < 1]
    if small:
        return [f"{key} has {_words(small)}; all must be at least 1"]
    return once_each(key, values)


def not_found(key: str, names: Sequence[str], find: Callable[[str], object]) -> list[str]:
    """Problems of a list of names, which may be empty: those of `once_each`, or what `find` raises as a UserError."""
    problems = once_each(key, names) if names else []
    for name in dict.fromkeys(names):
        try:
            find(name)
        except UserError as mistake:
            problems.append(str(mistake))
    return problems


def not_measured(key: str, name: str | None, variants: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Problems of the one that the others' speed is given as a multiple of; None for none."""
    if name is None or name in (*variants, *peers):
        return []
    either = _words(variants) + (f"; or of the peers: {_words(peers)}" if peers else "")
    return [f"{key} is {name}; it must be one of the variants: {either}"]


def not_new(key: str, folder: str | None) -> list[str]:
    """Problems of a folder that is to be made; None for one with the time."""
    if folder == "":
        return [f"{key} is empty; name a new folder, or leave it out for runs/ with the time"]
    return [f"{key}={folder} exists; name another"] if folder is not None and Path(folder).exists() else []


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


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
