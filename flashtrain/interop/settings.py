"""From the settings of a config.json to ours, and back to the family that can express them."""

from typing import Any

from flashtrain.errors import UserError
from flashtrain.interop.family import Family, said
from flashtrain.interop.fields import Fields
from flashtrain.interop.gpt2 import GPT2
from flashtrain.interop.llama import LLAMA, MISTRAL, QWEN3
from flashtrain.model.options import ModelOptions

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen3": QWEN3}
"""By `model_type`; a model is exported to the first that can express it."""


def read_settings(config: dict[str, Any], place: str, name: str) -> tuple[Family, ModelOptions, int]:
    """Return the family, our settings, and the tokens in a row that the model was trained with.

    `config` is the content of a config.json, `place` names it in errors, `name` is for the model.
    Raises UserError for another family, and for a setting that is unknown or cannot be expressed, by its name.
    """
    fields = Fields(config, place)
    model_type = fields.take("model_type", str)
    if model_type not in FAMILIES:
        raise UserError(f"{place} is of model_type {model_type}; allowed are {', '.join(FAMILIES)}")
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        fields.require(flag, False)
    family = FAMILIES[model_type]
    options, training_length = family.read(fields, name)
    if training_length < 1:
        raise UserError(f"{place} says that the model takes {training_length} tokens in a row; correct it")
    fields.refuse_others()
    return family, options, training_length


def write_settings(options: ModelOptions, training_length: int, prefix_id: int) -> tuple[Family, dict[str, Any]]:
    """Return the family that can express resolved options, and the content of a config.json of it.

    `prefix_id` is the token before each document, and so the end of the one before.
    Raises UserError where there is none, naming the settings that stand against each.
    """
    against = {model_type: _obstacles(family, options) for model_type, family in FAMILIES.items()}
    for model_type, family in FAMILIES.items():
        if not against[model_type]:
            return family, {
                "architectures": [family.architecture],
                "model_type": model_type,
                "vocab_size": options.vocab_size,
                "tie_word_embeddings": options.tie_embeddings,
                "bos_token_id": prefix_id,
                "eos_token_id": prefix_id,
                "torch_dtype": "float32",
                **family.write(options, training_length),
            }
    reasons = "; ".join(f"{model_type} has no {', '.join(settings)}" for model_type, settings in against.items())
    raise UserError(f"no family of transformers can express this model: {reasons}")


def _obstacles(family: Family, options: ModelOptions) -> list[str]:
    fixed = [said(options, key) for key, value in family.fixed.items() if getattr(options, key) != value]
    return fixed + family.obstacles(options)
