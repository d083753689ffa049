"""How much the host really gives this process: its cores, and the memory that is free within the limits of its
container.
"""

import os
import sys
from pathlib import Path

import psutil


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes() -> int:
    """What can be allocated now without meeting the machine's end or the container's."""
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
        # In a container the path may be the host's, of which only the end is visible: then the root is ours.
        here = base / path.strip("/")
        for folder in (here, *here.parents):
            file = folder / name
            if file.exists() and (text := file.read_text().strip()).isdigit():
                limits.append(int(text))
            if folder == base:
                break
    return min((limit for limit in limits if limit < 2**60), default=None)


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The most host memory this process has had. Where there is no /proc it is getrusage's, which begins with the
    parent's.
    """
    if status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        if line is not None:
            return int(line.split()[1]) * 1024
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
