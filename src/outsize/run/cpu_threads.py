"""The number of threads that a run on `cpu` or `sim` computes with.

Small operators on several threads wait for the slowest thread. If other programs use the CPU, training can be 20 times
slower than on one thread. Bits depend on the number of threads, so it is chosen before the first computation, and
checkpoints store it.
"""

import os
import time
from collections.abc import Iterable

import psutil
import torch
from torch import nn

from outsize.base.log import log
from outsize.device.device import Device

_MIN_GAIN = 1.5
"""One thread is chosen if it is faster by this factor."""
_MAX_FLOPS = 3e9
"""Of a forward and backward of one matrix. Larger ones use several threads well."""
_ROUNDS = 12
_MAX_SECONDS = 1.0
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads(model: nn.Module, num_tokens: int, device: Device, stored: int | None) -> str:
    """Set the number of threads, unless the user has. Returns a line for the user if it changed.

    `num_tokens`: of a micro-batch. `stored`: the number in the checkpoint that the run resumes from.
    """
    if device.is_gpu:
        return ""
    now = torch.get_num_threads()
    if _is_set_by_user(now):
        if stored not in (None, now):
            log.warning(
                "the checkpoint's steps ran on %d CPU threads, this run has %d: its bits differ from those of an "
                "uninterrupted run. OMP_NUM_THREADS=%d keeps them.",
                stored, now, stored,
            )  # fmt: skip
        return ""
    if stored is not None:
        torch.set_num_threads(stored)
        return f"CPU threads: {stored}, as in the checkpoint" if stored != now else ""
    gain = _gain_of_one(_layer_matrix(model.parameters()), num_tokens, now) if now > 1 else 0.0
    if gain < _MIN_GAIN:
        return ""
    torch.set_num_threads(1)
    return (
        f"CPU threads: 1, because a layer's operators ran {gain:.1f} times as fast as on {now} here. Set "
        "OMP_NUM_THREADS for another number."
    )


def _is_set_by_user(now: int) -> bool:
    defaults = {psutil.cpu_count(), psutil.cpu_count(logical=False), len(os.sched_getaffinity(0))}
    return any(name in os.environ for name in _VARIABLES) or now not in defaults


def _layer_matrix(params: Iterable[nn.Parameter]) -> nn.Parameter | None:
    """A matrix of typical size."""
    matrices = sorted((param for param in params if param.dim() == 2), key=nn.Parameter.numel)
    return matrices[len(matrices) // 2] if matrices else None


def _gain_of_one(matrix: nn.Parameter | None, num_tokens: int, many: int) -> float:
    """Seconds of small operators on `many` threads, relative to one thread. 0 if the operators are large."""
    if matrix is None or 6 * num_tokens * matrix.numel() > _MAX_FLOPS:
        return 0.0
    weight = torch.full(matrix.shape, 0.01, dtype=matrix.dtype, requires_grad=True)
    inputs = torch.full((num_tokens, matrix.shape[1]), 0.01, dtype=matrix.dtype)
    seconds, started = {1: 0.0, many: 0.0}, time.perf_counter()
    try:
        for round in range(_ROUNDS):
            for threads in seconds:
                torch.set_num_threads(threads)
                before = time.perf_counter()
                hidden = nn.functional.silu(inputs @ weight.T)
                (hidden * hidden).softmax(-1).mean().backward()
                seconds[threads] += time.perf_counter() - before if round else 0.0  # the first warms up
            if round and time.perf_counter() - started > _MAX_SECONDS:
                break
    finally:
        torch.set_num_threads(many)
    return seconds[many] / seconds[1]
