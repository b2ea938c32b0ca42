"""The least time that some work can take on a device: its FLOPs at the peak rate, or its bytes at the bandwidth.

Which bytes HBM sees lies between two counts: each matrix once (compulsory), and all that the program asks for. Where
all that is read again fits into L2 together, the first is used. Where it does not, programs of one head that run side
by side are taken to read the same blocks at the same time, so that what is asked for more than once comes from HBM once
for all of them: for flash_v1, with one program a head, and for operators of PyTorch that is all that is asked for.
Source: Williams, Waterman and Patterson 2009 (roofline).
"""

from dataclasses import dataclass

import torch

from flashtrain.performance.devices import Device
from flashtrain.performance.io import Work
from flashtrain.performance.traffic import Transfer, total_bytes

COMPUTE, MEMORY = "compute", "memory"


@dataclass(frozen=True)
class Rates:
    bandwidth: float
    """Bytes per second."""
    flops: float
    """FLOP per second."""
    measured: bool
    """Whether this machine was measured; else they are the data sheet's."""

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on the FLOPs take longer."""
        return self.flops / self.bandwidth

    def bound(self, flops: float, bytes: float) -> str:
        return COMPUTE if flops > bytes * self.ridge else MEMORY

    def seconds(self, flops: float, bytes: float) -> float:
        return max(flops / self.flops, bytes / self.bandwidth)


def nominal(device: Device, dtype: torch.dtype) -> Rates:
    """The data sheet's."""
    return Rates(device.hbm_bandwidth, device.peak_flops(dtype), measured=False)


@dataclass(frozen=True)
class Estimate:
    """The floor of one pass."""

    flops: int
    asked_bytes: int
    compulsory_bytes: int
    reused_bytes: int
    """What is read again by all programs that run at a time."""
    fits_l2: bool
    """Whether that fits into L2."""
    sharers: int
    """Programs side by side that read the same."""
    share_of_sms: float
    """Of the SMs that have a program to run, of which each has its share of the rate."""
    rates: Rates

    @property
    def hbm_bytes(self) -> int:
        once = min(self.compulsory_bytes, self.asked_bytes)
        return once if self.fits_l2 else once + (self.asked_bytes - once) // self.sharers

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM."""
        return self.flops / self.hbm_bytes

    @property
    def bound(self) -> str:
        return self.rates.bound(self.flops / self.share_of_sms, self.hbm_bytes)

    @property
    def seconds(self) -> float:
        return self.rates.seconds(self.flops / self.share_of_sms, self.hbm_bytes)


def estimate(work: Work, compulsory: tuple[Transfer, ...], device: Device, rates: Rates) -> Estimate:
    """The floor of some work whose inputs and outputs are `compulsory`."""
    heads = work.heads if work.programs is None else min(work.heads, -(-device.num_sms // work.programs))
    reused_bytes = heads * work.reused_bytes
    busy = device.num_sms if work.programs is None else min(device.num_sms, work.heads * work.programs)
    return Estimate(
        flops=work.flops,
        asked_bytes=total_bytes(work.transfers),
        compulsory_bytes=total_bytes(compulsory),
        reused_bytes=reused_bytes,
        fits_l2=reused_bytes <= device.l2_bytes,
        sharers=1 if work.programs is None else min(device.num_sms, work.programs),
        share_of_sms=busy / device.num_sms,
        rates=rates,
    )
