"""Which rates plans use: the catalog's, those of a valid probe, or those of earlier training steps."""

import dataclasses
import logging
from datetime import date
from pathlib import Path

import pytest

from outsize.calibration import rates
from outsize.calibration.rates import (
    TORCH_SLOWDOWN,
    Identity,
    load_probe,
    load_step_rates,
    machine_spec,
    probe_path,
    save_probe,
    save_step_rates,
)
from outsize.hardware.catalog import CATALOG
from outsize.hardware.machine import Machine

GiB = 2**30
CARD = Identity(gpu="NVIDIA GeForce RTX 4090", driver="570.86", torch="2.11.0", cores=16)
SPEC = dataclasses.replace(
    CATALOG["rtx4090"], name=CARD.gpu, h2d_bytes_per_second=21e9, provenance="probed on 2026-11-16"
)
PROBED = Machine(spec=SPEC, measured={"date": "2026-11-16"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spec_now(identity: Identity = CARD, gib: int = 24):  # type: ignore[no-untyped-def]
    return machine_spec(identity, gpu_bytes=gib * GiB, host_bytes=64 * GiB)


def test_a_saved_probe_gives_the_rates(folder: Path) -> None:
    assert load_probe(CARD) is None
    path = save_probe(PROBED, CARD)
    assert path == folder / "machines" / "nvidia-geforce-rtx-4090-16-cores.yaml" and list(path.parent.iterdir()) == [
        path
    ]
    assert load_probe(CARD) == PROBED.spec
    spec = spec_now(gib=23)
    assert spec == dataclasses.replace(PROBED.spec, gpu_bytes=23 * GiB, host_bytes=64 * GiB), (
        "the probe's rates, the given sizes"
    )
    assert spec.provenance == "probed on 2026-11-16"


@pytest.mark.parametrize("change", [{"driver": "580.1"}, {"torch": "2.12.0"}])
def test_a_stale_probe_is_ignored_with_a_warning(change: dict, caplog: pytest.LogCaptureFixture) -> None:
    save_probe(PROBED, CARD)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert load_probe(dataclasses.replace(CARD, **change)) is None
    (name, now), then = next(iter(change.items())), getattr(CARD, next(iter(change)))
    assert f"{name} was {then!r} and is {now!r}" in caplog.text and "outsize probe" in caplog.text


def test_another_number_of_cores_is_another_machine(caplog: pytest.LogCaptureFixture) -> None:
    save_probe(PROBED, CARD)
    assert load_probe(dataclasses.replace(CARD, cores=8)) is None and not caplog.text


@pytest.mark.parametrize("text", ["", "name: [", "name: x\n", "\x00", "identity: 3\n"])
def test_a_broken_probe_is_ignored_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_probe(PROBED, CARD)
    assert path is not None
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert spec_now().h2d_bytes_per_second == CATALOG["rtx4090"].h2d_bytes_per_second
    assert str(path) in caplog.text and "outsize probe" in caplog.text


@pytest.mark.parametrize("identity", ["", "measured: {}\n", "measured: {identity: me}\n"])
def test_a_machine_file_without_an_identity_is_no_probe(identity: str, caplog: pytest.LogCaptureFixture) -> None:
    path = save_probe(PROBED, CARD)
    assert path is not None
    path.write_text(path.read_text().partition("measured:")[0] + identity)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert load_probe(CARD) is None
    assert "stale" in caplog.text


def test_without_a_cache_no_probe_is_saved_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    assert probe_path(CARD) is None and save_probe(PROBED, CARD) is None and load_probe(CARD) is None


def test_a_cache_that_cannot_be_written_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "outsize"):
        assert save_probe(PROBED, CARD) is None
    assert "OUTSIZE_CACHE" in caplog.text


@pytest.mark.parametrize(
    ("gpu", "gib", "name"),
    [
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA H200", 139, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39, "a100-40gb"),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
    ],
)
def test_a_gpu_without_a_probe_has_the_catalogs_rates(gpu: str, gib: int, name: str) -> None:
    spec = spec_now(dataclasses.replace(CARD, gpu=gpu), gib)
    assert spec == dataclasses.replace(
        CATALOG[name], name=gpu, gpu_bytes=gib * GiB, host_bytes=64 * GiB, provenance=spec.provenance
    )
    assert CATALOG[name].provenance in spec.provenance and "outsize probe" in spec.provenance


def test_an_unknown_gpu_has_the_rates_of_an_rtx3090() -> None:
    spec = spec_now(dataclasses.replace(CARD, gpu="Quadro T1000"), 4)
    assert (
        spec.flops == CATALOG["rtx3090"].flops
        and "assumed equal to rtx3090" in spec.provenance
        and "outsize probe" in spec.provenance
    )


# Rates of earlier training steps.


def train(**rates: float) -> None:
    """Save rates as a run of a new process does."""
    save_step_rates(rates, CARD, spec_now())


def test_training_steps_override_the_probe_half_way_each_time(folder: Path) -> None:
    save_probe(PROBED, CARD)
    assert load_step_rates(CARD, SPEC) is None
    for expected in (16e9, 13.5e9, 12.25e9):
        train(h2d_bytes_per_second=11e9)
        assert spec_now().h2d_bytes_per_second == expected
    train(host_adam_params_per_second=2 * SPEC.host_adam_params_per_second)
    spec, today = spec_now(), date.today().isoformat()
    assert spec == dataclasses.replace(
        SPEC,
        gpu_bytes=24 * GiB,
        host_bytes=64 * GiB,
        h2d_bytes_per_second=12.25e9,
        host_adam_params_per_second=1.5 * SPEC.host_adam_params_per_second,
        provenance=f"probed on 2026-11-16; copies and CPU updates measured in training on {today}",
    )
    assert len(list((folder / "machines").iterdir())) == 2, "no temporary file is left"
    assert load_probe(CARD) == SPEC, "the probe is unchanged"


def test_a_process_that_saves_twice_starts_from_what_it_saved() -> None:
    spec = spec_now()
    for _ in range(2):
        save_step_rates({"h2d_bytes_per_second": spec.h2d_bytes_per_second / 2}, CARD, spec)
    assert spec_now().h2d_bytes_per_second == pytest.approx(0.625 * spec.h2d_bytes_per_second, rel=1e-3)


def test_rates_cannot_drift_and_a_slow_run_is_corrected_by_later_ones() -> None:
    rate = spec_now().h2d_bytes_per_second
    for seen in (0.3, 0.1, 0.1):
        train(h2d_bytes_per_second=seen * rate)
    assert spec_now().h2d_bytes_per_second == pytest.approx(0.65 * rate)
    for _ in range(5):
        train(h2d_bytes_per_second=rate)
    assert spec_now().h2d_bytes_per_second == pytest.approx(rate, rel=0.04)


def test_training_steps_override_the_catalog() -> None:
    rate = CATALOG["rtx4090"].d2h_bytes_per_second
    train(d2h_bytes_per_second=rate / 2)
    assert spec_now().d2h_bytes_per_second == 0.75 * rate
    assert (
        "outsize probe" in spec_now().provenance
        and "; copies and CPU updates measured in training on " in spec_now().provenance
    )


@pytest.mark.parametrize("factor", [0.2, 4.5, 0.0, float("inf"), float("nan")])
def test_an_implausible_rate_is_a_warning_and_not_saved(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    before = spec_now()
    with caplog.at_level(logging.WARNING, "outsize"):
        train(h2d_bytes_per_second=factor * before.h2d_bytes_per_second)
    assert spec_now() == before and "h2d_bytes_per_second" in caplog.text and "outsize probe" in caplog.text


def test_a_rate_within_the_tolerance_changes_nothing(folder: Path) -> None:
    train(
        **{name: 1.02 * getattr(spec_now(), name) for name in ("h2d_bytes_per_second", "host_adam_params_per_second")}
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    "change", [{"driver": "580.1"}, {"torch": "2.12.0"}, {"cores": 8}, {"gpu": "NVIDIA GeForce RTX 4090 D"}]
)
def test_rates_of_training_hold_for_one_identity(change: dict) -> None:
    other = dataclasses.replace(CARD, **change)
    before = spec_now(other)
    train(h2d_bytes_per_second=11e9)
    assert spec_now(other) == before
    save_step_rates({"h2d_bytes_per_second": before.h2d_bytes_per_second / 2}, other, before)
    assert spec_now(other).h2d_bytes_per_second == 0.75 * before.h2d_bytes_per_second, (
        "stale rates are replaced, not moved"
    )


def test_a_new_probe_deletes_the_rates_of_training() -> None:
    save_probe(PROBED, CARD)
    train(h2d_bytes_per_second=11e9)
    save_probe(PROBED, CARD)
    assert load_step_rates(CARD, SPEC) is None and spec_now().h2d_bytes_per_second == 21e9


BROKEN = [
    "",
    "[",
    "rates: 3",
    "rates: {flops: 1.0e+12}",
    "rates: {h2d_bytes_per_second: fast}",
    "rates: {h2d_bytes_per_second: 1.0}",
]


@pytest.mark.parametrize("rates", BROKEN)
def test_a_broken_file_is_ignored_and_replaced(rates: str, folder: Path) -> None:
    train(h2d_bytes_per_second=11e9)
    (path,) = (folder / "machines").iterdir()
    path.write_text(path.read_text().partition("rates:")[0] + rates)
    assert (
        load_step_rates(CARD, SPEC) is None
        and spec_now().h2d_bytes_per_second == CATALOG["rtx4090"].h2d_bytes_per_second
    )
    train(h2d_bytes_per_second=11e9)
    assert load_step_rates(CARD, SPEC) is not None


def test_without_a_cache_no_rates_of_training_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    before = spec_now()
    train(h2d_bytes_per_second=11e9)
    assert load_step_rates(CARD, SPEC) is None and spec_now() == before


def test_a_cache_that_cannot_be_written_does_not_end_a_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "outsize"):
        train(h2d_bytes_per_second=11e9)
    assert "OUTSIZE_CACHE" in caplog.text


def test_without_a_compiler_cpu_updates_are_planned_slower_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTSIZE_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with_compiler = spec_now()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rates, "UPDATES", tmp_path / "native.c")  # no library that was compiled with the package
    without = spec_now()
    assert without.host_adam_params_per_second * TORCH_SLOWDOWN == with_compiler.host_adam_params_per_second
    assert "there is no C compiler" in without.provenance and "compiler" not in with_compiler.provenance
    save_probe(PROBED, CARD)  # measured as it is
    assert spec_now().host_adam_params_per_second == SPEC.host_adam_params_per_second
