"""The least time that some work can take on a device: its FLOPs at the peak rate, or its bytes at the bandwidth.

Which bytes HBM sees lies between each matrix once (compulsory) and all that is asked for, every repeat of it. Where
all matrices of a call together stay in L2 (`Device.l2_kept_bytes`), HBM sees what is compulsory. Where they do not, a
pass finds nothing in L2 that an earlier one left there, and HBM sees the sum over the passes. Of each pass it sees each
of its matrices once, if what the pass reads again and again stays in L2: as much as passes by one program, for each
group of programs at work that read the same. If that does not, the programs of a group are taken to read the same
blocks at the same time, so that what is asked for more than once comes from HBM once for all of them: for flash_v1,
with one program a head, that is all that is asked for. A group is as many programs side by side as see one row under
the mask: all of a head where the mask is full or causal, some neighbours where it is a window.
Source: Williams, Waterman and Patterson 2009 (roofline).
"""

from dataclasses import dataclass

import torch

from flashtrain.performance.devices import Device
from flashtrain.performance.io import Pass, Work
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
class PassEstimate:
    """What HBM sees of one pass that finds nothing in L2 when it begins."""

    name: str
    asked_bytes: int
    once_bytes: int
    """Each of its matrices once, as far as it asks for it."""
    reused_bytes: int
    """What all programs that run at a time read again and again."""
    fits_l2: bool
    """Whether that stays in L2."""
    sharers: int
    """The most programs side by side that read the same."""
    hbm_bytes: int

    @property
    def reads_again(self) -> bool:
        return self.asked_bytes > self.once_bytes


@dataclass(frozen=True)
class Estimate:
    """The floor of a variant's work, forward or backward."""

    flops: int
    asked_bytes: int
    compulsory_bytes: int
    touched_bytes: int
    """All matrices, each once, with those that are made and used up."""
    stays_in_l2: bool
    """Whether all of them stay in L2 from pass to pass."""
    passes: tuple[PassEstimate, ...]
    hbm_bytes: int
    share_of_sms: float
    """Of the SMs that have a program to run, of which each has its share of the rate; over the FLOPs of all passes."""
    rates: Rates

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
    asked_bytes, compulsory_bytes = total_bytes(work.transfers), total_bytes(compulsory)
    touched_bytes = _touched_bytes(work)
    passes = tuple(_estimate_pass(one, work.matrices, device) for one in work.passes)
    stays_in_l2 = touched_bytes <= device.l2_kept_bytes
    from_passes = sum(one.hbm_bytes for one in passes)
    return Estimate(
        flops=work.flops,
        asked_bytes=asked_bytes,
        compulsory_bytes=compulsory_bytes,
        touched_bytes=touched_bytes,
        stays_in_l2=stays_in_l2,
        passes=passes,
        hbm_bytes=min(compulsory_bytes, asked_bytes) if stays_in_l2 else from_passes,
        share_of_sms=work.flops / sum(one.flops / _share_of_sms(one, device) for one in work.passes),
        rates=rates,
    )


def _touched_bytes(work: Work) -> int:
    """Of distinct matrices; one in two dtypes is two."""
    largest: dict[tuple[str, int], int] = {}
    for one in work.transfers:
        key = one.matrix, one.element_bytes
        largest[key] = max(largest.get(key, 0), _once_bytes(one, work.matrices))
    return sum(largest.values())


def _estimate_pass(one: Pass, matrices: dict[str, int], device: Device) -> PassEstimate:
    asked, once = total_bytes(one.transfers), sum(_once_bytes(transfer, matrices) for transfer in one.transfers)
    sharers = min(device.num_sms, one.readers)
    reused = _groups_at_work(one, sharers, device) * one.reused_bytes
    fits = reused <= device.l2_kept_bytes
    hbm = once if fits else once + (asked - once) // sharers
    return PassEstimate(one.name, asked, once, reused, fits, sharers, hbm)


def _once_bytes(transfer: Transfer, matrices: dict[str, int]) -> int:
    return min(transfer.elements, matrices[transfer.matrix]) * transfer.element_bytes


def _groups_at_work(one: Pass, sharers: int, device: Device) -> int:
    """Of programs that read the same, as many as there are, or as fill the device."""
    if one.programs is None:
        return one.heads
    return min(one.heads * -(-one.programs // sharers), -(-device.num_sms // sharers))


def _share_of_sms(one: Pass, device: Device) -> float:
    return 1 if one.programs is None else min(1, one.heads * one.programs / device.num_sms)
