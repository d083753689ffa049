"""Memory of other processes on a GPU, from a small library with NVML's functions."""

import os
import subprocess
from pathlib import Path

import pytest

from outsize.device.nvml import bytes_of_other_processes

SOURCE = """
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)uuid;
    return uuid[0] != 'G' || uuid[4] != '1';
}
static int list(unsigned *count, process *found, const process *all, unsigned number) {
    unsigned room = *count;
    *count = number;
    if (room < number) return 7;
    for (unsigned i = 0; i < number; i++) found[i] = all[i];
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *found) {
    static process all[40];
    for (int i = 0; i < 40; i++) { all[i].pid = 100000000 + i; all[i].used = 1000; }
    all[7].pid = OWN; all[7].used = 500000;
    all[8].used = LARGE;
    return list(count, found, all, 40);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process *found) {
    process all[2] = {{100000000, 3000, 0, 0}, {5, 70000, 0, 0}};
    return list(count, found, all, 2);
}
"""


def library(folder: Path, *, own: int, large: str = "1000") -> str:
    (folder / "nvml.c").write_text(SOURCE.replace("OWN", str(own)).replace("LARGE", large))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "libnvml-test.so", folder / "nvml.c"], check=True, timeout=60
    )
    return str(folder / "libnvml-test.so")


def test_other_processes_are_counted_once(tmp_path: Path) -> None:
    path = library(tmp_path, own=os.getpid())
    assert bytes_of_other_processes("1-2", path) == 38 * 1000 + 3000 + 70000
    assert bytes_of_other_processes("9-2", path) == 0  # another GPU


@pytest.mark.parametrize("change", [{"own": 6}, {"own": os.getpid(), "large": "18446744073709551615ull"}])
def test_unknown_counts_as_none(tmp_path: Path, change: dict) -> None:
    assert bytes_of_other_processes("1-2", library(tmp_path, **{"own": os.getpid(), **change})) == 0


def test_without_the_library_nothing_is_known(tmp_path: Path) -> None:
    assert bytes_of_other_processes("1-2", str(tmp_path / "none.so")) == 0
