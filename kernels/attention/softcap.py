"""Soft capping of scores, softcap tanh(s / softcap), and the units in which kernels hold a score.

A kernel holds q k^T; its scaled score is scale times that. With a cap it holds tanh(scale q k^T / softcap)
instead, and its capped score is softcap times that.
Source: Gemma 2 (arXiv:2408.00118), section 2.
"""

import math

import triton
import triton.language as tl

from .online_softmax import LOG2_E


def score_units(scale: float, softcap: float) -> dict[str, float | None]:
    """Kernel arguments: `cap` turns q k^T into tanh's argument, None without a cap; `scale_log2e` makes bits of
    what the kernel holds, for base-2 exponentials."""
    if softcap == 0:
        return {"cap": None, "scale_log2e": scale * math.log2(math.e)}
    return {"cap": scale / softcap, "scale_log2e": softcap * math.log2(math.e)}


@triton.jit
def cap_scores(s, cap):
    """q k^T as a kernel holds it, fp32."""
    if cap is not None:
        s = _tanh(s * cap)
    return s


@triton.jit
def cap_gradient(ds, s, cap):
    """The gradient of a capped score, times the derivative of its tanh: one of the scaled score, fp32."""
    if cap is not None:
        ds = ds * (1.0 - s * s)
    return ds


@triton.jit
def _tanh(x):
    """To fp32 rounding: (1 - e) / (1 + e) with e = exp(-2|x|), and its series near 0, where that cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0 + x2 * (62.0 / 2835.0)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))
