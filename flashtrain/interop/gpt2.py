"""GPT-2: LayerNorm, learned positions, GELU, biases everywhere, and linear layers stored transposed."""

from typing import Any

from flashtrain.interop.family import Family, Piece, head_piece, said
from flashtrain.interop.fields import Fields
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope_options import RopeOptions

FIXED = {
    "norm": "layernorm",
    "positions": "learned",
    "mlp": "gelu",
    "bias": True,
    "qk_norm": False,
    "attention_softcap": None,
}


def _read(fields: Fields, name: str) -> tuple[ModelOptions, int]:
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    length = fields.take("n_positions", int)
    options = ModelOptions(
        **FIXED,
        name=name,
        num_layers=fields.take("n_layer", int),
        hidden_size=fields.take("n_embd", int),
        num_heads=fields.take("n_head", int),
        num_kv_heads=None,
        head_dim=None,
        norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
        max_positions=length,
        rope=RopeOptions(),
        mlp_hidden_size=fields.take("n_inner", int, None),
        windows=None,
        tie_embeddings=fields.take("tie_word_embeddings", bool, True),
        vocab_size=fields.take("vocab_size", int),
    )
    return options, length


def _write(options: ModelOptions, training_length: int) -> dict[str, Any]:
    return {
        "n_layer": options.num_layers,
        "n_embd": options.hidden_size,
        "n_head": options.num_heads,
        "n_inner": options.mlp_hidden_size,
        "n_positions": options.max_positions,
        "layer_norm_epsilon": options.norm_eps,
        "activation_function": "gelu_new",
    }


def _obstacles(options: ModelOptions) -> list[str]:
    found = []
    if options.num_kv_heads != options.num_heads:
        found.append(said(options, "num_kv_heads"))
    if options.num_heads * options.head_dim != options.hidden_size:
        found.append(said(options, "head_dim"))
    if any(options.windows):
        found.append(said(options, "windows"))
    return found


def _pieces(options: ModelOptions) -> list[Piece]:
    size, inner = options.hidden_size, options.mlp_hidden_size
    pieces = [
        Piece("token_embedding.weight", ("transformer.wte.weight",), (options.vocab_size,)),
        Piece("position_embedding.weight", ("transformer.wpe.weight",), (options.max_positions,)),
    ]
    norms = {"final_norm": "ln_f"}
    for layer in range(options.num_layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        norms |= {f"{ours}.attention_norm": f"{theirs}.ln_1", f"{ours}.mlp_norm": f"{theirs}.ln_2"}
        linears = {
            f"{ours}.attention.qkv": (f"{theirs}.attn.c_attn", 3 * size),
            f"{ours}.attention.out": (f"{theirs}.attn.c_proj", size),
            f"{ours}.mlp.up": (f"{theirs}.mlp.c_fc", inner),
            f"{ours}.mlp.down": (f"{theirs}.mlp.c_proj", size),
        }
        for our_name, (their_name, rows) in linears.items():
            their_name = f"transformer.{their_name}"
            pieces.append(Piece(f"{our_name}.weight", (f"{their_name}.weight",), (rows,), transposed=True))
            pieces.append(Piece(f"{our_name}.bias", (f"{their_name}.bias",), (rows,)))
    pieces += [
        Piece(f"{ours}.{part}", (f"transformer.{theirs}.{part}",), (size,))
        for ours, theirs in norms.items()
        for part in ("weight", "bias")
    ]
    return pieces + head_piece(options)


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fixed=FIXED,
    prefix="transformer.",
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)$",
    read=_read,
    write=_write,
    obstacles=_obstacles,
    pieces=_pieces,
)
