"""Rotary positions as Hugging Face writes them: `rope_parameters`; in older files `rope_theta` and `rope_scaling`."""

from typing import Any

from flashtrain.errors import UserError
from flashtrain.interop.fields import REQUIRED, Fields
from flashtrain.model.rope import theta_scaled_by
from flashtrain.model.rope_options import NEEDED, TYPES, RopeOptions, attention_factor

ORIGINAL = "original_max_position_embeddings"
# Types of ours that stand there under the same name; ntk is a larger theta there.
KINDS = [kind for kind in TYPES if kind != "ntk"]
USUAL_THETA = 10000.0


def read_rope(fields: Fields, max_positions: int) -> RopeOptions:
    """Take every setting of rotary positions from `fields`; `max_positions` is max_position_embeddings.

    Raises UserError for what cannot be expressed, by its name.
    """
    theta = fields.take("rope_theta", float, None) or USUAL_THETA
    outside = fields.take(ORIGINAL, int, None)
    fields.require("partial_rotary_factor", 1.0)
    fields.require("rope_interleaved", False)
    name = "rope_parameters"
    values = fields.take(name, dict, None)
    if scaling := fields.take("rope_scaling", dict, None):
        name, values = "rope_scaling", scaling
    inside = Fields(_of_all_layers(values or {}, f"{fields.place} {name}"), f"{fields.place}: {name}")
    older_name = inside.take("type", str, "default")
    kind = inside.take("rope_type", str, older_name)
    if kind not in KINDS:
        raise UserError(f"{inside.place} is of type {kind}; allowed are {', '.join(KINDS)}")
    inside.require("partial_rotary_factor", 1.0)
    options = {"theta": inside.take("rope_theta", float, None) or theta}
    for key in TYPES[kind]:
        if key == "original_length":
            options[key] = _original_length(kind, inside, outside, max_positions)
        elif key == "truncate":
            options[key] = _truncate(inside)
        else:
            options[key] = inside.take(key, float, REQUIRED if key in NEEDED else None)
    if kind == "yarn":
        scale, scale_all_dim = inside.take("mscale", float, None), inside.take("mscale_all_dim", float, None)
        if options["attention_factor"] is None and scale and scale_all_dim:
            factor = options["factor"]
            options["attention_factor"] = attention_factor(factor, scale) / attention_factor(factor, scale_all_dim)
    inside.refuse_others()
    return RopeOptions(kind, **options)


def rope_parameters(rope: RopeOptions, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` that say the same as resolved options.

    With dynamic scaling max_position_embeddings has to be their original_length.
    """
    if rope.type == "ntk":
        return {"rope_type": "default", "rope_theta": theta_scaled_by(rope.factor, rope.theta, head_dim)}
    values = {key: getattr(rope, key) for key in TYPES[rope.type]}
    original_length = values.pop("original_length", None)
    if original_length is not None and rope.type != "dynamic":
        values[ORIGINAL] = original_length
    return {"rope_type": rope.type, "rope_theta": rope.theta, **values}


def _of_all_layers(values: dict[str, Any], place: str) -> dict[str, Any]:
    """Newer files may hold settings for each type of layer; here all layers have the same."""
    by_layer = [value for value in values.values() if isinstance(value, dict)]
    if not by_layer:
        return values
    if len(by_layer) < len(values) or any(value != by_layer[0] for value in by_layer):
        raise UserError(f"{place} are not the same for {', '.join(values)}, which no model here can do")
    return by_layer[0]


def _truncate(inside: Fields) -> bool | None:
    """Absent is what YaRN has published, None; transformers takes null for false."""
    absent = object()
    value = inside.take("truncate", bool, absent)
    return None if value is absent else bool(value)


def _original_length(kind: str, inside: Fields, outside: int | None, max_positions: int) -> int:
    if kind == "dynamic":
        inside.require(ORIGINAL, max_positions)  # the one that transformers scales from
        return max_positions
    found = inside.take(ORIGINAL, int, None)
    if outside or found:
        return outside or found
    raise UserError(
        f"{inside.place} of type {kind} has no {ORIGINAL}, the tokens in a row before scaling; add it "
        f"(transformers takes max_position_embeddings, {max_positions}, which is right only if that was not scaled)"
    )
