import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtrain.model.head import next_logits, summed_cross_entropy, token_hits, token_nll

VOCAB_SIZE, PADDED = 1000, 1024


def make_inputs(rows=150, width=64, dtype=torch.float64, ignored=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = (torch.randn(PADDED, width, generator=generator, dtype=torch.float64) / 8).to(dtype)
    targets = torch.randint(VOCAB_SIZE, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden, weight, targets, reduction="sum"):
    logits = F.linear(hidden, weight)[:, :VOCAB_SIZE]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction=reduction)


@pytest.mark.parametrize("chunk_size", [1, 64, 150, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk_size):
    hidden, weight, targets = make_inputs()
    loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, chunk_size)
    expected = plain(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    actual_gradients = torch.autograd.grad(loss, (hidden, weight))
    for actual, wanted in zip(actual_gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [64, 1000])
def test_a_hit_is_the_most_probable_token(chunk_size):
    hidden, weight, targets = make_inputs()
    logits = F.linear(hidden, weight)
    assert (logits.argmax(dim=1) >= VOCAB_SIZE).any(), "padding has the largest logit somewhere, and is no token"
    best = logits[:, :VOCAB_SIZE].argmax(dim=1)
    targets[:75] = best[:75]
    nll, hits = token_hits(hidden, weight, targets, VOCAB_SIZE, chunk_size)
    assert torch.equal(nll, token_nll(hidden, weight, targets, VOCAB_SIZE, chunk_size))
    assert torch.equal(hits, (targets == best).to(hits.dtype)) and 75 <= hits.sum() < 150


def test_small_probabilities_beside_a_large_one_are_not_lost():
    """torch.log_softmax is off by 3e-5 on a CPU here."""
    logits = 2 * torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = 20
    targets = torch.arange(64) * 700
    nll = token_nll(torch.eye(64), logits.T.contiguous(), targets, 49_152, chunk_size=16)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(nll.double(), exact, rtol=0, atol=4e-6)


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32], ids=["hidden-bf16", "hidden-fp32"])
def test_autocast_is_at_least_half_as_accurate_as_plain_bfloat16(hidden_dtype):
    check_autocast_accuracy("cpu", hidden_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32], ids=["hidden-bf16", "hidden-fp32"])
def test_autocast_on_cuda_is_at_least_half_as_accurate_as_plain_bfloat16(hidden_dtype):
    check_autocast_accuracy("cuda", hidden_dtype)


def check_autocast_accuracy(device, hidden_dtype):
    """Against float64, errors of gradients and of rows' losses are at most twice those of plain autocast."""
    inputs = make_inputs(rows=384, width=128, dtype=torch.float32)
    hidden, weight, targets = (x.detach().to(device) for x in inputs)
    hidden = hidden.to(hidden_dtype)

    def run(loss, hidden, weight):
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(loss(hidden, weight), (hidden, weight))

    def gradients(loss):
        with torch.autocast(device, torch.bfloat16):
            return run(loss, hidden, weight)

    exact = run(lambda h, w: plain(h, w, targets), hidden.double(), weight.double())
    baseline = gradients(lambda h, w: plain(h, w, targets))
    actual = gradients(lambda h, w: summed_cross_entropy(h, w, targets, VOCAB_SIZE, chunk_size=128))
    with torch.no_grad():
        exact += (plain(hidden.double(), weight.double(), targets, "none"),)
        with torch.autocast(device, torch.bfloat16):
            baseline += (plain(hidden, weight, targets, "none"),)
            actual += (token_nll(hidden, weight, targets, VOCAB_SIZE, chunk_size=128),)
    assert [x.dtype for x in actual] == [hidden_dtype, torch.float32, torch.float32]
    for name, ours, theirs, truth in zip(("hidden", "weight", "nll"), actual, baseline, exact, strict=True):
        error, allowed = (ours - truth).norm(), 2 * (theirs - truth).norm()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def test_weight_gradient_sums_chunks_in_float32():
    """Summed in bfloat16 it would stop at 256, where adding one more row changes nothing."""
    rows, width = 1024, 4
    hidden, weight = torch.ones(rows, width).bfloat16(), torch.zeros(64, width).bfloat16().requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)
    summed_cross_entropy(hidden, weight, targets, 64, chunk_size=1).backward()
    expected = torch.full((width,), -rows * 63 / 64)
    torch.testing.assert_close(weight.grad[0].float(), expected, rtol=4e-3, atol=0)


def test_incoming_gradient_scales_and_the_graph_can_be_used_again():
    hidden, weight, targets = make_inputs()
    loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 64)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss / 7, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for first, second, third in zip(once, scaled, again, strict=True):
        torch.testing.assert_close(second, first / 7)
        assert torch.equal(first, third)


def test_tied_weight_gets_both_gradients():
    _, weight, targets = make_inputs()
    tokens = torch.arange(len(targets)) % VOCAB_SIZE

    def gradient(loss):
        return torch.autograd.grad(loss(F.embedding(tokens, weight).tanh(), weight), weight)[0]

    actual = gradient(lambda h, w: summed_cross_entropy(h, w, targets, VOCAB_SIZE, 64))
    torch.testing.assert_close(actual, gradient(lambda h, w: plain(h, w, targets)), rtol=0, atol=1e-12)


def test_padding_columns_get_no_probability_and_no_gradient():
    hidden, weight, targets = make_inputs()
    with torch.no_grad():
        weight[VOCAB_SIZE:] = 100.0
    loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 64)
    loss.backward()
    torch.testing.assert_close(loss, plain(hidden, weight, targets))
    assert not weight.grad[VOCAB_SIZE:].any()
    assert next_logits(hidden[:3], weight, VOCAB_SIZE).shape == (3, VOCAB_SIZE)


def test_a_target_that_is_no_token_has_infinite_loss_and_the_gradient_of_the_others():
    """As the kernel on CUDA has it (tests/test_cross_entropy.py)."""
    hidden, weight, targets = make_inputs(rows=4, ignored=0.0)
    targets[1:] = torch.tensor([-1, VOCAB_SIZE, PADDED])
    nll = token_nll(hidden, weight, targets, VOCAB_SIZE, 3)
    assert nll[0].isfinite() and nll[1:].tolist() == [torch.inf] * 3
    loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 3)
    assert loss == torch.inf
    gradient = torch.autograd.grad(loss, hidden)[0]
    probabilities = F.linear(hidden, weight)[:, :VOCAB_SIZE].softmax(dim=1)
    torch.testing.assert_close(gradient[1:], (probabilities @ weight[:VOCAB_SIZE])[1:], rtol=0, atol=1e-12)


def test_batch_of_ignored_rows_has_zero_loss_and_zero_gradients():
    hidden, weight, targets = make_inputs(ignored=2)
    loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 64)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("rows", [0, 1, 150])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_hold_nothing_that_was_in_their_memory(rows, dtype, nan_filled_outputs):
    hidden, weight, targets = make_inputs(rows, dtype=dtype)
    summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 64).backward()
    assert weight.grad.isfinite().all() and weight.grad.any() == (rows > 0)
    assert hidden.grad.isfinite().all() and hidden.grad.shape == hidden.shape


def test_token_nll_is_that_of_cross_entropy_and_sums_to_the_loss():
    hidden, weight, targets = make_inputs(dtype=torch.float32)
    nll = token_nll(hidden, weight, targets, VOCAB_SIZE, 64)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, plain(hidden, weight, targets, reduction="none"))
    with torch.no_grad():
        loss = summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, 64)
    torch.testing.assert_close(loss, nll.sum())


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    hidden, weight, targets = make_inputs(rows=1024)
    with LargestTensor() as largest:
        summed_cross_entropy(hidden, weight, targets, VOCAB_SIZE, chunk_size=128).backward()
        token_nll(hidden, weight, targets, VOCAB_SIZE, chunk_size=128)
    assert largest.elements == 128 * PADDED


@pytest.mark.gpu
def test_gpt2_head_at_32k_tokens_takes_at_most_1_gib():
    """One chunk of logits is 0.38 GiB, and the weight with its copy and the gradients 0.26."""
    rows, width, vocab_size, padded = 32_768, 768, 50_257, 50_304
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(padded, width, device="cuda", requires_grad=True)
    targets = torch.randint(vocab_size, (rows,), device="cuda")
    for _ in range(2):  # the first compiles
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = summed_cross_entropy(hidden, weight, targets, vocab_size, chunk_size=4096)
        loss.backward()
        del loss
    assert torch.cuda.max_memory_allocated() - before <= 2**30
