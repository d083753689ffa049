"""GPU memory that other processes use, from NVIDIA's management library (NVML). CUDA itself tells only what is free."""

import ctypes
import os
from collections.abc import Callable
from functools import cache

_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7
_UNKNOWN = 2**64 - 1
"""For a process whose memory the driver does not know."""
_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3")


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def bytes_of_other_processes(uuid: str, library: str = _LIBRARY) -> int:
    """0 if it cannot be known: without NVML, or if it does not list this process (in some containers)."""
    used = _used_by_process(uuid, library)
    return sum(used.values()) - used[os.getpid()] if os.getpid() in used else 0


def _used_by_process(uuid: str, library: str) -> dict[int, int]:
    nvml, device = _nvml(library), ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)):
        return {}
    used: dict[int, int] = {}
    for name in _LISTS:
        for process in _listed(getattr(nvml, name, None), device):
            # A process of both kinds is listed in both lists.
            used[process.pid] = max(used.get(process.pid, 0), process.used_bytes)
    return {} if _UNKNOWN in used.values() else used


def _listed(function: Callable[..., int] | None, device: ctypes.c_void_p) -> list[_Process]:
    count, result = ctypes.c_uint(16), _INSUFFICIENT_SIZE
    while function is not None and result == _INSUFFICIENT_SIZE:
        found = (_Process * count.value)()
        result = function(device, ctypes.byref(count), found)
        if result == 0:
            return list(found[: count.value])
        count.value *= 2  # processes may start meanwhile
    return []


@cache
def _nvml(library: str) -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL(library)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None
