"""The model presets of conf/model as options, for tests that change a few keys of one."""

from dataclasses import replace
from pathlib import Path

import yaml

from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions

FOLDER = Path(__file__).parent.parent / "conf" / "model"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def preset(name: str, **changes) -> ModelOptions:
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    values["rope"] = RopeOptions(**values["rope"])
    return replace(ModelOptions(**values), **changes)
