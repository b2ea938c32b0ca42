"""The attention layer: projections, QK norm and positions around an attention callable.

The callable comes bound to its variant and softcap, so this file knows neither; which keys a query sees comes
with each call.
B batch, S sequence, Hq query heads, Hkv key-value heads, D head dimension, C hidden size.
"""

from collections.abc import Callable

from torch import Tensor, nn

from flashtrain.kernels.attention import Intervals
from flashtrain.model.cache import LayerCache
from flashtrain.model.layers import norm
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope import rotate

# (q (B,Sq,Hq,D), k (B,Sk,Hkv,D), v (B,Sk,Hkv,D)) of one dtype, and what they see of one another -> (B,Sq,Hq,D)
Attention = Callable[[Tensor, Tensor, Tensor, Intervals], Tensor]


def causal_window(window: int | None) -> Intervals:
    """Return the mask of a layer whose queries see `window` keys, their own and those before it; None: all."""
    return Intervals.window(None if window is None else window - 1, 0)


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

    def forward(
        self, x_BSC: Tensor, rope: Tensor | None, intervals: Intervals, cache: LayerCache | None = None
    ) -> Tensor:
        qkv = self.qkv(x_BSC).unflatten(-1, (sum(self.heads), self.head_dim))
        q_BSHD, k_BSHD, v_BSHD = qkv.split(self.heads, dim=2)
        q_BSHD, k_BSHD = self.q_norm(q_BSHD), self.k_norm(k_BSHD)
        if rope is not None:
            q_BSHD, k_BSHD = rotate(q_BSHD, rope), rotate(k_BSHD, rope)
        if cache is not None:
            k_BSHD, v_BSHD = cache.extend(k_BSHD, v_BSHD)
        return self.out(self.attention(q_BSHD, k_BSHD, v_BSHD, intervals).flatten(2))
