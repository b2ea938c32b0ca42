"""What GPUs can do by their makers' word: one table, for MFU and for the model of attention's traffic.

Sources: NVIDIA A100 data sheet (2022) and GA100 white paper; H100 data sheet and GH100 white paper (2022); H200 data
sheet (2024). Peaks are dense: the H100's and H200's data sheets print twice as much for 16 bits, with sparsity. No
data sheet gives the H200's L2: the figure is what the CUDA driver reports on one.

The A100's L2 is in two partitions, of which each "localizes and caches data for memory accesses from SMs in the GPCs
directly connected to the partition" (NVIDIA A100 Tensor Core GPU Architecture white paper, 2020, A100 L2 Cache). The
H100's and H200's are taken to be alike.
"""

from dataclasses import dataclass

import torch

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Device:
    label: str
    names: tuple[str, ...]
    """What `torch.cuda.get_device_name` says, exactly."""
    architecture: str
    """The rows of the kernels' launch table."""
    hbm_bytes: float
    hbm_bandwidth: float
    """Bytes per second, to read and to write together."""
    num_sms: int
    sram_bytes: int
    """Shared memory of one SM, the SRAM of the FlashAttention papers."""
    l2_bytes: int
    half_flops: float
    """Dense fp16 and bf16 peak of the tensor cores, FLOP/s."""
    fp32_flops: float
    """fp32 peak outside the tensor cores, FLOP/s."""

    @property
    def l2_kept_bytes(self) -> int:
        """What is taken to stay in L2, whichever SMs use it: half, as both partitions may hold the same data.

        This is a model. Of data between half of L2 and all of it in size, L2 serves a part.
        """
        return self.l2_bytes // 2

    @property
    def sm(self) -> int:
        """The compute capability, as in sm_90."""
        return int(self.architecture.removeprefix("sm_"))

    @property
    def sram_elements(self) -> int:
        """M of flash_v1: fp32 numbers in the shared memory of one block of threads; CUDA keeps 1 KiB of each SM."""
        return (self.sram_bytes - KIB) // 4

    def peak_flops(self, dtype: torch.dtype, tf32: bool = False) -> float:
        """FLOP/s of matrix products in a dtype of 16 bits, in exact fp32, or in TF32, which has half of 16 bits."""
        if dtype.itemsize <= 2:
            return self.half_flops
        return self.half_flops / 2 if tf32 else self.fp32_flops


_A100 = dict(
    architecture="sm_80", num_sms=108, sram_bytes=164 * KIB, l2_bytes=40 * MIB, half_flops=312e12, fp32_flops=19.5e12
)
_HOPPER = dict(architecture="sm_90", num_sms=132, sram_bytes=228 * KIB, half_flops=989e12, fp32_flops=67e12)

DEVICES = {
    "a100": Device("A100 80GB SXM", ("NVIDIA A100-SXM4-80GB",), hbm_bytes=80e9, hbm_bandwidth=2039e9, **_A100),
    "a100_40gb": Device(
        "A100 40GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), hbm_bytes=40e9, hbm_bandwidth=1555e9, **_A100
    ),
    "a100_pcie": Device("A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), hbm_bytes=80e9, hbm_bandwidth=1935e9, **_A100),
    "h100": Device(
        "H100 SXM", ("NVIDIA H100 80GB HBM3",), hbm_bytes=80e9, hbm_bandwidth=3.35e12, l2_bytes=50 * MIB, **_HOPPER
    ),
    "h200": Device("H200", ("NVIDIA H200",), hbm_bytes=141e9, hbm_bandwidth=4.8e12, l2_bytes=60 * MIB, **_HOPPER),
}


def key_of(device_name: str) -> str | None:
    """The key of the device that PyTorch calls by this name, or None: a name is known exactly or not at all."""
    return next((key for key, device in DEVICES.items() if device_name in device.names), None)
