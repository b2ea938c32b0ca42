"""The settings that a run was made with, as its folder keeps them, and what a command may change of them."""

from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flashtrain import runs
from flashtrain.config import CHOICES, INVOCATION, Config
from flashtrain.errors import UserError
from flashtrain.model.options import ModelOptions
from flashtrain.training.checkpoint import read_checkpoint

# What a command may change on a finished or interrupted run; everything else makes it another run.
CHANGEABLE = ("attention", "trainer", "eval", "generate", "logger")
# Where what it reads lies, which it knows by digest: it may have moved since.
PLACES = ("data.path", "data.tokenizer", "data.cache_dir")


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def saved_model(folder: Path) -> ModelOptions:
    """The model of the run in `folder`. Raises UserError where there is none."""
    return OmegaConf.to_object(_saved(folder).model)


def pretrained_length(place: str, started: Path | None) -> int | None:
    """Tokens in a row that the weights of a run, or in one of its checkpoints, were trained with.

    started: the folder of the run that goes on from its own weights and has noted it, so that those may be gone.
    """
    if started is not None:
        return _saved(started).train.pretrained_length
    try:
        train = OmegaConf.to_object(_saved(runs.folder_of(place)).train)
        return train.length_after(read_checkpoint(runs.checkpoint_of(place))["global_step"])
    except UserError as error:
        raise UserError(f"train.init_from={place} has no weights to start from: {error}") from None


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


def of_saved_run(folder: Path, composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The settings of a saved run, with the changeable ones of the command line; other changes are refused."""
    settings = _saved(folder)
    keys = sorted(given_keys(overrides))
    if "experiment" in keys:
        raise UserError(f"experiment=... makes a new run; leave it out: {folder} has its own settings")
    # The choice that the run has made, too, changes nothing: `data=text` for the sake of `data.path`.
    chosen = [group for group, (key, _) in CHOICES.items() if settings[group][key] == composed[group][key]]
    changeable = (*CHANGEABLE, *(place for place in PLACES if OmegaConf.select(settings, place) is not None))
    changed = [key for key in keys if key.split(".")[0] in changeable or key in changeable]
    for key in changed:
        OmegaConf.update(settings, key, OmegaConf.select(composed, key), merge=False)
    for key in INVOCATION:
        settings[key] = composed[key]
    if differences := _differences([key for key in keys if key not in (*changed, *chosen)], settings, composed):
        raise UserError(
            f"{folder} was made with other settings: {'; '.join(differences)}; leave them out, or start a new "
            f"run, since only {', '.join(changeable)} may change"
        )
    return settings


def refuse_another_run(folder: Path, config: Config) -> None:
    """Raise UserError where `folder` is of a run with other settings, but for the changeable ones."""
    if not (folder / runs.CONFIG_FILE).exists():
        return
    saved, asked = _saved(folder), OmegaConf.structured(config)
    if differences := _differences([key for key in saved if key not in (*CHANGEABLE, *INVOCATION)], saved, asked):
        raise UserError(
            f"{folder} was made with other settings: {'; '.join(differences)}; give those that are there, or another "
            f"output, since only {', '.join(CHANGEABLE)} may change"
        )


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


def _differences(keys: Iterable[str], saved: DictConfig, asked: DictConfig) -> list[str]:
    """What is said of each key that two settings differ in, at these and within."""
    found = []
    for key in keys:
        there, here = OmegaConf.select(saved, key), OmegaConf.select(asked, key)
        if isinstance(there, DictConfig) and isinstance(here, DictConfig):
            found += _differences([f"{key}.{name}" for name in dict.fromkeys([*there, *here])], saved, asked)
        elif there != here:
            found.append(f"{key} is {there} there and {here} here")
    return found
