"""The language-model head: cross-entropy and next-token logits from hidden states, in chunks of rows.

The logits of a long batch are the largest tensor of a training step: 32,768 rows of 50,304 are 3.1 GiB in
bfloat16, and as much again for their gradient. Here they exist one chunk at a time, and the training loss
computes its gradients while the chunk is at hand; on CUDA a kernel puts them in the place of the logits.
Source: Liger-Kernel, arXiv 2410.10989.

N rows, C hidden size, V padded vocabulary, n rows of one chunk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtrain.model.layers import activation_dtype, has_kernel

IGNORED = -100


def summed_cross_entropy(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab_size: int, chunk_size: int
) -> Tensor:
    """Return the sum over rows of -log softmax(hidden weight^T)[target], differentiable in hidden and weight.

    Matrix products run in autocast's dtype, the rest in float32 (float64 for float64 inputs).
    Beyond the inputs it holds the gradients of both and, on CUDA, chunk_size x V logits.

    Args:
        hidden_NC: hidden states after the final norm.
        weight_VC: head weight; may be the embedding's.
        targets_N: int64 token ids below vocab_size; rows of -100 count for nothing, what is no token gives +inf.
        vocab_size: columns from here on are padding and get no probability.
        chunk_size: rows whose logits exist at one time.
    """
    if not torch.is_grad_enabled():
        return token_nll(hidden_NC, weight_VC, targets_N, vocab_size, chunk_size).sum()
    dtype = activation_dtype(hidden_NC)
    with torch.autocast(hidden_NC.device.type, enabled=False):
        return _SummedCrossEntropy.apply(hidden_NC, weight_VC, targets_N, vocab_size, chunk_size, dtype)


def token_nll(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab_size: int, chunk_size: int
) -> Tensor:
    """Return each row's negative log likelihood (N,) float32, 0 where the target is -100; not differentiable.

    Arguments as in `summed_cross_entropy`.
    """
    return torch.cat(_of_chunks(_nll, hidden_NC, weight_VC, targets_N, vocab_size, chunk_size))


def token_hits(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocab_size: int, chunk_size: int
) -> Tensor:
    """Return `token_nll` and, as 1 or 0, whether the target is the most probable token: (2, N) float32.

    Arguments as in `summed_cross_entropy`; of equally probable tokens the first is the most probable.
    """
    return torch.cat(_of_chunks(_nll_and_hit, hidden_NC, weight_VC, targets_N, vocab_size, chunk_size), dim=1)


@torch.no_grad()
def _of_chunks(
    function: Callable[[Tensor, Tensor, int], Tensor],
    hidden_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    chunk_size: int,
) -> list[Tensor]:
    """Return function(logits (n, V), targets (n,), vocab_size) of each chunk of rows."""
    dtype = activation_dtype(hidden_NC)
    with torch.autocast(hidden_NC.device.type, enabled=False):
        weight_VC = weight_VC.to(dtype)
        return [
            function(F.linear(hidden_nC.to(dtype), weight_VC), targets_n, vocab_size)
            for hidden_nC, targets_n in zip(hidden_NC.split(chunk_size), targets_N.split(chunk_size), strict=True)
        ]


def next_logits(hidden_BC: Tensor, weight_VC: Tensor, vocab_size: int) -> Tensor:
    """Return float32 logits (B, vocab_size)."""
    return F.linear(hidden_BC, weight_VC[:vocab_size]).float()


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, vocab_size, chunk_size, dtype):
        weight = weight_VC.to(dtype)
        nll_N = torch.empty_like(targets_N, dtype=_accumulator(dtype))
        grad_hidden_NC = torch.empty_like(hidden_NC)
        grad_weight_VC = torch.empty_like(weight, dtype=_accumulator(dtype))
        beta = 0  # The first chunk, of no rows where there are none, writes what the others add to.
        tensors = (hidden_NC, targets_N, nll_N, grad_hidden_NC)
        for hidden_nC, targets_n, nll_n, grad_hidden_nC in zip(
            *(tensor.split(chunk_size) for tensor in tensors), strict=True
        ):
            hidden_nC = hidden_nC.to(dtype)
            nll, grad_nV = _nll_and_gradient(F.linear(hidden_nC, weight), targets_n, vocab_size)
            nll_n.copy_(nll)
            grad_hidden_nC.copy_(grad_nV @ weight)
            _add_product(grad_weight_VC, grad_nV.T, hidden_nC, beta)
            beta = 1
            # Or the next chunk would be computed while this one still holds its memory.
            del grad_nV
        ctx.save_for_backward(grad_hidden_NC, grad_weight_VC.to(weight_VC.dtype))
        return nll_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        grad_hidden_NC, grad_weight_VC = ctx.saved_tensors
        return grad_hidden_NC * grad_output, grad_weight_VC * grad_output, None, None, None, None


def _nll(logits_nV: Tensor, targets_n: Tensor, vocab_size: int) -> Tensor:
    """Return -log p(target) (n,), 0 for ignored rows."""
    if has_kernel(logits_nV):
        from flashtrain.kernels.cross_entropy import nll

        return nll(logits_nV, targets_n, vocab_size, IGNORED)
    return _pick_nll(_log_probabilities(logits_nV, vocab_size), targets_n, vocab_size)


def _nll_and_hit(logits_nV: Tensor, targets_n: Tensor, vocab_size: int) -> Tensor:
    """Return what `_nll` does, and whether the largest logit is the target's, (2, n)."""
    nll_n = _nll(logits_nV, targets_n, vocab_size)
    return torch.stack([nll_n, (logits_nV[:, :vocab_size].argmax(dim=1) == targets_n).to(nll_n.dtype)])


def _nll_and_gradient(logits_nV: Tensor, targets_n: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return what `_nll` does and, in the dtype of the logits and maybe their memory, the gradient of its sum."""
    if has_kernel(logits_nV):
        from flashtrain.kernels.cross_entropy import nll_and_gradient_

        return nll_and_gradient_(logits_nV, targets_n, vocab_size, IGNORED), logits_nV
    log_p_nV = _log_probabilities(logits_nV, vocab_size)
    tokens_n = torch.where(_is_token(targets_n, vocab_size), targets_n, -1)
    onehot_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == tokens_n[:, None]
    grad_nV = torch.where((targets_n != IGNORED)[:, None], log_p_nV.exp() - onehot_nV.to(log_p_nV.dtype), 0.0)
    return _pick_nll(log_p_nV, targets_n, vocab_size), grad_nV.to(logits_nV.dtype)


def _log_probabilities(logits_nV: Tensor, vocab_size: int) -> Tensor:
    padding_V = torch.arange(logits_nV.shape[1], device=logits_nV.device) >= vocab_size
    log_p_nV = logits_nV.to(_accumulator(logits_nV.dtype)).masked_fill(padding_V, -torch.inf)
    # torch.log_softmax on a CPU loses small terms beside a large one: 3e-5 where one of 49,152 logits is 20 above.
    log_p_nV -= log_p_nV.amax(dim=1, keepdim=True)
    log_p_nV -= log_p_nV.exp().sum(dim=1, keepdim=True).log()
    return log_p_nV


def _is_token(targets_n: Tensor, vocab_size: int) -> Tensor:
    return (targets_n >= 0) & (targets_n < vocab_size)


def _pick_nll(log_p_nV: Tensor, targets_n: Tensor, vocab_size: int) -> Tensor:
    is_token = _is_token(targets_n, vocab_size)
    nll_n = -log_p_nV.gather(1, torch.where(is_token, targets_n, 0)[:, None])[:, 0]
    nll_n = torch.where(is_token, nll_n, nll_n + torch.inf)  # a NaN stays one
    return torch.where(targets_n != IGNORED, nll_n, 0.0)


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Add a @ b to beta `total`, which may be float32 where a and b are 16-bit, without rounding the product.

    With beta 0 `total` is not read.
    """
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
