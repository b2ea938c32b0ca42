"""Activation checkpointing: which of its activations a layer keeps for the backward, and which it computes again.

It changes memory and time, and no result: what is computed again comes from the same operators on the same inputs.
Only where they are fused by a compiler may they round otherwise.
Mlp computes again only the activation function, whose result is the widest of what is cheap to compute; pointwise all
that memory bounds, norms, rotations, sums and casts, too: a compiler fuses these with their own backward.
Selective keeps what costs most to compute and least to keep, the output and LSE of attention, whose cost grows with
the square of the length. Source: arXiv 1604.06174 (full).
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flashtrain.kernels.attention import ops  # noqa: F401  registers the operators of our kernels
from flashtrain.model.layers import Call

aten, higher_order = torch.ops.aten, torch.ops.higher_order

MODES = ("none", "mlp", "pointwise", "selective", "full")
"""Keep everything; keep all but what the MLP's activation function returns; keep the input of each block and what its
products and attention operators return; keep the input and what its attention operators return; keep the input alone.
"""

ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.flashtrain.flash_v1.default,
        torch.ops.flashtrain.flash_v2.default,
        torch.ops.flashtrain.flash_hopper.default,
        torch.ops.flashtrain.flash_hopper_deterministic.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        higher_order.flex_attention,
        # standard and sdpa_math have none of their own. Of what they call, and nothing else does, S is kept with P,
        # unless compiled: in long rows that is more than without checkpointing, and full is the mode for them.
        aten.baddbmm.default,
        aten.bmm.default,
        aten._softmax.default,
        aten._safe_softmax.default,
    }
)
"""Every forward operator of every variant of attention."""

PRODUCT_OPERATORS = frozenset({aten.mm.default, aten.addmm.default})
"""What the linear layers of a block call, and nothing else in it."""

KEPT_OPERATORS = {
    "mlp": PRODUCT_OPERATORS,
    "pointwise": ATTENTION_OPERATORS | PRODUCT_OPERATORS,
    "selective": ATTENTION_OPERATORS,
}
"""Those whose results are kept beside the input of what is computed again, in the modes that keep some."""


def checkpointing(mode: str) -> tuple[Call, Call]:
    """Return what calls a layer and what calls, in its MLP, the activation function and the product that follows it.

    Together they keep for the backward what `mode` says. The model's state keys stay as they are. Layers must draw no
    random numbers.
    """
    if mode == "none":
        return _call, _call
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if kept := KEPT_OPERATORS.get(mode):
        # torch.compile warns, once, of in-place operators in what is computed again; layers have none.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        policy = functools.partial(_policy, kept)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    keeping = functools.partial(checkpoint, **options)
    return (_call, keeping) if mode == "mlp" else (keeping, _call)


def _call(function: Callable[..., Tensor], *arguments) -> Tensor:
    return function(*arguments)


def _policy(kept: frozenset, context, operator, *arguments, **options) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
