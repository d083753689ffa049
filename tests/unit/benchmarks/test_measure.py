"""What a benchmark counts: the plan's demand by hand, the trace file, and the loop that it compares with."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import measure, plain
from benchmarks.bench_record import Baseline, Bench, Result
from benchmarks.bench_text import show, show_all
from benchmarks.measure import complete, demand_of, run_bench
from benchmarks.shapes import random_batches, random_shape
from outsize.base.errors import ConfigError
from outsize.base.records import dumps, fingerprint, loads
from outsize.hardware.host import peak_rss_bytes
from outsize.hardware.lanes import LANES
from outsize.optim.adamw import AdamW
from outsize.runtime.engine import Engine
from outsize.schedule.check import save
from outsize.schedule.pins import Pins
from outsize.setup.prepare import prepare

ASKED = dict(model="tiny", device="sim:8MiB", micro_batch=2, seq=16, steps=2, host_memory="1GiB")


def tiny_engine(*, accumulate: int = 1, clip: float | None = None) -> Engine:
    model, weights = random_shape("tiny", seq=16)
    how = AdamW(lr=1e-5, update="after_step" if clip or accumulate > 1 else "in_backward", max_grad_norm=clip)
    pins = Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0, n_checkpoint=6)
    batch = random_batches(model, complete(**ASKED))[0]
    return prepare(
        model,
        batch,
        optimizer=how,
        device="sim:64MiB",
        host_memory="1GiB",
        accumulate=accumulate,
        pins=pins,
        weights=weights,
    )


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 1.0), (3, None)])
def test_the_demand_of_a_plan_that_streams_everything(accumulate: int, clip: float | None) -> None:
    engine = tiny_engine(accumulate=accumulate, clip=clip)
    try:
        place = engine.runtime.place
        weights = sum(chunk.nbytes for chunk in engine.layout.chunks)
        params = sum(chunk.numel for chunk in engine.layout.chunks)
        found = demand_of(place, engine.device.spec)
    finally:
        engine.close()
    assert found.host_params == params
    assert (found.gpu_params > 0) == (accumulate > 1), "gradients of later micro-batches are added on the GPU"
    assert found.d2h_bytes == accumulate * weights, "every gradient leaves, once for each micro-batch"
    # Weights go in for forward and again for backward, except what is still in its slot; partial sums come back for
    # every micro-batch but the first.
    assert weights < found.h2d_bytes - (accumulate - 1) * weights <= 2 * accumulate * weights
    forward, backward = (
        sum(work.forward_seconds for work in place.work),
        sum(work.backward_seconds for work in place.work),
    )
    assert found.compute_seconds == pytest.approx(accumulate * (forward + backward))
    assert found.hiding_seconds == pytest.approx(forward if clip is not None or accumulate > 1 else forward + backward)


def test_a_run_on_sim_is_as_planned_and_comes_back_from_json(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_bench(complete(**ASKED), say=said.append, page=tmp_path / "run.html", trace=tmp_path / "lanes.json")
    assert "model.layers" in said[0]
    assert (
        "Predicted and measured" in (tmp_path / "run.html").read_text()
        and "U1" in (tmp_path / "lanes.json").read_text()
    )
    assert result.speed.median_step_seconds == pytest.approx(result.plan.step_seconds, rel=0.05)
    assert result.memory.gpu_peak_bytes == result.plan.gpu_bytes <= result.plan.gpu_budget_bytes == 8 * 2**20
    assert result.limit_ratio > 0.999, "nothing is faster than its limit"
    assert set(result.lanes.shares) == set(LANES) and result.lanes.shares[result.lanes.bottleneck] <= 1.001
    assert result.losses_finite and result.within_budget and result.is_simulated
    assert loads(Result, dumps(result)) == result
    text = show(result)
    assert "× the limit" in text and "simulated" in text and result.plan.fingerprint in text
    assert len(show_all([result, result]).splitlines()) == 4


def test_a_plan_from_a_file_is_run_as_it_is(tmp_path: Path) -> None:
    engine = tiny_engine()
    try:
        save(engine.plan, tmp_path / "plan.json")
        expected = fingerprint(engine.plan)
    finally:
        engine.close()
    result = run_bench(
        complete(**{**ASKED, "device": "sim:64MiB", "plan": tmp_path / "plan.json"}), say=lambda text: None
    )
    assert result.plan.fingerprint == expected and result.memory.gpu_peak_bytes == result.plan.gpu_bytes


def test_a_number_that_is_wrong_is_reported() -> None:
    result = run_bench(complete(**ASKED), say=lambda text: None)
    text = show(dataclasses.replace(result, losses_finite=False, within_budget=False))
    assert "WRONG     a loss is not finite" in text and "budget was exceeded" in text


@pytest.mark.parametrize(
    ("given", "update"),
    [
        ({}, "in_backward"),
        ({"clip": 1.0}, "after_step"),
        ({"accumulate": 2}, "after_step"),
        ({"accumulate": 2, "update": "in_backward"}, "in_backward"),
    ],
)
def test_updates_come_in_backward_where_nothing_needs_all_gradients(given: dict, update: str) -> None:
    assert complete(**{**ASKED, **given}).update == update


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip": 1.0, "update": "in_backward"}, "--clip needs all gradients"),
        ({"device": None, "model": "llama-3b"}, "needs a GPU, and there is none"),
        ({"steps": 0}, "--steps"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_built(
    given: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = measure.choose_device("cpu")
    monkeypatch.setattr(measure, "choose_device", lambda name=None: cpu)
    with pytest.raises(ConfigError, match=words):
        complete(**{**ASKED, **given})


@pytest.mark.parametrize("kind", plain.KINDS)
def test_the_plain_loop_trains(kind: str, tmp_path: Path) -> None:
    asked: Bench = dataclasses.replace(complete(**ASKED), accumulate=2, clip=1.0)
    plain.main(kind, dumps(asked), str(tmp_path / "baseline.json"))
    baseline = loads(Baseline, (tmp_path / "baseline.json").read_text())
    assert baseline.problem == "" and baseline.speed is not None and baseline.speed.tokens_per_second > 0


def test_the_plain_loop_has_our_weights() -> None:
    model = plain.resident_model(complete(**ASKED), torch.device("cpu"))
    engine = tiny_engine()
    try:
        with engine.gathered() as values:
            assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())
    finally:
        engine.close()


def test_a_rival_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.sys, "executable", "/bin/false")
    assert plain.run_baseline("plain", complete(**ASKED)).problem == "exit code 1: it said nothing"


def test_peak_memory_is_of_this_process(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t   2048 kB\nVmRSS:\t 1024 kB\n")
    assert peak_rss_bytes(status) == 2048 * 1024
    assert peak_rss_bytes() > 2**20
