"""GGUF files, read through transformers, which takes their quantized tensors apart."""

import importlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from flashtrain.errors import UserError
from flashtrain.interop.family import HEAD

SUFFIX, MAGIC = ".gguf", b"GGUF"
NEEDED = ("transformers", "gguf", "accelerate")


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Return the settings of a config.json, the tensors in float32 and the content of a tokenizer.json of a GGUF file.

    Raises UserError where that is none, transformers cannot read it, or a package for it is missing.
    """
    _require_gguf(path)
    for package in NEEDED:
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(f"{path} is read with {', '.join(NEEDED)}, and {package} is missing; install it") from None
    import transformers

    place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    except ValueError as error:
        raise UserError(f"{path} cannot be read by transformers ({error}); use another") from error
    settings = json.loads(model.config.to_json_string())
    del settings["quantization_config"]  # of the file, whose tensors are whole now
    tensors = model.state_dict()
    if settings["tie_word_embeddings"]:
        del tensors[HEAD]
    return settings, tensors, tokenizer.backend_tokenizer.to_str()


def _require_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{path} is no file to be read ({error.strerror}); name a GGUF file") from None
    if magic != MAGIC:
        raise UserError(f"{path} does not begin as a GGUF file does; fetch it again")
