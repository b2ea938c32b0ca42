"""Llama and what is like it: RMSNorm, rotary positions, SwiGLU; Mistral with a window, Qwen3 with QK norm.

SmolLM2 is a Llama.
"""

from dataclasses import replace
from typing import Any

from flashtrain.errors import UserError
from flashtrain.interop.family import Family, Piece, head_piece, said
from flashtrain.interop.fields import Fields
from flashtrain.interop.rope import read_rope, rope_parameters
from flashtrain.model.options import ModelOptions

COMMON = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "attention_softcap": None}
LLAMA_FIXED = COMMON | {"qk_norm": False}
MISTRAL_FIXED = COMMON | {"qk_norm": False, "bias": False}
QWEN3_FIXED = COMMON | {"qk_norm": True, "bias": False}

FULL, SLIDING = "full_attention", "sliding_attention"


def _read_common(
    fields: Fields, name: str, *, num_kv_heads: int | None, head_dim: int | None, **options: Any
) -> tuple[ModelOptions, int]:
    """`num_kv_heads` and `head_dim` are what their absence means; `options` are what the families do not share."""
    fields.require("hidden_act", "silu", "swish")
    length = fields.take("max_position_embeddings", int)
    read = ModelOptions(
        **options,
        name=name,
        num_layers=fields.take("num_hidden_layers", int),
        hidden_size=fields.take("hidden_size", int),
        num_heads=fields.take("num_attention_heads", int),
        num_kv_heads=fields.take("num_key_value_heads", int, num_kv_heads),
        head_dim=fields.take("head_dim", int, head_dim),
        norm_eps=fields.take("rms_norm_eps", float, 1e-6),
        max_positions=None,
        rope=read_rope(fields, length),
        mlp_hidden_size=fields.take("intermediate_size", int),
        tie_embeddings=fields.take("tie_word_embeddings", bool, False),
        vocab_size=fields.take("vocab_size", int),
    )
    return read, length


def _read_llama(fields: Fields, name: str) -> tuple[ModelOptions, int]:
    bias, mlp_bias = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
    if bias != mlp_bias:
        raise UserError(
            f"{fields.place} has attention_bias={bias} and mlp_bias={mlp_bias}; a model here has both or neither"
        )
    return _read_common(fields, name, num_kv_heads=None, head_dim=None, bias=bias, windows=None, **LLAMA_FIXED)


def _read_mistral(fields: Fields, name: str) -> tuple[ModelOptions, int]:
    window = fields.take("sliding_window", int, 4096)
    windows = None if window is None else [window]
    return _read_common(fields, name, num_kv_heads=8, head_dim=None, windows=windows, **MISTRAL_FIXED)


def _read_qwen3(fields: Fields, name: str) -> tuple[ModelOptions, int]:
    fields.require("attention_bias", False)
    options, length = _read_common(fields, name, num_kv_heads=32, head_dim=128, windows=None, **QWEN3_FIXED)
    return replace(options, windows=_qwen3_windows(fields, options.num_layers)), length


def _qwen3_windows(fields: Fields, num_layers: int) -> list[int | None]:
    window = fields.take("sliding_window", int, 4096)
    first_layer = fields.take("max_window_layers", int, 28)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        kinds = [SLIDING if window and layer >= first_layer else FULL for layer in range(num_layers)]
    allowed = [FULL, SLIDING] if window else [FULL]
    if len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
        raise UserError(
            f"{fields.place} has layer_types={kinds}; allowed are {num_layers} of {' and '.join(allowed)} "
            f"with use_sliding_window and sliding_window as they stand there"
        )
    return [window if kind == SLIDING else None for kind in kinds]


def _write_common(options: ModelOptions, training_length: int) -> dict[str, Any]:
    rope = options.rope
    return {
        "num_hidden_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.mlp_hidden_size,
        "rms_norm_eps": options.norm_eps,
        "hidden_act": "silu",
        # transformers scales dynamically from here on
        "max_position_embeddings": rope.original_length if rope.follows_length else training_length,
        "rope_parameters": rope_parameters(rope, options.head_dim),
    }


def _write_llama(options: ModelOptions, training_length: int) -> dict[str, Any]:
    biases = {"attention_bias": options.bias, "mlp_bias": options.bias}
    return _write_common(options, training_length) | biases


def _write_mistral(options: ModelOptions, training_length: int) -> dict[str, Any]:
    return _write_common(options, training_length) | {"sliding_window": options.windows[0]}


def _write_qwen3(options: ModelOptions, training_length: int) -> dict[str, Any]:
    window = next(filter(None, options.windows), None)
    return _write_common(options, training_length) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [SLIDING if window else FULL for window in options.windows],
    }


def _llama_obstacles(options: ModelOptions) -> list[str]:
    found = []
    if options.hidden_size % options.num_heads:  # transformers checks it, though it has head_dim
        found.append(f"model.hidden_size={options.hidden_size} with model.num_heads={options.num_heads}")
    if any(options.windows):
        found.append(said(options, "windows"))
    return found


def _mistral_obstacles(options: ModelOptions) -> list[str]:
    return [said(options, "windows")] if len(set(options.windows)) > 1 else []


def _qwen3_obstacles(options: ModelOptions) -> list[str]:
    return [said(options, "windows")] if len(set(options.windows) - {None}) > 1 else []


def _pieces(options: ModelOptions) -> list[Piece]:
    size, inner, dim = options.hidden_size, options.mlp_hidden_size, options.head_dim
    query_rows, key_rows = options.num_heads * dim, options.num_kv_heads * dim
    parts = ("weight", "bias") if options.bias else ("weight",)
    pieces = [
        Piece("token_embedding.weight", ("model.embed_tokens.weight",), (options.vocab_size,)),
        Piece("final_norm.weight", ("model.norm.weight",), (size,)),
    ]
    for layer in range(options.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        norms = {"attention_norm": ("input_layernorm", size), "mlp_norm": ("post_attention_layernorm", size)}
        if options.qk_norm:
            norms |= {f"attention.{qk}_norm": (f"self_attn.{qk}_norm", dim) for qk in ("q", "k")}
        qkv = {"self_attn.q_proj": query_rows, "self_attn.k_proj": key_rows, "self_attn.v_proj": key_rows}
        linears = {
            "attention.qkv": qkv,
            "attention.out": {"self_attn.o_proj": size},
            "mlp.gate_up": {"mlp.gate_proj": inner, "mlp.up_proj": inner},
            "mlp.down": {"mlp.down_proj": size},
        }
        pieces += [
            Piece(f"{ours}.{our_name}.weight", (f"{theirs}.{their_name}.weight",), (rows,))
            for our_name, (their_name, rows) in norms.items()
        ]
        pieces += [
            Piece(f"{ours}.{our_name}.{part}", tuple(f"{theirs}.{name}.{part}" for name in rows), tuple(rows.values()))
            for our_name, rows in linears.items()
            for part in parts
        ]
    return pieces + head_piece(options)


BUFFERS = r"rotary_emb\.inv_freq$"
LLAMA = Family(
    architecture="LlamaForCausalLM",
    fixed=LLAMA_FIXED,
    prefix="model.",
    buffers=BUFFERS,
    read=_read_llama,
    write=_write_llama,
    obstacles=_llama_obstacles,
    pieces=_pieces,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    fixed=MISTRAL_FIXED,
    prefix="model.",
    buffers=BUFFERS,
    read=_read_mistral,
    write=_write_mistral,
    obstacles=_mistral_obstacles,
    pieces=_pieces,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    fixed=QWEN3_FIXED,
    prefix="model.",
    buffers=BUFFERS,
    read=_read_qwen3,
    write=_write_qwen3,
    obstacles=_qwen3_obstacles,
    pieces=_pieces,
)
