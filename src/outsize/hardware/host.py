"""Cores and memory that this process may use, within the limits of its container."""

import os
import sys
from functools import cache
from pathlib import Path

import psutil


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def quota_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole cores of the container's CPU quota (cgroup v2, then v1); a large number without a quota."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()
            if quota != "max" and int(quota) > 0:
                return max(1, int(quota) // int(period))
        except (OSError, ValueError):
            continue
    return 2**16


def free_host_bytes() -> int:
    """Host memory that can be allocated now, within the machine's and the container's limits."""
    available = int(psutil.virtual_memory().available)
    limit = container_limit()
    return available if limit is None else min(available, max(0, limit - psutil.Process().memory_info().rss))


def container_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that this process's control group (version 2 or 1) or one above it may use; None without a limit."""
    limits = []
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines or ["0::/"]:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        # In a container the path may be the host's and not visible: then the root holds our limit.
        here = base / path.strip("/")
        for folder in (here, *here.parents):
            file = folder / name
            if file.exists() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
            if folder == base:
                break
    return min((limit for limit in limits if limit < 2**60), default=None)


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Peak host memory of this process. Without /proc it is getrusage's, which starts at the parent's."""
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
