"""What a model may be: the keys of conf/model/*.yaml, their contradictions, and what a null stands for.

Says nothing about sequence length, attention variant or dtype: those belong to the run, not to the model.
"""

import math
from dataclasses import dataclass, replace
from itertools import cycle, islice

from flashtrain.model.rope_options import RopeOptions

NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")
MLPS = ("gelu", "swiglu")
VOCABULARY_MULTIPLE = 64


@dataclass
class ModelOptions:
    """Architecture of a decoder. None means what the field's comment says; `resolve` writes it out."""

    name: str  # what reports and folders call it
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None  # None: num_heads
    head_dim: int | None  # None: hidden_size / num_heads
    norm: str
    norm_eps: float
    positions: str
    max_positions: int | None  # rows of the learned table; with rope there is no table and no limit
    rope: RopeOptions  # of rotary positions; with learned ones there is none
    mlp: str
    mlp_hidden_size: int | None  # None: 4 x hidden_size (gelu), 8/3 x hidden_size rounded up to 64 (swiglu)
    bias: bool  # of linear layers and LayerNorm; RMSNorm and the head have none
    qk_norm: bool  # normalises each query and key head before positions are applied
    windows: list[int | None] | None  # keys that a query sees, its own included, layer after layer, repeated; None: all
    attention_softcap: float | None  # c in c tanh(score / c), as Gemma 2's attn_logit_softcapping; None: no cap
    tie_embeddings: bool
    vocab_size: int | None  # None: the tokenizer's

    @property
    def position_limit(self) -> int | None:
        """The longest sequence that the positions reach; None where there is no limit."""
        return self.max_positions if self.positions == "learned" else None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: vocab_size rounded up to a multiple of 64."""
        return _round_up(self.vocab_size, VOCABULARY_MULTIPLE)

    def validate(self) -> list[str]:
        """Return one sentence for each contradiction or impossible value, naming the config key."""
        problems = [
            f"model.{key}={value} is not one of {', '.join(choices)}"
            for key, choices in (("norm", NORMS), ("positions", POSITIONS), ("mlp", MLPS))
            if (value := getattr(self, key)) not in choices
        ]
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        problems += [
            f"model.{key}={value} must be above zero and finite"
            for key in (*sizes, "norm_eps", "mlp_hidden_size", "attention_softcap", "vocab_size")
            if (value := getattr(self, key)) is not None and not 0 < value < math.inf
        ]
        if self.windows == []:
            problems.append("model.windows is empty; give at least one, as in model.windows=[1024,null]")
        if any(window is not None and window < 1 for window in self.windows or []):
            problems.append(
                f"model.windows={self.windows} must hold numbers of keys from 1, the query's own, or null for all"
            )
        if problems:
            return problems
        if self.head_dim is None and self.hidden_size % self.num_heads:
            problems.append(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; "
                "set model.head_dim or change one of them"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            problems.append(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}; change one of them"
            )
        if self.positions == "learned" and self.max_positions is None:
            problems.append("model.positions=learned needs model.max_positions, the longest sequence")
        if self.positions == "learned" and self.rope.type not in (None, "default"):
            problems.append(
                f"model.rope.type={self.rope.type} is of rotary positions and model.positions=learned; say "
                "model.positions=rope or leave it out"
            )
        if self.positions == "rope":
            head_dim = self.head_dim or self.hidden_size // self.num_heads
            problems += self.rope.validate("model.rope", head_dim)
            if head_dim % 2:
                problems.append("model.positions=rope needs an even head dimension; change model.head_dim")
        return problems

    def resolve(self) -> "ModelOptions":
        """Return the options with each None written out, and nothing in the keys of the positions not chosen.

        `windows` gets an entry for each layer, None where the layer sees all keys.
        """
        mlp_hidden_size = {
            "gelu": 4 * self.hidden_size,
            "swiglu": _round_up(8 * self.hidden_size / 3, 64),
        }[self.mlp]
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_heads,
            max_positions=self.position_limit,
            rope=self.rope.resolve() if self.positions == "rope" else RopeOptions(),
            mlp_hidden_size=self.mlp_hidden_size or mlp_hidden_size,
            windows=list(islice(cycle(self.windows or [None]), self.num_layers)),
        )


def _round_up(size: float, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
