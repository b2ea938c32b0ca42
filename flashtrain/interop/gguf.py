"""GGUF files, read through transformers, which takes their quantized tensors apart."""

import importlib
import json
import re
import struct
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.interop.family import HEAD

SUFFIX, MAGIC = ".gguf", b"GGUF"
NEEDED = ("transformers", "gguf", "accelerate")
INSTALL = "pip install -e '.[gguf]'"
SCALING = re.compile(r"\.rope\.(scaling\.|scale_linear$)")


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Return the settings of a config.json, the tensors in float32 and the content of a tokenizer.json of a GGUF file.

    Raises UserError where that is none, transformers cannot read it, a package for it is missing, or it holds what
    transformers leaves out: rotary scaling, and tensors that its model has no place for.
    """
    _require_gguf(path)
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(
                f"{path} is read with {', '.join(NEEDED)}, and {package} is missing; install it, as {INSTALL} does"
            ) from None
    import transformers

    architecture, held = _content(path)
    with tempfile.TemporaryDirectory() as folder:  # transformers reads the neighbours of a file too
        (Path(folder) / path.name).symlink_to(path.resolve())
        place = {
            "pretrained_model_name_or_path": folder,
            "gguf_file": path.name,
            "local_files_only": True,
            "trust_remote_code": False,
        }
        try:
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                **place, dtype="float32", output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        except ValueError as error:
            raise UserError(f"{path} cannot be read by transformers ({error}); use another") from error
    settings = json.loads(model.config.to_json_string())
    del settings["quantization_config"]  # of the file, whose tensors are whole now
    tensors = model.state_dict()
    if settings["tie_word_embeddings"]:
        del tensors[HEAD]
    if missing := sorted(set(found["missing_keys"]) & set(tensors)):
        raise UserError(f"{path} lacks tensors of its model: {', '.join(missing)}; use another")
    if left_out := sorted(held - _read_by_transformers(architecture, model.config.num_hidden_layers, tensors)):
        raise UserError(f"{path} has tensors that transformers does not read: {', '.join(left_out)}; use another")
    return settings, tensors, tokenizer.backend_tokenizer.to_str()


def _require_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{path} is no file to be read ({error.strerror}); name a GGUF file") from None
    if magic != MAGIC:
        raise UserError(f"{path} does not begin as a GGUF file does; fetch it again")


def _content(path: Path) -> tuple[str, set[str]]:
    """The architecture and the names of all tensors. Raises UserError for a damaged file and for rotary scaling."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        architecture = values["general.architecture"]
    except (ValueError, LookupError, struct.error) as error:
        raise UserError(f"{path} is damaged or cut off ({error}); fetch it again") from None
    scaling = {name: value for name, value in values.items() if SCALING.search(name)}
    if scaling and scaling.get(f"{architecture}.rope.scaling.type") != "none":
        said = ", ".join(f"{name}={value}" for name, value in scaling.items())
        raise UserError(f"{path} has {said}, which transformers does not read; use the model's safetensors")
    return architecture, {tensor.name for tensor in reader.tensors}


def _read_by_transformers(architecture: str, num_layers: int, tensors: Collection[str]) -> set[str]:
    """The names in a GGUF file of a model's tensors."""
    import gguf

    (known,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, num_layers)
    return {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors}
