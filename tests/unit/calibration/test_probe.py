"""The probe: the host's stages as they are, and the GPU's stages on the CPU, which shows that they run and measure
every rate.
"""

import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outsize.base.errors import EngineMisuse
from outsize.calibration.probe import Prober, Sizes, make_spec, probe
from outsize.cli.probe import show
from outsize.device.cpu import CpuDevice
from outsize.device.observer import Observer
from outsize.hardware.catalog import CATALOG
from outsize.hardware.machine import Machine, read_machine, write_machine

SMALL = Sizes(window_seconds=0.01, state_numel=2**20, copy_bytes=2**20, gemms=((64, 32, 64),), layer=(1, 64, 128, 256))


def numbers(data: Any) -> Iterator[float]:
    for item in data.values():
        yield from numbers(item) if isinstance(item, dict) else [item] if isinstance(item, (int, float)) else []


def test_the_buffers_of_the_measurements_are_freed() -> None:
    """In a fresh process: what other tests hold makes the resident size of this one a matter of chance."""
    code = (
        "import psutil, torch\nfrom outsize.calibration.probe import probe\nfrom outsize.device.cpu import CpuDevice\n"
        "before = psutil.Process().memory_info().rss\nprobe(CpuDevice())\n"
        "print(psutil.Process().memory_info().rss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 2**29


def test_without_a_gpu_the_host_is_measured_and_the_card_assumed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    draws = torch.get_rng_state()
    machine = probe(CpuDevice())
    assert 1e7 < machine.spec.host_adam_params_per_second < 1e11 and 1e8 < machine.spec.host_bytes_per_second < 1e13
    assert (
        machine.spec.flops == CATALOG["rtx3090"].flops
        and "host probed on" in machine.spec.provenance
        and "assumed" in machine.spec.provenance
    )
    assert 0 < machine.measured["host_bytes"] == machine.spec.host_bytes
    assert torch.equal(torch.get_rng_state(), draws)
    (tmp_path / "box.yaml").write_text(write_machine(machine))
    assert read_machine(tmp_path / "box.yaml") == machine
    assert "CPU updates" in show(machine) and "matrix products" not in show(machine)


def test_every_stage_of_the_gpu_runs_and_every_figure_is_positive() -> None:
    device = CpuDevice()
    prober = Prober(device, SMALL)
    for stage in prober.stages(with_gpu=True):
        stage()
    measured = {"date": "2026-11-16", "seconds": 1.0, "identity": {"cores": 1, "torch": "2"}, **prober.found}
    assert set(measured["step_per_second"]) == {"h2d", "d2h", "host"}
    figures = [key for key in measured if key.endswith(("_per_second", "_flops", "_seconds"))]
    assert len(figures) == 8 and all(
        math.isfinite(x) and x > 0 for x in numbers({key: measured[key] for key in figures})
    )
    spec = make_spec(device, measured)
    assert spec.provenance == "probed on 2026-11-16" and spec.context_bytes > 0
    assert spec.flops == pytest.approx(statistics.mean(measured["gemm_flops"].values()), rel=1e-3)
    text = show(Machine(spec=spec, measured=measured))
    assert all(words in text for words in ("copies to the GPU", "copies to the host", "TFLOP/s", "64x32x64"))


def test_flops_are_counted_as_in_a_profiling_run() -> None:
    """Otherwise the measured rate does not match the FLOPs that a plan divides by it."""
    load, seen = Prober(CpuDevice(), SMALL)._gemm((64, 32, 64)), Observer()
    seen.cost_of = lambda flops, moved: 0.0
    with seen:
        load.work()
    assert seen.flops == load.amount > 0


def test_a_device_with_an_attached_engine_is_not_measured() -> None:
    device = CpuDevice()
    device.budgets[1] = 1
    with pytest.raises(EngineMisuse, match="detach"):
        probe(device)
