"""Scalars that every update kernel shares, computed in Python doubles and rounded to fp32 once.

Separate from the kernels, and without torch, because the torch, C and Triton kernels and the reference must all
multiply by the same bits: a factor computed on the device in fp32 would differ between devices.
"""

import ctypes
import math


def round_fp32(value: float) -> float:
    """The fp32 value nearest to `value` (ties to even), as a Python float; infinite beyond fp32's range."""
    return ctypes.c_float(value).value


def clip_factor(total_norm: float, max_grad_norm: float | None) -> float:
    """The factor of every gradient, rounded to fp32. `total_norm` is finite: NaN and infinity are handled before."""
    if max_grad_norm is None:
        return 1.0
    assert math.isfinite(total_norm), f"clip_factor of a non-finite norm {total_norm}"
    return round_fp32(min(1.0, max_grad_norm / (total_norm + 1e-6)))
