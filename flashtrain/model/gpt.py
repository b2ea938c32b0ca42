"""The decoder: token ids to hidden states after the final norm.

Logits are left to head.py, which never builds them whole. Under autocast the residual stream is in autocast's
dtype, as in Megatron and torchtitan: float32 would double the traffic between matrix products, and a GPT-2 at
32,768 tokens would hold 96 MiB more per layer for the backward pass. Norms compute in the float32 of their weights.
"""

import math

import torch
from torch import Tensor, nn

from flashtrain.errors import UserError
from flashtrain.kernels.attention import Intervals
from flashtrain.model.attention import Attention, AttentionLayer, causal_window
from flashtrain.model.cache import KeyValueCache, LayerCache
from flashtrain.model.checkpointing import checkpointing
from flashtrain.model.layers import Call, activation_dtype, mlp, norm
from flashtrain.model.options import ModelOptions
from flashtrain.model.rope import inverse_frequencies, rope_table
from flashtrain.model.rope_options import RopeOptions

INIT_STD = 0.02


class Block(nn.Module):
    """Pre-norm transformer block; `call_in_mlp` calls what follows the first product of its MLP."""

    def __init__(self, options: ModelOptions, attention: Attention, call_in_mlp: Call):
        super().__init__()
        self.attention_norm = norm(options, options.hidden_size)
        self.attention = AttentionLayer(options, attention)
        self.mlp_norm = norm(options, options.hidden_size)
        self.mlp = mlp(options, call_in_mlp)

    def forward(
        self, x_BSC: Tensor, rope: Tensor | None, intervals: Intervals, cache: LayerCache | None = None
    ) -> Tensor:
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), rope, intervals, cache)
        return x_BSC + self.mlp(self.mlp_norm(x_BSC))


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        options: the architecture; vocab_size must be set.
        attention: `attention(q, k, v, intervals) -> out`, with `options.attention_softcap` bound to it; shapes at
            `flashtrain.model.attention.Attention`.
        activation_checkpointing: one of `flashtrain.model.checkpointing.MODES`.

    Raises:
        UserError: the options contradict one another.
    """

    def __init__(self, options: ModelOptions, attention: Attention, activation_checkpointing: str = "none"):
        super().__init__()
        if problems := options.validate():
            raise UserError("; ".join(problems))
        self.options = options = options.resolve()
        rows, hidden_size = options.padded_vocab_size, options.hidden_size
        self.token_embedding = nn.Embedding(rows, hidden_size)
        if options.positions == "learned":
            self.position_embedding = nn.Embedding(options.max_positions, hidden_size)
        self._call_layer, call_in_mlp = checkpointing(activation_checkpointing)
        self.blocks = nn.ModuleList(Block(options, attention, call_in_mlp) for _ in range(options.num_layers))
        self.final_norm = norm(options, hidden_size)
        if not options.tie_embeddings:
            self.head = nn.Linear(hidden_size, rows, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        """Draw weights as GPT-2: std 0.02, divided by sqrt(2 num_layers) where they add to the residual."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        residual_std = INIT_STD / math.sqrt(2 * self.options.num_layers)
        for block in self.blocks:
            nn.init.normal_(block.attention.out.weight, std=residual_std)
            nn.init.normal_(block.mlp.down.weight, std=residual_std)

    @property
    def head_weight(self) -> nn.Parameter:
        """The (padded vocabulary, C) matrix that turns hidden states into logits."""
        return self.token_embedding.weight if self.options.tie_embeddings else self.head.weight

    def num_parameters(self) -> int:
        """Return the number of parameters, the rows that pad the vocabulary left out."""
        options = self.options
        padding = (options.padded_vocab_size - options.vocab_size) * options.hidden_size
        tables = 1 if options.tie_embeddings else 2
        return sum(parameter.numel() for parameter in self.parameters()) - tables * padding

    def forward(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        rope: RopeOptions | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the hidden states (B, S, C) of int64 token ids (B, S), in autocast's dtype where it is on.

        documents: (B, S) int32, the document that each token is of, never decreasing along a row. Each is then
        computed as if it were alone: no token sees another document, and positions count from its first token.
        rope: rotary options, resolved, in place of the model's; only for a model with rotary positions.
        cache: of the tokens before these, which the result follows as in one forward of all; these are added to it. Not
        with documents, and not for a backward.

        Raises:
            UserError: the sequence is longer than the learned position table.
        """
        options = self.options
        num_read, length = (0, tokens_BS.shape[1]) if cache is None else (cache.num_read, cache.length)
        positions = _positions(tokens_BS, documents_BS, num_read)
        assert cache is None or documents_BS is None
        x_BSC, table = self.token_embedding(tokens_BS), None
        if options.positions == "learned":
            if length > options.max_positions:
                raise UserError(
                    f"a sequence of {length} tokens exceeds the {options.max_positions} learned "
                    "positions of this model; shorten it, or train a model with model.positions=rope"
                )
            x_BSC = x_BSC + self.position_embedding(positions)
        else:
            rope = rope or options.rope
            if rope.follows_length and documents_BS is not None:
                length = _lengths(documents_BS)
            frequencies = inverse_frequencies(rope, options.head_dim, length, tokens_BS.device)
            table = rope_table(positions, frequencies, rope.attention_factor or 1.0)
        x_BSC = x_BSC.to(activation_dtype(x_BSC))
        intervals = {window: _intervals(window, documents_BS) for window in dict.fromkeys(options.windows)}
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        for block, window, kept in zip(self.blocks, options.windows, caches, strict=True):
            x_BSC = self._call_layer(block, x_BSC, table, intervals[window], kept)
        if cache is not None:
            cache.num_read += tokens_BS.shape[1]
        return self._call_layer(self.final_norm, x_BSC)


def _positions(tokens_BS: Tensor, documents_BS: Tensor | None, start: int) -> Tensor:
    """Return the place of each token in its row from `start` on, (S), or in its document's part of the row, (B, S)."""
    positions_S = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
    if documents_BS is None:
        return positions_S
    documents_BS = documents_BS.contiguous()
    return positions_S - torch.searchsorted(documents_BS, documents_BS)


def _lengths(documents_BS: Tensor) -> Tensor:
    """Return how many tokens of the row, (B, S), are of the token's document."""
    documents_BS = documents_BS.contiguous()
    return torch.searchsorted(documents_BS, documents_BS, right=True) - torch.searchsorted(documents_BS, documents_BS)


def _intervals(window: int | None, documents_BS: Tensor | None) -> Intervals:
    mask = causal_window(window)
    return mask if documents_BS is None else mask.in_documents(documents_BS)
