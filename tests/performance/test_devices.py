import pytest
import torch

from flashtrain.performance.devices import DEVICES, key_of


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_figures_are_of_their_units(device):
    assert 1e12 < device.hbm_bandwidth < 1e13 and 1e10 < device.hbm_bytes < 1e12
    assert 30 * 2**20 < device.l2_bytes < 100 * 2**20 and 100 < device.num_sms < 200
    assert device.l2_kept_bytes == device.l2_bytes / 2
    assert 100 * 2**10 < device.sram_bytes < 256 * 2**10
    assert device.peak_flops(torch.bfloat16) == device.peak_flops(torch.float16) > 10 * device.peak_flops(torch.float32)
    assert 100 < device.half_flops / device.hbm_bandwidth < 400


def test_a_later_device_is_no_slower():
    a100, h100, h200 = (DEVICES[key] for key in ("a100", "h100", "h200"))
    assert a100.hbm_bandwidth < h100.hbm_bandwidth < h200.hbm_bandwidth
    assert a100.half_flops < h100.half_flops == h200.half_flops


def test_flash_v1s_sram_is_what_cuda_gives_a_block():
    """163 and 227 KiB of fp32 numbers: `shared_memory_per_block_optin`."""
    assert DEVICES["a100"].sram_elements == 163 * 256
    assert DEVICES["h200"].sram_elements == 227 * 256


def test_names_are_distinct_and_found():
    names = [name for device in DEVICES.values() for name in device.names]
    assert len(set(names)) == len(names)
    assert key_of("NVIDIA H200") == "h200" and key_of("NVIDIA H200 NVL") is None


@pytest.mark.gpu
def test_the_table_is_what_the_driver_says():
    properties = torch.cuda.get_device_properties()
    key = key_of(properties.name)
    if key is None:
        pytest.skip(f"{properties.name} is not in the table")
    device = DEVICES[key]
    assert device.num_sms == properties.multi_processor_count
    assert device.sram_bytes == properties.shared_memory_per_multiprocessor
    assert 4 * device.sram_elements == properties.shared_memory_per_block_optin
    assert device.l2_bytes == properties.L2_cache_size
