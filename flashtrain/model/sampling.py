"""Text generation by recomputing the whole context for each token: no cache, enough for a sample of a run."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtrain.model.gpt import GPT
from flashtrain.model.head import next_logits

LENGTH_MULTIPLE = 64


# A compiled model runs uncompiled here: each step has a new length, for which code would be built anew.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def generate(
    model: GPT,
    prompt_tokens: Tensor,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    context_length: int,
) -> Tensor:
    """Return `num_tokens` token ids (num_tokens,) that continue `prompt_tokens` (int64, at least one).

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens are drawn from; None draws from all.
        generator: the source of randomness, on the device of the prompt.
        context_length: number of latest tokens that the model sees; no forward is longer.
    """
    tokens = prompt_tokens
    for _ in range(num_tokens):
        context = tokens[-context_length:]
        fed = context if model.options.rope.follows_length else _padded(context, context_length)
        hidden_1SC = model(fed[None])
        logits_V = next_logits(hidden_1SC[:, len(context) - 1], model.head_weight, model.options.vocab_size)[0]
        tokens = torch.cat((tokens, _draw(logits_V, temperature, top_k, generator)))
    return tokens[len(prompt_tokens) :]


def _padded(context: Tensor, longest: int) -> Tensor:
    """Lengthen to a multiple of 64, since some attention variants refuse a single token; what follows is not seen."""
    length = min(math.ceil(len(context) / LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)
    return F.pad(context, (0, length - len(context)))


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Return one token id (1,)."""
    if temperature == 0:
        return logits_V.argmax(keepdim=True)
    values, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    return ids[torch.multinomial((values / temperature).softmax(0), 1, generator=generator)]
