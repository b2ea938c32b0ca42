"""The attention layer: projections, QK norm and positions around an attention callable.

The callable comes bound to its variant and mask, so this file knows neither.
B batch, S sequence, Hq query heads, Hkv key-value heads, D head dimension, C hidden size.
"""

from collections.abc import Callable

from torch import Tensor, nn

from flashtrain.model.layers import norm
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope import rotate

# (q (B,S,Hq,D), k (B,S,Hkv,D), v (B,S,Hkv,D)) of one dtype -> (B,S,Hq,D)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionLayer(nn.Module):
    """Attention with grouped key-value heads: one projection in, views of it to the callable, one out."""

    def __init__(self, options: ModelOptions, attention: Attention):
        super().__init__()
        self.attention = attention
        self.heads = (options.num_heads, options.num_kv_heads, options.num_kv_heads)
        self.head_dim = options.head_dim
        self.qkv = nn.Linear(options.hidden_size, sum(self.heads) * self.head_dim, bias=options.bias)
        self.out = nn.Linear(options.num_heads * self.head_dim, options.hidden_size, bias=options.bias)
        self.q_norm = norm(options, self.head_dim) if options.qk_norm else nn.Identity()
        self.k_norm = norm(options, self.head_dim) if options.qk_norm else nn.Identity()

    def forward(self, x_BSC: Tensor, rope: Tensor | None) -> Tensor:
        qkv = self.qkv(x_BSC).unflatten(-1, (sum(self.heads), self.head_dim))
        q_BSHD, k_BSHD, v_BSHD = qkv.split(self.heads, dim=2)
        q_BSHD, k_BSHD = self.q_norm(q_BSHD), self.k_norm(k_BSHD)
        if rope is not None:
            q_BSHD, k_BSHD = rotate(q_BSHD, rope), rotate(k_BSHD, rope)
        return self.out(self.attention(q_BSHD, k_BSHD, v_BSHD).flatten(2))
