from dataclasses import replace

import pytest
import torch

from flashtrain.kernels.attention import Intervals, tiles
from flashtrain.performance.devices import DEVICES
from flashtrain.performance.io import Launch, Pass, Shape, Work, compulsory, predict
from flashtrain.performance.operators import block
from flashtrain.performance.roofline import Rates, estimate, nominal
from flashtrain.performance.traffic import Transfer

RATES = Rates(bandwidth=1e3, flops=1e5, measured=False)
H200 = DEVICES["h200"]
NO_L2 = replace(H200, l2_bytes=0)
ONCE = (Transfer("forward", "Q", "read", 500, 2),)


def one_pass(*, flops=10**6, asked=10_000, reused=0, readers=1, heads=1, programs=None):
    """It asks for Q, of 500 elements of 2 bytes, in all for `asked` bytes."""
    return Pass("forward", (Transfer("forward", "Q", "read", asked // 2, 2),), flops, reused, readers, heads, programs)


def work(*passes, size=500):
    return Work(passes, {"Q": size})


def estimated(*passes, size=500, device=NO_L2):
    return estimate(work(*passes, size=size), ONCE, device, RATES)


def test_the_longer_of_the_two_bounds():
    assert RATES.ridge == 100
    assert RATES.bound(101, 1) == "compute" and RATES.bound(99, 1) == "memory"
    assert RATES.seconds(1e6, 1e3) == 10 and RATES.seconds(1e3, 1e6) == 1000


def test_matrices_that_stay_in_half_of_l2_come_from_hbm_once():
    """However many passes take them."""
    twice = one_pass(asked=1000), one_pass(asked=1000)
    stays = estimated(*twice, device=replace(H200, l2_bytes=2000))
    assert stays.stays_in_l2 and stays.touched_bytes == stays.hbm_bytes == 1000
    larger = estimated(*twice, device=replace(H200, l2_bytes=1998))
    assert not larger.stays_in_l2 and larger.hbm_bytes == larger.asked_bytes == 2000


def test_what_a_pass_reads_again_comes_from_hbm_once_for_each_pass_where_half_of_l2_keeps_it():
    fits = estimated(one_pass(reused=40), one_pass(reused=50), device=replace(H200, l2_bytes=100))
    assert [(one.fits_l2, one.reused_bytes) for one in fits.passes] == [(True, 40), (True, 50)]
    assert fits.hbm_bytes == 2 * 1000
    one_fits = estimated(one_pass(reused=40), one_pass(reused=51), device=replace(H200, l2_bytes=100))
    assert [(one.fits_l2, one.hbm_bytes) for one in one_fits.passes] == [(True, 1000), (False, 10_000)]
    assert one_fits.hbm_bytes == 1000 + 10_000
    assert one_fits.intensity == 2 * 10**6 / 11_000


def test_a_matrix_in_two_dtypes_is_two():
    q = Transfer("forward", "Q", "read", 500, 2)
    passes = Pass("forward", (q, replace(q, direction="write", element_bytes=4)), 1), Pass("finish", (q,))
    assert estimated(*passes).touched_bytes == 500 * (2 + 4)


def test_a_program_that_asks_for_less_than_all_needs_no_more():
    assert estimated(one_pass(asked=700)).hbm_bytes == estimated(one_pass(asked=700), device=H200).hbm_bytes == 700


def test_programs_of_a_head_share_what_they_read():
    (found,) = estimated(one_pass(reused=10**9, readers=9, heads=8, programs=9)).passes
    assert found.sharers == 9 and found.hbm_bytes == 1000 + 9000 // 9
    (found,) = estimated(one_pass(reused=10**9, readers=1000, programs=1000)).passes
    assert found.sharers == 132


def test_heads_at_work_together_are_those_that_fill_the_device():
    def at_work(**how):
        (found,) = estimated(one_pass(reused=7, **how)).passes
        return found.reused_bytes / 7

    assert at_work(readers=40, heads=20, programs=40) == 4
    assert at_work(readers=40, heads=2, programs=40) == 2
    assert at_work(heads=200, programs=1) == 132


def test_where_neighbours_alone_read_the_same_there_are_several_groups_of_a_head():
    """Of 17 programs: 132 SMs have 8 of them at work, of 40 programs there are 3."""
    (found,) = estimated(one_pass(reused=7, readers=17, programs=2048), device=H200).passes
    assert (found.sharers, found.reused_bytes) == (17, 8 * 7)
    (found,) = estimated(one_pass(reused=7, readers=17, programs=40), device=H200).passes
    assert found.reused_bytes == 3 * 7
    (found,) = estimated(one_pass(reused=10**9, readers=17, programs=2048)).passes
    assert found.hbm_bytes == 1000 + 9000 // 17


def test_few_programs_have_few_sms():
    """A quarter of them: 4 times as long. With as many FLOPs on all of them, 5 times as long as one of the two."""
    few = one_pass(heads=33, programs=1)
    found = estimated(few)
    assert found.share_of_sms == 0.25 and found.seconds == 4 * 10
    assert estimated(few, one_pass()).share_of_sms == 2 / 5


# What the H200's counters said on 30 November 2026, in GiB: full mask, 16 heads of 128, bf16.
COUNTED = {
    ("standard", "forward"): {4096: 2.077, 8192: 8.186, 16384: 32.60},
    ("standard", "backward"): {4096: 5.183, 8192: 20.49, 16384: 81.27},
    ("flash_v1", "forward"): {4096: 4.189, 8192: 20.47, 16384: 81.45},
    ("flash_v1", "backward"): {4096: 7.168, 8192: 28.56, 16384: 113.4},
    ("flash_v2", "forward"): {4096: 0.0633, 8192: 0.1318, 16384: 0.2926},
    ("flash_v2", "backward"): {4096: 0.2019, 8192: 0.4153, 16384: 0.8892},
}


def on_h200(variant, pass_name, length, mask):
    """The estimate for 16 heads of 128 in bf16."""
    dtype, shape = torch.bfloat16, Shape(1, length, length, 16, 16, 128)
    launch = Launch(tiles("sm_90", 128, dtype), H200.sram_elements)
    found = predict(variant, pass_name, shape, mask, dtype, launch)
    return estimate(found, compulsory(pass_name, shape, dtype), H200, nominal(H200, dtype))


def modelled(variant, pass_name, length):
    """Bytes of HBM of what was counted."""
    return on_h200(variant, pass_name, length, Intervals.full()).hbm_bytes


@pytest.mark.parametrize(
    ("mask", "sharers", "mebibytes"),
    [(Intervals.full(), 132, 64), (Intervals.causal(), 132, 64), (Intervals.window(1023, 0), 17, 8 * 17 / 32)],
    ids=str,
)
def test_what_programs_share_and_read_again_is_what_the_mask_shows_them(mask, sharers, mebibytes):
    """At 128k a key is seen by all tiles of queries, or by 17 of 64 with a window of 1,024 keys, of which each tile
    reads 17 blocks of 64: of K and V 17/32 MiB, in 8 places at a time."""
    (found,) = on_h200("flash_v2", "forward", 131_072, mask).passes
    assert (found.sharers, found.reused_bytes) == (sharers, mebibytes * 2**20)


@pytest.mark.parametrize(("variant", "pass_name"), COUNTED)
def test_the_model_is_near_what_the_h200_counted(variant, pass_name):
    """Within the 15 % that the issue asks of standard, and a quarter for the others: L2 serves a part of flash_v1's
    forward at 4k."""
    for length, counted in COUNTED[variant, pass_name].items():
        model = modelled(variant, pass_name, length)
        assert counted * 2**30 == pytest.approx(model, rel=0.15 if variant == "standard" else 0.25)


@pytest.mark.parametrize("length", [4096, 8192, 16384])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_the_order_is_that_of_what_the_h200_counted(pass_name, length):
    def counted(name):
        return COUNTED[name, pass_name][length]

    names = ("standard", "flash_v1", "flash_v2")
    assert sorted(names, key=lambda name: modelled(name, pass_name, length)) == sorted(names, key=counted)


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
