"""A backward that is declared the last one before a step: it means the same under every plan, and what it spoils can be
loaded back.
"""

import itertools
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from cells import Cell
from threaded import ThreadedCpu

from outsize.base.errors import EngineMisuse, NonFiniteGradient, UpdateFailed
from outsize.runtime.engine import Engine
from outsize.runtime.prepared_tensors import PreparedParameter
from outsize.runtime.updates import Updates

PLANS = {"plain": {"weights": "gpu", "optimizer": "gpu"}, "streamed": {"weights": "host", "optimizer": "host"}}
EVERY = pytest.mark.parametrize("plan", PLANS)
KIND = "llama"


def prepare(plan: str, device: Any = "cpu", **fields: Any) -> Engine:
    return cells.prepare(Cell(kind=KIND, dtype="bf16", **PLANS[plan], **fields), device)


def backward(engine: Engine, *, seed: int = 0, factor: float = 1.0) -> None:
    with engine.last_backward():
        (engine.model(**zoo.batch(KIND, seed=seed)).loss * factor).backward()


def step(engine: Engine, **how: Any) -> None:
    backward(engine, **how)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def test_what_is_changed_between_backward_and_step_comes_too_late_under_every_plan() -> None:
    found = []
    for plan in PLANS:
        with cells.closing(prepare(plan)) as engine:
            backward(engine)
            engine.optimizer.param_groups[0]["lr"] = 100.0
            engine.optimizer.step()
            found.append(weights(engine))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@EVERY
def test_clipping_after_it_is_refused_and_reading_the_norm_is_not(plan: str) -> None:
    with cells.closing(prepare(plan)) as engine:
        backward(engine)
        with pytest.raises(EngineMisuse, match="cannot be clipped"):
            engine.clip_grad_norm_(1.0)
        assert float(engine.clip_grad_norm_(float("inf"))) > 0
        engine.optimizer.step()


@EVERY
def test_it_is_followed_by_step_before_anything_else(plan: str) -> None:
    with cells.closing(prepare(plan)) as engine:
        backward(engine)
        for forbidden in (engine.optimizer.zero_grad, engine.detach):
            with pytest.raises(EngineMisuse, match=r"step\(\) is missing"):
                forbidden()
        engine.optimizer.step()


@EVERY
def test_a_step_with_nan_is_reported_before_the_next_and_a_load_makes_up_for_it(plan: str, tmp_path: Path) -> None:
    """The next backward may have been made by then: what it has updated is of the spoilt state and is forgotten with
    it.
    """
    with cells.closing(prepare(plan)) as engine:
        step(engine, seed=0)
        engine.save(tmp_path / "good")
        step(engine, factor=float("nan"))
        backward(engine, seed=1)
        with pytest.raises(NonFiniteGradient, match="from the last checkpoint"):
            engine.optimizer.step()
        engine.load(tmp_path / "good")
        step(engine, seed=1)
        found, steps = weights(engine), set(engine.runtime.updates.steps.values())
    with cells.closing(prepare(plan)) as engine:
        step(engine, seed=0)
        step(engine, seed=1)
        assert steps == set(engine.runtime.updates.steps.values()) == {2}
        assert all(torch.equal(found[name], value) for name, value in weights(engine).items())


@EVERY
def test_reading_after_it_gives_a_warning(plan: str, caplog: pytest.LogCaptureFixture) -> None:
    with cells.closing(prepare(plan)) as engine:
        step(engine, factor=float("nan"))
        engine.model.state_dict()
        assert "gradient is not finite" in caplog.text
        with pytest.raises(UpdateFailed):
            engine.model(**zoo.batch(KIND))


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_a_failed_update_on_another_thread_can_be_made_up_for_by_one_load(
    update: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cells.closing(prepare("streamed", ThreadedCpu(), update=update)) as engine:
        step(engine)
        engine.save(tmp_path / "good")
        calls: list[int] = []
        update_chunk = Updates.update_chunk

        def fails_once(self: Updates, index: int, made: Any) -> None:
            calls.append(index)
            if len(calls) == 2:
                raise RuntimeError("no luck")
            update_chunk(self, index, made)

        with monkeypatch.context() as patch, pytest.raises(UpdateFailed, match="no luck"):
            patch.setattr(Updates, "update_chunk", fails_once)
            for seed in range(3):
                step(engine, seed=seed)
        engine.load(tmp_path / "good")
        step(engine)
        assert set(engine.runtime.updates.steps.values()) == {2}


@pytest.mark.parametrize(
    ("homes", "strategy", "update", "accumulate", "host_update_interval"),
    [
        (("host", "host"), "keep", "in_backward", 1, 1),
        (("host", "host"), "offload", "in_backward", 2, 3),
        (("host", "host"), "swap", "after_step", 1, 1),
        (("gpu", "host"), "recompute", "in_backward", 1, 3),
        (("gpu", "host"), "offload", "after_step", 2, 1),
        (("host", "gpu"), "swap", "after_step", 1, 1),
        (("gpu", "streamed"), "keep", "after_step", 2, 1),
        (("host", "streamed"), "offload", "in_backward", 2, 1),
    ],
)
def test_copies_and_updates_on_threads_of_their_own_give_the_plain_loops_bits(
    homes: tuple[Any, Any], strategy: Any, update: Any, accumulate: int, host_update_interval: int
) -> None:
    """As on CUDA, where a copy that waits for an update on the host is issued by another thread, later."""
    weights, optimizer = homes
    cell = Cell(
        kind=KIND,
        dtype="bf16",
        weights=weights,
        optimizer=optimizer,
        strategy=strategy,
        update=update,
        accumulate=accumulate,
    )
    how = dict(weights=weights, optimizer=optimizer, strategy=strategy, host_update_interval=host_update_interval)
    cells.assert_same(
        cells.run(cell, ThreadedCpu(), decision=lambda *planned: cells.uniform(*planned, **how), chunk_bytes=4096),
        cells.expected(cell),
    )


@pytest.mark.parametrize("optimizer", ["host", "streamed"])
def test_gradients_edited_between_micro_batches_are_complete_when_copies_and_norms_read_them(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm of edited gradients was taken on the host while the sums of the last backward were on their way."""
    cell = Cell(kind=KIND, dtype="bf16", weights="host", optimizer=optimizer, accumulate=2, clip=True)

    def editing(model: torch.nn.Module) -> Any:
        backwards = itertools.count()

        def after(what: str) -> None:
            if what == "backward" and next(backwards) % 2 == 0:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(0.5)

        return after

    model, device = cell.model(), ThreadedCpu()
    expected = cells.plain(model, cells.batches(KIND, 3), spec=cell.spec, accumulate=2, after=editing(model))
    with cells.closing(cells.prepare(cell, device, chunk_bytes=4096)) as engine:
        cells.assert_same(cells.train_cell(cell, engine, after=editing(engine.model)), expected)
        # On CUDA an edit is a kernel, which a copy to the device on another lane does not wait for.
        engine.model(**zoo.batch(KIND)).loss.backward()
        editing(engine.model)("backward")
        loss = engine.model(**zoo.batch(KIND)).loss
        loads: list[list[str]] = []
        issued, synchronize = engine.runtime.executor, device.synchronize
        monkeypatch.setattr(
            device,
            "synchronize",
            lambda: (loads.append([name for name in issued.issued if name[0] == "Q"]), synchronize()),
        )
        loss.backward()
        assert loads == [[]] and any(name[0] == "Q" for name in issued.issued)


def test_a_backward_that_fails_beside_a_failed_update_leaves_no_parameter_in_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> None:
        raise UpdateFailed("no luck")

    with cells.closing(prepare("streamed")) as engine:
        loss = engine.model(**zoo.batch(KIND)).loss
        hook = next(p for p in engine.model.parameters() if p.requires_grad).register_hook(fail)
        with monkeypatch.context() as patch, pytest.raises(UpdateFailed):
            patch.setattr(engine.device, "synchronize", fail)
            loss.backward()
        hook.remove()
        assert all(isinstance(param, PreparedParameter) for param in engine.model.parameters())
