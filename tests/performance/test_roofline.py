import pytest
import torch

from flashtrain.performance.devices import DEVICES
from flashtrain.performance.io import Shape, Work
from flashtrain.performance.operators import block
from flashtrain.performance.roofline import Rates, estimate, nominal
from flashtrain.performance.traffic import Transfer

RATES = Rates(bandwidth=1e3, flops=1e5, measured=False)
H200 = DEVICES["h200"]
ONCE = (Transfer("forward", "Q", "read", 500, 2),)


def work(*, flops=10**6, asked=10_000, reused=0, heads=1, programs=None):
    return Work(flops, (Transfer("forward", "Q", "read", asked, 1),), reused, heads, programs)


def test_the_longer_of_the_two_bounds():
    assert RATES.ridge == 100
    assert RATES.bound(101, 1) == "compute" and RATES.bound(99, 1) == "memory"
    assert RATES.seconds(1e6, 1e3) == 10 and RATES.seconds(1e3, 1e6) == 1000


def test_what_fits_l2_comes_from_hbm_once():
    fits = estimate(work(reused=H200.l2_bytes), ONCE, H200, RATES)
    assert fits.fits_l2 and fits.hbm_bytes == 1000 and fits.seconds == 10 and fits.bound == "compute"
    larger = estimate(work(reused=H200.l2_bytes + 1), ONCE, H200, RATES)
    assert not larger.fits_l2 and larger.hbm_bytes == 10_000
    assert larger.intensity == 100 and fits.intensity == 1000


def test_a_program_that_asks_for_less_than_all_needs_no_more():
    assert estimate(work(asked=700), ONCE, H200, RATES).hbm_bytes == 700


def test_programs_of_a_head_share_what_they_read():
    found = estimate(work(reused=10**9, heads=8, programs=9), ONCE, H200, RATES)
    assert found.sharers == 9 and found.hbm_bytes == 1000 + 9000 // 9
    assert estimate(work(reused=10**9, programs=1000), ONCE, H200, RATES).sharers == 132


def test_heads_at_work_together_are_those_that_fill_the_device():
    assert estimate(work(reused=7, heads=20, programs=40), ONCE, H200, RATES).reused_bytes == 4 * 7
    assert estimate(work(reused=7, heads=2, programs=40), ONCE, H200, RATES).reused_bytes == 2 * 7
    assert estimate(work(reused=7, heads=200, programs=1), ONCE, H200, RATES).reused_bytes == 132 * 7


def test_few_programs_have_few_sms():
    found = estimate(work(heads=33, programs=1), ONCE, H200, RATES)
    assert found.share_of_sms == 0.25 and found.seconds == 4 * 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_bound_by_compute_and_the_rest_by_memory(dtype):
    """At a length and width of thousands."""
    rates = nominal(H200, dtype)
    operators = block(Shape(1, 8192, 8192, 16, 16, 128), dtype, {})
    by_compute = {one.name for one in operators if one.bound(rates) == "compute"}
    assert by_compute >= {"Q, K, V projections", "output projection", "MLP up", "MLP down"}
    assert by_compute.isdisjoint({"norm", "softmax P", "dropout", "residual sum", "GELU"})


def test_operators_by_hand():
    """2 tokens of width 4 in one head, bf16."""
    found = {one.name: one for one in block(Shape(1, 2, 2, 1, 1, 4), torch.bfloat16, {})}
    assert found["Q, K, V projections"].flops == 2 * 2 * 12 * 4
    assert found["Q, K, V projections"].bytes == 2 * (2 * 4 + 4 * 12 + 2 * 12)
    assert (found["softmax P"].flops, found["softmax P"].bytes) == (5 * 4, 2 * 4 * 2)
    assert found["dropout"].bytes == 2 * 8 * 2 + 8
    assert found["MLP up"].flops == found["MLP down"].flops == 2 * 2 * 16 * 4
