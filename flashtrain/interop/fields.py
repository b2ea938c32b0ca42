"""The settings of a Hugging Face config.json, taken one by one, so that none is left that nobody asked for."""

from typing import Any

from flashtrain.errors import UserError

REQUIRED = object()

TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a group of settings",
}

# What a config.json may hold that changes nothing of what an evaluated model computes.
# fmt: off
HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path", "_name_or_path",
    "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "embd_pdrop", "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "is_llama_config",
    "label2id", "n_ctx", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class",
    "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})
# fmt: on


class Fields:
    """The settings in `values`; `place` names them in errors."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.place = place
        self._left = dict(values)

    def take(self, name: str, kind: type, absent: Any = REQUIRED) -> Any:
        """Return a setting of type `kind`, one of `TYPES`, or null, or `absent`.

        Raises UserError where it is of another type (whole numbers are numbers, too), or required and not there.
        """
        value = self._left.pop(name, absent)
        if absent is REQUIRED and value in (REQUIRED, None):
            raise UserError(f"{self.place} has no {name}, which tells what the model is; add it")
        if value is None or value is absent:
            return value
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise UserError(f"{self.place} has {name}={value!r}, which is not {TYPES[kind]}; correct it")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Raise UserError unless a setting is absent, null or one of `allowed`; the first is what its absence means."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise UserError(
                f"{self.place} has {name}={value}, which no model here can do; allowed is "
                f"{' or '.join(map(str, allowed))}"
            )

    def refuse_others(self) -> None:
        """Raise UserError for settings that were not taken and may change what the model computes."""
        others = sorted(name for name, value in self._left.items() if value is not None and name not in HARMLESS)
        if others:
            said = ", ".join(f"{name}={self._left[name]}" for name in others)
            raise UserError(
                f"{self.place} has settings that are not known here and may change what the model computes: {said}; "
                "remove them from it if they do not"
            )
