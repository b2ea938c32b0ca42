"""The one tolerance rule for attention (see kernels/attention/parity.py) as an assertion."""

from torch import Tensor

from flashtrain.kernels.attention.intervals import Intervals
from flashtrain.kernels.attention.parity import Attend, Inputs, deviations, make_qkv

__all__ = ["assert_as_accurate_as_standard", "make_qkv"]


def assert_as_accurate_as_standard(
    attend: Attend,
    inputs: Inputs,
    intervals: Intervals,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    dout: Tensor | None = None,
    lse_gradient: bool = False,
) -> None:
    """Run `attend(q, k, v) -> out | (out, lse or None)` forward and backward and hold each tensor to the rule."""
    measured = deviations(
        attend, inputs, intervals, scale=scale, softcap=softcap, dout=dout, lse_gradient=lse_gradient
    )
    failures = [str(deviation) for deviation in measured.values() if not deviation.passes]
    assert not failures, "\n".join(failures)
