"""What a training step takes of the device's memory at its fullest, from shapes alone, before anything runs.

A step is fullest in the head, in the backward of the last block or of the first, or in the optimizer: between those
two blocks memory changes evenly. Left out are tables of positions and of masks, what `standard` keeps for a mask or a
softcap, the zeros that `sdpa_math` keeps once, compiled and with full, what kernels use inside, fragmentation, and the
CUDA context.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from flashtrain.model.gpt import GPT
from flashtrain.training.optim import MuonOptions, OptimizerOptions, hidden_matrices

WRITES_SCORES = ("standard", "sdpa_math")
"""The variants whose backward reads a matrix of all queries and keys."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes at one moment of a step, by what holds them."""

    moment: str
    weights: int
    copies: int
    """Of weights, in the dtype that products run in."""
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward, with those of the one block that has computed them again."""
    buffers: int
    """What the head or a block's backward makes on its way."""

    @property
    def total(self) -> int:
        return sum(self._parts().values())

    @property
    def total_gib(self) -> float:
        return self.total / 2**30

    def _parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def __str__(self) -> str:
        unit, size = ("GiB", 2**30) if self.total >= 2**30 else ("MiB", 2**20)
        parts = ", ".join(f"{name} {part / size:.2f}" for name, part in self._parts().items() if part)
        return f"{self.total / size:.2f} {unit} {self.moment}: {parts}"


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once, and how."""

    rows: int
    length: int
    device_type: str
    dtype: torch.dtype
    """What products run in: the weights' dtype, or autocast's."""
    compiled: bool
    variant: str
    """Of attention."""
    activation_checkpointing: str
    head_chunk_tokens: int
    accumulated: bool
    """Whether gradients are there before it: the step has others, or DDP keeps them in its buckets."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def predict_peak(model: GPT, optimizer: OptimizerOptions, batch: MicroBatch) -> StepMemory:
    """Return the fullest moment of a step that is not the first; of `model` only shapes and dtypes are read."""
    kept, recomputed = block_activations(model, batch)
    ends = end_activations(model, batch)
    all_blocks = model.options.num_layers * kept
    weights, head_weight = _bytes(model.parameters()), _bytes([model.head_weight])
    before = weights if batch.accumulated else 0
    backward = backward_buffers(model, batch)
    moments = [  # name, gradients, activations, buffers
        ("in the head", before, all_blocks + ends, head_buffers(model, batch)),
        ("in the last block's backward", before + head_weight, all_blocks + recomputed, backward),
        ("in the first block's backward", max(weights, before + head_weight), kept + recomputed, backward),
        ("in the optimizer", weights, 0, 0),
    ]
    state, copies = optimizer_state(model, optimizer), weight_copies(model, batch)
    return max(
        (
            StepMemory(moment, weights, copies, gradients, state, activations, buffers)
            for moment, gradients, activations, buffers in moments
        ),
        key=lambda memory: memory.total,
    )


def optimizer_state(model: GPT, options: OptimizerOptions) -> int:
    """Return the bytes of both moments of AdamW, and of the one momentum of Muon's matrices."""
    one = _bytes(hidden_matrices(model)) if isinstance(options, MuonOptions) else 0
    return 2 * _bytes(model.parameters()) - one


def weight_copies(model: GPT, batch: MicroBatch) -> int:
    """Return the bytes that autocast's copies of the blocks' weights take until the backward is over.

    What is computed again makes its copies again, too, of one block at a time.
    """
    others = model.blocks[1:]
    again = {"none": [], "mlp": [block.mlp.down for block in others]}.get(batch.activation_checkpointing, others)
    return _copied(model.blocks, batch.dtype) - sum(_copied(part, batch.dtype) for part in again)


def block_activations(model: GPT, batch: MicroBatch) -> tuple[int, int]:
    """Return the bytes that a block keeps from its forward to its backward, and how many more it has once it has
    computed the rest again: fewer where scores were kept that no backward reads."""
    options, norm_kept = model.options, _norm_kept(model, batch)
    queries, keys = (heads * options.head_dim for heads in (options.num_heads, options.num_kv_heads))
    stream = batch.tokens * options.hidden_size * batch.dtype.itemsize
    norms = batch.tokens * options.hidden_size * (2 * batch.dtype.itemsize + 2 * norm_kept)
    projected = queries + 2 * keys
    if options.positions == "rope" or options.qk_norm:  # then v alone is a view of the projection
        projected += queries + keys
    heads = batch.tokens * projected * batch.dtype.itemsize
    if options.qk_norm:
        heads += batch.tokens * (queries + keys) * norm_kept
        if _norm_dtype(model, batch) == batch.dtype:  # the projection itself is what it keeps of its input
            heads -= batch.tokens * (queries + keys) * batch.dtype.itemsize
    output_and_lse = batch.tokens * (queries * batch.dtype.itemsize + options.num_heads * torch.float32.itemsize)
    scores = _scores(model, batch)
    activated = batch.tokens * _mlp_activated(model, batch) * batch.dtype.itemsize
    mlp = batch.tokens * _mlp_inputs(model) * batch.dtype.itemsize + activated
    everything = norms + heads + output_and_lse + scores + mlp
    products = batch.tokens * (queries + 2 * keys + _mlp_inputs(model)) * batch.dtype.itemsize
    at_attention = stream + output_and_lse + scores
    if not batch.compiled:  # scores before the softmax, too, until they have been computed with again
        at_attention += scores
    kept = {
        "none": everything,
        "mlp": everything - activated,
        "pointwise": at_attention + products,
        "selective": at_attention,
        "full": stream,
    }[batch.activation_checkpointing]
    # What attention adds to the residual stream and, not compiled, what the MLP adds, which no backward reads.
    attention_adds = batch.activation_checkpointing == "pointwise"
    mlp_adds = batch.activation_checkpointing in ("mlp", "pointwise") and not batch.compiled
    return kept + stream * (attention_adds + mlp_adds), everything - kept


def end_activations(model: GPT, batch: MicroBatch) -> int:
    """Return the bytes that the final norm keeps, its result included."""
    in_full = batch.activation_checkpointing in ("none", "mlp")
    kept = _norm_kept(model, batch) if in_full else batch.dtype.itemsize
    return batch.tokens * model.options.hidden_size * (batch.dtype.itemsize + kept)


def head_buffers(model: GPT, batch: MicroBatch) -> int:
    """Return the bytes that head.py takes: a chunk of logits, its weight's copy, both gradients.

    On CUDA the gradient of the logits takes their place; elsewhere log p, p, and the targets as booleans and as
    numbers, and the difference, are there at once.
    """
    weight, itemsize = model.head_weight, batch.dtype.itemsize
    of_a_logit = itemsize + (0 if batch.device_type == "cuda" else 4 * torch.float32.itemsize + 1)
    logits = min(batch.head_chunk_tokens, batch.tokens) * weight.shape[0] * of_a_logit
    copy = weight.numel() * itemsize if weight.dtype != batch.dtype else 0
    of_weight = weight.numel() * torch.float32.itemsize  # in which the chunks are summed, whatever the weight's dtype
    return logits + copy + of_weight + batch.tokens * model.options.hidden_size * itemsize


def backward_buffers(model: GPT, batch: MicroBatch) -> int:
    """Return the bytes of the gradients that a block's backward holds at once, in its MLP or its attention."""
    width = _mlp_inputs(model) + _mlp_activated(model, batch) + model.options.hidden_size
    return max(batch.tokens * width * batch.dtype.itemsize, 2 * _scores(model, batch))


def _mlp_inputs(model: GPT) -> int:
    """What the MLP's first product makes of a token."""
    return (1 if model.options.mlp == "gelu" else 2) * model.options.mlp_hidden_size


def _mlp_activated(model: GPT, batch: MicroBatch) -> int:
    """What the MLP keeps of what it computes from these: its result and, of swiglu in two steps, silu(gate)."""
    in_two_steps = model.options.mlp == "swiglu" and not batch.compiled and batch.device_type == "cpu"
    return (2 if in_two_steps else 1) * model.options.mlp_hidden_size


def _norm_dtype(model: GPT, batch: MicroBatch) -> torch.dtype:
    """What a norm keeps its input in: a copy in the dtype of its weight or, compiled, the input itself.

    RMSNorm without a kernel computes in float32.
    """
    if batch.compiled:
        return batch.dtype
    return torch.float32 if _composite_norm(model, batch) else model.final_norm.weight.dtype


def _norm_kept(model: GPT, batch: MicroBatch) -> int:
    """Bytes of an element that a norm keeps: its input and, of RMSNorm without a kernel, what its weight multiplies."""
    return _norm_dtype(model, batch).itemsize * (2 if _composite_norm(model, batch) else 1)


def _composite_norm(model: GPT, batch: MicroBatch) -> bool:
    return model.options.norm == "rmsnorm" and batch.device_type == "cpu" and not batch.compiled


def _scores(model: GPT, batch: MicroBatch) -> int:
    """Of one matrix of all queries and keys; 0 where the variant writes none."""
    if batch.variant not in WRITES_SCORES:
        return 0
    itemsize = torch.float32.itemsize if batch.variant == "sdpa_math" else batch.dtype.itemsize
    return batch.rows * model.options.num_heads * batch.length**2 * itemsize


def _copied(layers: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of copies in `dtype` of the weights of all linear layers inside."""
    weights = [p for layer in layers.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()]
    return sum(p.numel() * dtype.itemsize for p in weights if p.dtype != dtype)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
