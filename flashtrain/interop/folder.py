"""A folder in Hugging Face's format: config.json, and tensors in one safetensors file or in several with an index.

Nothing in it is run: no pickles, no code that a checkpoint brings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flashtrain.errors import UserError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises UserError where there is none to be read."""
    return _read_json(folder / CONFIG, f"{folder} is not a checkpoint in Hugging Face's format: it has no {CONFIG}")


class TensorFolder:
    """The tensors of a folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Find what is there. Raises UserError for missing or damaged files."""
        self._files = {}
        for path in _tensor_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is missing or damaged ({error}); fetch it again") from None
            self._files |= dict.fromkeys(file.keys(), file)
        self.names = self._files.keys()

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in its own dtype."""
        return self._files[name].get_tensor(name)


def _tensor_files(folder: Path) -> list[Path]:
    """Of both, the single file counts, as with transformers."""
    if (folder / TENSORS).exists():
        return [folder / TENSORS]
    if (folder / INDEX).exists():
        index = _read_json(folder / INDEX, f"{folder / INDEX} is not an index")
        places = index.get("weight_map", {})
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise UserError(f"{folder / INDEX} does not say in which file each tensor is; fetch it again")
        names = sorted(set(places.values()))
        if elsewhere := [name for name in names if Path(name).name != name]:
            raise UserError(f"{folder / INDEX} names {elsewhere[0]}, which is not in {folder}; move it there")
        return [folder / name for name in names]
    raise UserError(
        f"{folder} has neither {TENSORS} nor {INDEX}; other files, such as pickled ones (.bin, .pt), are not read: "
        "save the model as safetensors"
    )


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{otherwise} ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings; fetch it again")
    return content


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and one file of all tensors. Raises UserError where the disk refuses."""
    try:
        save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder} cannot be written ({error}); make room or say output=DIR with another place"
        ) from None
