"""The probe: the host's part for real, and the card's stages with the CPU in its place, which shows that they run and
fill every figure.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from outsize.base.errors import EngineMisuse
from outsize.cli.probe import show
from outsize.device.cpu import CpuDevice
from outsize.device.observer import Observer
from outsize.device.timeline import Span
from outsize.hardware.catalog import CATALOG
from outsize.hardware.machine import Machine, read_machine, write_machine
from outsize.profile.probe import Prober, Sizes, _Load, make_spec, probe

SMALL = Sizes(
    window_seconds=0.01,
    state_numel=2**20,
    copy_bytes=(4096, 2**20),
    gemms=((64, 32, 64),),
    attention_tokens=(64,),
    heads=2,
    layer=(1, 64, 128, 256),
)


def numbers(data: Any) -> Iterator[float]:
    for item in data.values():
        yield from numbers(item) if isinstance(item, dict) else [item] if isinstance(item, (int, float)) else []


def test_without_a_gpu_the_host_is_measured_and_the_card_assumed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    before, draws = psutil.Process().memory_info().rss, torch.get_rng_state()
    machine = probe(CpuDevice())
    assert 1e7 < machine.spec.host_adam_params_per_second < 1e11 and 1e8 < machine.spec.host_bytes_per_second < 1e13
    assert (
        machine.spec.flops == CATALOG["rtx3090"].flops
        and "host probed on" in machine.spec.provenance
        and "assumed" in machine.spec.provenance
    )
    assert (
        0
        < machine.measured["host_memory"]["free_bytes"]
        <= machine.measured["host_memory"]["bytes"]
        == machine.spec.host_bytes
    )
    assert psutil.Process().memory_info().rss - before < 2**29, "what it measured with is given back"
    assert torch.equal(torch.get_rng_state(), draws)
    (tmp_path / "box.yaml").write_text(write_machine(machine))
    assert read_machine(tmp_path / "box.yaml") == machine
    assert "updates" in show(machine) and "matrices" not in show(machine)


def test_every_stage_of_the_card_runs_and_every_figure_is_a_rate() -> None:
    device = CpuDevice()
    prober = Prober(device, SMALL)
    for stage in prober.stages(True):
        stage()
    measured = {"date": "2026-11-16", "seconds": 1.0, "identity": {"cores": 1, "torch": "2"}, **prober.found}
    assert set(measured["lanes_per_second"]) == {
        "h2d",
        "d2h",
        "host",
        "h2d+d2h",
        "h2d+host",
        "d2h+host",
        "h2d+d2h+host",
    }
    assert all(found.keys() == set(key.split("+")) for key, found in measured["lanes_per_second"].items())
    assert set(measured["copy_bytes_per_second"]["h2d"]) == {"4KiB", "1MiB"}
    rates = [key for key in measured if key.endswith(("per_second", "flops"))]
    assert len(rates) == 11 and all(math.isfinite(x) and x > 0 for key in rates for x in numbers({"": measured[key]}))
    spec = make_spec(device, measured)
    assert spec.provenance == "probed on 2026-11-16" and spec.flops == pytest.approx(
        statistics.mean(measured["gemm_flops"].values()), rel=1e-3
    )
    text = show(Machine(spec=spec, measured=measured))
    assert all(word in text for word in ("beside copies out and host updates", "TFLOP/s", "64 tokens", "plans take"))


@pytest.mark.parametrize("stage", ["matrices", "attention", "layer"])
def test_flops_count_as_in_the_trial_run(stage: str) -> None:
    """Else the rate that is found here does not belong to the work that a plan divides by it."""
    prober = Prober(CpuDevice(), SMALL)
    seen = Observer()
    seen.cost_of = lambda flops, moved: 0.0

    def once(load: _Load) -> float:
        already = seen.flops
        with seen:
            load.work()
        assert seen.flops - already == load.amount
        return 1.0

    prober._flops = once  # type: ignore[method-assign]
    getattr(prober, stage)()
    assert seen.flops > 0


def test_a_machine_at_work_is_not_measured() -> None:
    device = CpuDevice()
    device.promised[1] = 1
    with pytest.raises(EngineMisuse, match="detach"):
        probe(device)


def test_only_what_ran_while_every_lane_had_work_counts() -> None:
    """Updates that go on alone after the last copy are faster, and must not hide what the copies did to them."""

    class Shared(CpuDevice):
        """Updates take 2 s beside copies and 1 s alone; copies take 1 s, and there are four."""

        def __init__(self) -> None:
            super().__init__()
            self.free = {"h2d": 0.0, "host": 0.0}

        def submit(self, lane: Any, work: Any, **_: Any) -> None:
            if self._timeline is not None:
                start = self.free[lane]
                self.free[lane] += 1.0 if lane == "h2d" or start >= 4.0 else 2.0
                self._timeline.spans.append(Span(lane, "", start, self.free[lane]))

    prober = Prober(Shared(), SMALL)
    loads = [_Load("h2d", 1, lambda: None), _Load("host", 1, lambda: None)]
    assert prober._seconds(loads, {"h2d": 4, "host": 20}) == {"h2d": 1.0, "host": 2.0}
