"""How a command starts: Hydra composes conf/ with the command line; a user's mistake ends in one sentence.

Every command is `main(verb)`, with a root of its own where its settings are not those of a run. Hydra's and
OmegaConf's errors are reworded here, with the nearest valid name; what the settings mean and which contradict one
another is for composition.py and contradictions.py to say. Any other exception is a bug and keeps its trace.
"""

import contextlib
import dataclasses
import difflib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from flashtrain import ranks
from flashtrain.composition import RUN, Root, unknown_key
from flashtrain.errors import UserError
from flashtrain.kernels.attention import Unsupported

CONF = Path(__file__).parent / "conf"


def main(verb: Callable[[Any], None], root: Root = RUN) -> None:
    """Compose the settings of `root` from `sys.argv`, check them, call `verb` with them; exit 1 on a user's mistake."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands exceptions on instead of printing them itself
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("flashtrain").setLevel(logging.INFO)
    if ranks.rank() > 0:  # the first says it
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what this terminal cannot show
    root.register()
    outputs = []  # that jobs of a sweep have had

    def task(composed: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        with mistakes_end_in_one_sentence(root):
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                ranks.refuse_torchrun("a sweep", "python train.py --multirun ... trainer.devices=N")
                output = OmegaConf.select(composed, "output")
                if output and output in outputs:
                    raise UserError(f"output={output} has another job of this sweep; sweep output too")
                outputs.append(output)
                sys.argv[1:] = overrides  # those of this job: what its other ranks are started with
            verb(root.settle(composed, overrides))

    with mistakes_end_in_one_sentence(root):
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=root.name)(task)()


@contextlib.contextmanager
def mistakes_end_in_one_sentence(root: Root) -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        if end.code:
            ranks.fail("interrupted")  # of several ranks, by a second Ctrl-C
        raise
    except BaseException as failure:
        sentence = _sentence(failure, root)
        ranks.fail(sentence)
        if sentence is None:
            raise
        sys.exit(sentence)


def _sentence(failure: BaseException, root: Root) -> str | None:
    """What to say of it; None for a bug, which keeps its trace."""
    match failure:
        case UserError() | Unsupported():
            return f"error: {failure}"
        case HydraException() | OmegaConfBaseException():
            return f"error: {explain(failure, root)}"
        case KeyboardInterrupt():
            return "interrupted"
    return None


def explain(error: Exception, root: Root) -> str:
    """One sentence for an error of Hydra or OmegaConf: what came, what is allowed, what to do."""
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        return f"{error.override} cannot be read ({reason}); quote text with signs in it: 'key=\"...\"'"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    key = getattr(cause, "full_key", None)
    group = getattr(cause, "object_type", None)
    where = re.match(r"In '([^']+)'", str(error))
    place = f"conf/{where.group(1)}.yaml: " if where else ""
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; say {key}=..."
    if dataclasses.is_dataclass(group) and f"Key '{key.rpartition('.')[2]}' not in" in str(cause):
        return place + unknown_key(key, group)
    if isinstance(key, int) and "is not a ListConfig" in str(cause):  # the place in a list that the cause does not name
        merged = re.match(r"Error merging override ([^=]+)=", str(error))
        if merged:
            return f"{merged.group(1)} takes a list of lists, as in {merged.group(1)}=[[...],[...]]"
    elif key and "is not a ListConfig" in str(cause):
        return f"{place}{key} takes a list, as in {key}=[...]"
    if key and "is not Optional" in str(cause):
        return f"{place}{key} cannot be null; give it a value"
    if key and isinstance(cause, OmegaConfBaseException):
        return f"{place}{key}: {str(cause).splitlines()[0]}"
    override = re.search(r"Could not override '([^']+)'", str(error))
    if override:
        return unknown_key(override.group(1), root.schema)
    return " ".join(str(error).split())


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = [str(option) for option in error.options or []]
    near = difflib.get_close_matches(choice, options, n=1, cutoff=0.4)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"there is no {group}={choice}; {hint}allowed are {', '.join(options)}"
