"""What makes settings of what Hydra composed: known keys, a saved run's own where one is named, no contradictions.

`settle` does so for one run, `settle_alone` for a command that reads none; a `Root` says which, with what schema.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from flashtrain import runs
from flashtrain.config import CHOICES, INVOCATION, Config
from flashtrain.contradictions import contradictions
from flashtrain.data.options import RecallOptions
from flashtrain.errors import UserError
from flashtrain.evaluation.recall import KEYS as RECALL_KEYS
from flashtrain.saved_settings import given_keys, of_saved_run, pretrained_length, refuse_another_run, saved_model

# Of what the weights are that a run starts from, which it finds out.
PRETRAINED_LENGTH = "train.pretrained_length"


def settle(composed: DictConfig, overrides: list[str]) -> Config:
    """The settings of one run from what Hydra composed and the command line that it composed them from.

    Where `resume` or `run` names a run, its settings hold, but for those of `saved_settings.CHANGEABLE` that are
    given. Where `resume` is a word, those of the command line hold, and are those of a run in `output` but for the
    changeable ones. Raises UserError for an unknown key (also one added with +), for a changed setting of a saved
    run and, all at once, for every contradiction.
    """
    _refuse_unknown_keys(composed)
    if composed.runs is not None:
        _refuse_beside_runs(overrides)
    for key in ("output", "resume", "run"):
        if composed[key] == "":
            raise UserError(f"{key}= names nothing, as an unset variable does; say {key}=DIR, or leave it out")
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
    initial_rope = None
    if folders["resume"]:
        composed = of_saved_run(runs.folder_of(composed.resume), composed, overrides)
    elif composed.run:
        composed = of_saved_run(Path(composed.run), composed, overrides)
    elif composed.train.init_from is not None:
        started = Path(composed.output) if by_word and runs.checkpoint_to_resume(composed.output, "auto") else None
        composed.train.pretrained_length = pretrained_length(composed.train.init_from, started)
        initial_rope = saved_model(started or runs.folder_of(composed.train.init_from)).rope
    if PRETRAINED_LENGTH in given_keys(overrides) and not (folders["resume"] or composed.run):
        raise UserError(f"{PRETRAINED_LENGTH} is not to be chosen, it is that of train.init_from; leave it out")
    config = OmegaConf.to_object(composed)
    if initial_rope is not None:
        config.model.rope = config.model.rope.in_place_of(initial_rope, config.train.pretrained_length)
    config.optimizer = config.optimizer.resolve(config.model.hidden_size)
    fits = None
    if isinstance(config.data, RecallOptions):
        _refuse_for_recall(overrides)
        fits = config.data.has_rows_of
    config.eval = config.eval.resolve(config.train.sequence_length, config.model.position_limit, fits)
    refuse(contradictions(config))
    if by_word:
        refuse_another_run(Path(config.output), config)
    return config


def settle_alone(composed: DictConfig, overrides: list[str]) -> Any:
    """The settings of a command that reads no run: an instance of a dataclass with a `validate`, as `settle` says."""
    _refuse_unknown_keys(composed)
    config = OmegaConf.to_object(composed)
    refuse(config.validate())
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


def refuse_all_but(used: tuple[str, ...], config: Config) -> None:
    """Raise UserError for a key of `INVOCATION` that is set and that this command has no use for."""
    for name in INVOCATION:
        value = getattr(config, name)
        if name not in used and value not in (None, runs.DEFAULT_CHECKPOINT):
            raise UserError(f"{name}={value} is not for this command, which takes {' and '.join(used)}; leave it out")


def unknown_key(full_key: str, group: type) -> str:
    """The sentence for a key that dataclass `group` does not have, with those of its groups that do or the nearest."""
    prefix, _, key = full_key.rpartition(".")
    where = f"{prefix}." if prefix else ""
    fields = group.__dataclass_fields__
    names = list(fields)
    within = [f"{name}.{key}" for name in names if key in getattr(fields[name].type, "__dataclass_fields__", ())]
    near = within or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if near:
        return f"there is no setting {full_key}; did you mean {' or '.join(where + name for name in near)}?"
    return f"there is no setting {full_key}; allowed are {', '.join(where + name for name in names)}"


def refuse(problems: list[str]) -> None:
    """Raise UserError where there are any, with all of them."""
    if len(problems) > 1:
        raise UserError("\n  - ".join(["these settings do not go together:", *problems]))
    if problems:
        raise UserError(problems[0])


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
