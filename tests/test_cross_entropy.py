"""The kernel of cross-entropy against PyTorch in float64, interpreted where there is no GPU; the head that calls it.

But for tests of full size, a block is 2,048 columns of 16 bits, 1,024 of 32, so that a few thousand are several blocks.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from flashtrain.model import head

pytest.importorskip("triton")
cross_entropy = pytest.importorskip("flashtrain.kernels.cross_entropy")

IGNORED = -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
numpy_warns = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, request):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(cross_entropy, "LANES", 256)
        monkeypatch.setattr(cross_entropy, "NUM_WARPS", 4)


def make_logits(rows, num_columns, vocab_size, dtype=torch.float32, scale=3.0, device=DEVICE):
    """Logits and targets; one row of three is ignored, and padding holds what would win any softmax."""
    generator = torch.Generator(device).manual_seed(0)
    logits = (scale * torch.randn(rows, num_columns, generator=generator, device=device)).to(dtype)
    logits[:, vocab_size:] = torch.finfo(dtype).max
    targets = torch.randint(vocab_size, (rows,), generator=generator, device=device)
    targets[1::3] = IGNORED
    return logits, targets


def exact(logits, targets, vocab_size):
    """nll (n,) and the gradient of its sum (n, V), both float64."""
    logits = logits.double().requires_grad_()
    nll = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none", ignore_index=IGNORED)
    return nll.detach(), torch.autograd.grad(nll.sum(), logits)[0]


def assert_right(logits, targets, vocab_size, nll_rtol=1e-5, nll_atol=1e-5):
    """Both functions, to a rounding of the gradient in its dtype."""
    nll, gradient = exact(logits, targets, vocab_size)
    before = logits.clone()
    alone = cross_entropy.nll(logits, targets, vocab_size, IGNORED)
    assert torch.equal(logits, before)
    actual = cross_entropy.nll_and_gradient_(logits, targets, vocab_size, IGNORED)
    assert actual.dtype == torch.float32 and torch.equal(alone, actual)
    torch.testing.assert_close(actual.double(), nll, rtol=nll_rtol, atol=nll_atol)
    # Half a unit in the last place to round, and as much again for fp32's own errors, which decide some roundings.
    info = torch.finfo(logits.dtype)
    rtol, atol = max(info.eps, 1e-5), max(info.smallest_normal * info.eps, 1e-12)
    torch.testing.assert_close(logits.double(), gradient, rtol=rtol, atol=atol)
    assert not logits[:, vocab_size:].any() and not logits[targets == IGNORED].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("rows", "num_columns", "vocab_size"),
    [(5, 5000, 5000), (4, 4096, 4096), (4, 4160, 4090), (4, 6208, 2048), (1, 2049, 2049), (3, 7, 5), (2, 1, 1)],
)
def test_any_shape(rows, num_columns, vocab_size, dtype):
    assert_right(*make_logits(rows, num_columns, vocab_size, dtype), vocab_size)


@pytest.mark.parametrize("scale", [1e4, 1e-4, 1e30])
def test_large_and_small_logits(scale):
    assert_right(*make_logits(4, 4500, 4400, scale=scale), 4400)


def test_little_is_lost_beside_a_large_logit():
    """The logits differ by thousandths, where fp32 at 10,000 has a thousandth between numbers."""
    logits, targets = make_logits(4, 4500, 4500, scale=0.003)
    logits += 1e4
    assert_right(logits, targets, 4500)


@pytest.mark.parametrize("position", [0, 2500, 4399])
def test_all_but_one_are_minus_infinity(position):
    logits, targets = make_logits(4, 4500, 4400)
    targets[:] = position
    logits[:, :4400] = -math.inf
    logits[:, position] = torch.arange(4.0)
    assert_right(logits, targets, 4400)


def test_a_target_of_minus_infinity_and_one_that_is_no_token_have_infinite_loss():
    logits, targets = make_logits(4, 4500, 4400)
    logits[0, targets[0]] = -math.inf
    targets[2], targets[3] = 4400, -1
    nll = cross_entropy.nll_and_gradient_(logits, targets, 4400, IGNORED)
    assert nll[[0, 2, 3]].tolist() == [math.inf] * 3
    assert logits.isfinite().all()


@numpy_warns
@pytest.mark.parametrize("place", [0, 3000])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_infinity_go_as_in_log_softmax(poison, place):
    logits, targets = make_logits(3, 4500, 4400)
    logits[:, place] = poison
    assert torch.log_softmax(logits[:, :4400], 1).isnan().all()
    nll = cross_entropy.nll_and_gradient_(logits, targets, 4400, IGNORED)
    assert nll[[0, 2]].isnan().all() and logits[[0, 2], :4400].isnan().all()
    assert nll[1] == 0 and not logits[1].any()


@numpy_warns
def test_a_row_of_minus_infinity_is_nan_as_in_log_softmax():
    logits = torch.full((1, 4500), -math.inf, device=DEVICE)
    assert torch.log_softmax(logits, 1).isnan().all()
    nll = cross_entropy.nll_and_gradient_(logits, torch.zeros(1, dtype=torch.int64, device=DEVICE), 4500, IGNORED)
    assert nll.isnan().all() and logits.isnan().all()


def test_all_rows_ignored():
    logits, targets = make_logits(3, 4500, 4400)
    targets[:] = IGNORED
    assert not cross_entropy.nll_and_gradient_(logits, targets, 4400, IGNORED).any() and not logits.any()


def test_rows_with_others_memory_between_leave_it_alone():
    memory = torch.full((4, 5000), 7.0, device=DEVICE)
    logits, targets = make_logits(4, 4500, 4400)
    memory[:, :4500] = logits
    assert_right(memory[:, :4500], targets, 4400)
    assert (memory[:, 4500:] == 7).all()


def test_columns_apart_in_memory_are_refused():
    with pytest.raises(ValueError, match="rows of logits must be contiguous, and their stride is 4"):
        cross_entropy.nll(torch.zeros(8, 4).T, torch.zeros(4, dtype=torch.int64), 8, IGNORED)


def test_a_vocabulary_beyond_the_columns_is_refused():
    memory = torch.ones(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="vocab_size must be 1 to 32, logits' columns, not 33"):
        cross_entropy.nll_and_gradient_(memory[:, :32], torch.zeros(2, dtype=torch.int64, device=DEVICE), 33, IGNORED)
    assert (memory == 1).all()


@pytest.fixture
def head_with_kernel(monkeypatch):
    monkeypatch.setattr(head, "has_kernel", lambda logits: True)
    return head


def test_the_heads_gradient_takes_the_place_of_the_logits(head_with_kernel):
    logits, targets = make_logits(4, 4500, 4400)
    _, gradient = head_with_kernel._nll_and_gradient(logits, targets, 4400)
    assert gradient.data_ptr() == logits.data_ptr()


def test_the_head_with_the_kernel_is_right(head_with_kernel):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 8, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(4500, 8, generator=generator).to(DEVICE).requires_grad_()
    targets = torch.randint(4400, (40,), generator=generator).to(DEVICE)
    targets[::5] = IGNORED
    loss = head_with_kernel.summed_cross_entropy(hidden, weight, targets, 4400, chunk_size=16)
    nll = head_with_kernel.token_nll(hidden, weight, targets, 4400, chunk_size=16)

    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact_nll = F.cross_entropy((wide_hidden @ wide_weight.T)[:, :4400], targets, reduction="none")
    torch.testing.assert_close(nll.double(), exact_nll.detach(), rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad(loss, (hidden, weight))
    for ours, truth in zip(actual, torch.autograd.grad(exact_nll.sum(), (wide_hidden, wide_weight)), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("num_columns", "vocab_size"), [(50_304, 50_257), (50_257, 50_257), (128_256, 128_256)])
def test_on_a_gpu_at_full_size(num_columns, vocab_size, dtype):
    logits, targets = make_logits(4096, num_columns, vocab_size, dtype, device="cuda")
    assert_right(logits, targets, vocab_size)


@pytest.mark.gpu
def test_beyond_two_to_the_31_logits():
    num_columns = 50_304
    rows = 2**31 // num_columns + 64
    logits = torch.zeros(rows, num_columns, dtype=torch.bfloat16, device="cuda")
    targets = torch.full((rows,), 7, device="cuda")
    nll = cross_entropy.nll_and_gradient_(logits, targets, num_columns, IGNORED)
    torch.testing.assert_close(nll, torch.full_like(nll, math.log(num_columns)))
    assert (logits[:, 7] == -1).all() and (logits[:, 8] > 0).all()
