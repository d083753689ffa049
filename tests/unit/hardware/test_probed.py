"""The cached probe: used while it holds, passed over with a word when it does not, and what stands in without it."""

import dataclasses
import logging
from datetime import date
from pathlib import Path

import pytest

from outsize.hardware.catalog import CATALOG
from outsize.hardware.machine import Machine
from outsize.hardware.probed import (
    Identity,
    describe,
    find_probe,
    keep_probe,
    load_calibration,
    probe_path,
    save_calibration,
)

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


def describe_card(identity: Identity = CARD, gib: int = 24):  # type: ignore[no-untyped-def]
    return describe(identity, gpu_bytes=gib * GiB, host_bytes=64 * GiB)


def test_a_probe_is_found_again_and_describes_the_machine(folder: Path) -> None:
    assert find_probe(CARD) is None
    path = keep_probe(PROBED, CARD)
    assert path == folder / "machines" / "nvidia-geforce-rtx-4090-16-cores.yaml" and list(path.parent.iterdir()) == [
        path
    ]
    assert find_probe(CARD) == PROBED.spec
    spec = describe_card(gib=23)
    assert spec == dataclasses.replace(PROBED.spec, gpu_bytes=23 * GiB, host_bytes=64 * GiB), (
        "the rates of the probe, the sizes of now"
    )
    assert spec.provenance == "probed on 2026-11-16"


@pytest.mark.parametrize("change", [{"driver": "580.1"}, {"torch": "2.12.0"}])
def test_a_stale_probe_is_passed_over_with_a_warning(change: dict, caplog: pytest.LogCaptureFixture) -> None:
    keep_probe(PROBED, CARD)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert find_probe(dataclasses.replace(CARD, **change)) is None
    (name, now), then = next(iter(change.items())), getattr(CARD, next(iter(change)))
    assert f"{name} was {then!r} and is {now!r}" in caplog.text and "outsize probe" in caplog.text


def test_another_number_of_cores_is_another_machine(caplog: pytest.LogCaptureFixture) -> None:
    keep_probe(PROBED, CARD)
    assert find_probe(dataclasses.replace(CARD, cores=8)) is None and not caplog.text


@pytest.mark.parametrize("text", ["", "name: [", "name: x\n", "\x00", "identity: 3\n"])
def test_a_broken_probe_is_passed_over_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = keep_probe(PROBED, CARD)
    assert path is not None
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert describe_card().h2d_bytes_per_second == CATALOG["rtx4090"].h2d_bytes_per_second
    assert str(path) in caplog.text and "outsize probe" in caplog.text


@pytest.mark.parametrize("identity", ["", "measured: {}\n", "measured: {identity: me}\n"])
def test_a_machine_file_without_an_identity_is_no_probe(identity: str, caplog: pytest.LogCaptureFixture) -> None:
    path = keep_probe(PROBED, CARD)
    assert path is not None
    path.write_text(path.read_text().partition("measured:")[0] + identity)
    with caplog.at_level(logging.WARNING, "outsize"):
        assert find_probe(CARD) is None
    assert "stale" in caplog.text


def test_without_a_cache_nothing_is_kept_nor_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    assert probe_path(CARD) is None and keep_probe(PROBED, CARD) is None and find_probe(CARD) is None


def test_a_cache_that_cannot_be_written_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "outsize"):
        assert keep_probe(PROBED, CARD) is None
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
def test_a_card_without_a_probe_has_the_catalogs_rates_and_says_how_to_get_its_own(
    gpu: str, gib: int, name: str
) -> None:
    spec = describe_card(dataclasses.replace(CARD, gpu=gpu), gib)
    assert spec == dataclasses.replace(
        CATALOG[name], name=gpu, gpu_bytes=gib * GiB, host_bytes=64 * GiB, provenance=spec.provenance
    )
    assert CATALOG[name].provenance in spec.provenance and "outsize probe" in spec.provenance


def test_an_unknown_card_is_assumed_to_be_a_middling_one() -> None:
    spec = describe_card(dataclasses.replace(CARD, gpu="Quadro T1000"), 4)
    assert (
        spec.flops == CATALOG["rtx3090"].flops
        and "assumed as of rtx3090" in spec.provenance
        and "outsize probe" in spec.provenance
    )


# What training teaches.


def learn(**rates: float) -> None:
    """As the run of a process that starts now would."""
    save_calibration(rates, CARD, describe_card())


def test_what_training_saw_goes_before_the_probe_half_way_each_time(folder: Path) -> None:
    keep_probe(PROBED, CARD)
    assert load_calibration(CARD, SPEC) is None
    for expected in (16e9, 13.5e9, 12.25e9):
        learn(h2d_bytes_per_second=11e9)
        assert describe_card().h2d_bytes_per_second == expected
    learn(host_adam_params_per_second=2 * SPEC.host_adam_params_per_second)
    spec, today = describe_card(), date.today().isoformat()
    assert spec == dataclasses.replace(
        SPEC,
        gpu_bytes=24 * GiB,
        host_bytes=64 * GiB,
        h2d_bytes_per_second=12.25e9,
        host_adam_params_per_second=1.5 * SPEC.host_adam_params_per_second,
        provenance=f"probed on 2026-11-16, lanes as seen in training on {today}",
    )
    assert len(list((folder / "machines").iterdir())) == 2, "nothing is left of writing"
    assert find_probe(CARD) == SPEC, "the probe stays what it was"


def test_a_process_that_learns_twice_goes_on_from_what_it_learnt() -> None:
    spec = describe_card()
    for _ in range(2):
        save_calibration({"h2d_bytes_per_second": spec.h2d_bytes_per_second / 2}, CARD, spec)
    assert describe_card().h2d_bytes_per_second == pytest.approx(0.625 * spec.h2d_bytes_per_second, rel=1e-3)


def test_small_steps_lead_nowhere_and_what_a_crowded_machine_taught_is_unlearnt() -> None:
    rate = describe_card().h2d_bytes_per_second
    for seen in (0.3, 0.1, 0.1):
        learn(h2d_bytes_per_second=seen * rate)
    assert describe_card().h2d_bytes_per_second == pytest.approx(0.65 * rate)
    for _ in range(5):
        learn(h2d_bytes_per_second=rate)
    assert describe_card().h2d_bytes_per_second == pytest.approx(rate, rel=0.04)


def test_without_a_probe_the_catalogs_rates_are_learnt_over() -> None:
    rate = CATALOG["rtx4090"].d2h_bytes_per_second
    learn(d2h_bytes_per_second=rate / 2)
    assert describe_card().d2h_bytes_per_second == 0.75 * rate
    assert (
        "outsize probe" in describe_card().provenance
        and ", lanes as seen in training on " in describe_card().provenance
    )


@pytest.mark.parametrize("factor", [0.2, 4.5, 0.0, float("inf"), float("nan")])
def test_what_is_too_far_off_is_a_warning_and_not_learnt(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    before = describe_card()
    with caplog.at_level(logging.WARNING, "outsize"):
        learn(h2d_bytes_per_second=factor * before.h2d_bytes_per_second)
    assert describe_card() == before and "h2d_bytes_per_second" in caplog.text and "outsize probe" in caplog.text


def test_what_is_close_changes_nothing(folder: Path) -> None:
    learn(
        **{
            name: 1.02 * getattr(describe_card(), name)
            for name in ("h2d_bytes_per_second", "host_adam_params_per_second")
        }
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    "change", [{"driver": "580.1"}, {"torch": "2.12.0"}, {"cores": 8}, {"gpu": "NVIDIA GeForce RTX 4090 D"}]
)
def test_what_was_learnt_holds_for_one_machine_as_it_is(change: dict) -> None:
    other = dataclasses.replace(CARD, **change)
    before = describe_card(other)
    learn(h2d_bytes_per_second=11e9)
    assert describe_card(other) == before
    save_calibration({"h2d_bytes_per_second": before.h2d_bytes_per_second / 2}, other, before)
    assert describe_card(other).h2d_bytes_per_second == 0.75 * before.h2d_bytes_per_second, (
        "it replaces what is stale, and does not go on from it"
    )


def test_a_new_probe_forgets_what_was_learnt() -> None:
    keep_probe(PROBED, CARD)
    learn(h2d_bytes_per_second=11e9)
    keep_probe(PROBED, CARD)
    assert load_calibration(CARD, SPEC) is None and describe_card().h2d_bytes_per_second == 21e9


BROKEN = [
    "",
    "[",
    "rates: 3",
    "rates: {flops: 1.0e+12}",
    "rates: {h2d_bytes_per_second: fast}",
    "rates: {h2d_bytes_per_second: 1.0}",
]


@pytest.mark.parametrize("rates", BROKEN)
def test_a_broken_file_is_passed_over_and_learnt_anew(rates: str, folder: Path) -> None:
    learn(h2d_bytes_per_second=11e9)
    (path,) = (folder / "machines").iterdir()
    path.write_text(path.read_text().partition("rates:")[0] + rates)
    assert (
        load_calibration(CARD, SPEC) is None
        and describe_card().h2d_bytes_per_second == CATALOG["rtx4090"].h2d_bytes_per_second
    )
    learn(h2d_bytes_per_second=11e9)
    assert load_calibration(CARD, SPEC) is not None


def test_without_a_cache_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    before = describe_card()
    learn(h2d_bytes_per_second=11e9)
    assert load_calibration(CARD, SPEC) is None and describe_card() == before


def test_a_cache_that_cannot_be_written_does_not_end_a_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "outsize"):
        learn(h2d_bytes_per_second=11e9)
    assert "OUTSIZE_CACHE" in caplog.text
