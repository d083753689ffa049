"""The probe on a real GPU: sane rates, within its time and memory, and the next device describes itself by them."""

import gc
import time
from pathlib import Path

import psutil
import pytest
import torch

from outsize.calibration.probe import probe
from outsize.calibration.rates import save_probe
from outsize.cli.probe import show
from outsize.device.cuda import CudaDevice
from outsize.hardware.machine import read_machine, write_machine

pytestmark = pytest.mark.gpu
GiB = 2**30


def test_the_probe_of_this_machine_is_sane_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    torch.set_num_threads(psutil.cpu_count(logical=False) or 1)  # the tests run with one
    try:
        device = CudaDevice(torch.cuda.current_device())
        assert "outsize probe" in device.spec.provenance
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        began, before, allocated = time.monotonic(), psutil.Process().memory_info().rss, torch.cuda.memory_allocated()
        machine = probe(device)
        seconds = time.monotonic() - began
        print(show(machine), f"\n{seconds:.1f} s\n", write_machine(machine))
        spec, found = machine.spec, machine.measured
        assert seconds < 30
        assert 1e9 < spec.h2d_bytes_per_second < 200e9 and 1e9 < spec.d2h_bytes_per_second < 200e9
        assert 0.05e9 < spec.host_adam_params_per_second < 50e9 and 1e9 < spec.gpu_adam_params_per_second < 1000e9
        assert (
            1e12 < spec.flops < 5e15
            and 50e9 < spec.gpu_bytes_per_second < 20e12
            and 1e9 < spec.host_bytes_per_second < 2e12
        )
        assert 1.0 <= spec.launch_slowdown < 5.0 and 5e-6 < spec.op_launch_seconds < 100e-6
        assert 1e-7 < spec.launch_seconds < 1e-3 and 0 < spec.context_bytes <= 2 * GiB
        assert all(1e12 < rate < 5e15 for rate in found["gemm_flops"].values())
        alone, in_step = found["host_adam_params_per_second"], found["step_per_second"]["host"]
        assert in_step < 1.2 * alone, "updates beside copies are not faster than alone"
        assert torch.cuda.max_memory_allocated() - allocated < 2 * GiB
        gc.collect()
        torch.cuda.empty_cache()
        assert (
            torch.cuda.memory_allocated() - allocated < 128 * 2**20
            and psutil.Process().memory_info().rss - before < 2 * GiB
        )
        path = save_probe(machine, device.identity)
        assert path is not None and read_machine(path).spec == spec
        again = CudaDevice(torch.cuda.current_device()).spec
        assert again.provenance.startswith("probed on") and again.h2d_bytes_per_second == spec.h2d_bytes_per_second
    finally:
        torch.set_num_threads(1)
