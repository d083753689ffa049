"""Saving and going on: a run that is broken off, saved under one plan and loaded under another equals one that was
never broken off, to the bit.

Two steps, a checkpoint, two more steps by an engine with other weights, another plan and another device. With dropout:
torch is seeded by step. The learning rate shrinks after every step by its own old value, so that going on needs the
saved one. The uninterrupted run is a plain loop.
"""

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from cells import Cell, Outcome
from parity.test_adapters import CASES as ADAPTED
from parity.test_adapters import CHUNK_BYTES, PLANS, Adapted, logits, machine, traced
from peft import PeftModel
from torch import nn
from turns import in_turn
from unit.model.test_weights import Norms, norms

import outsize
from outsize.checkpoint.folder import newest, read_manifest
from outsize.runtime.engine import Engine

BROKEN, STEPS = 2, 4
OTHER_SEED = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A way of training: a cell's model and loop, and groups of its own."""

    cell: Cell
    groups: bool = False

    @functools.cached_property
    def spec(self) -> outsize.AdamW:
        small = [name for name, p in self.cell.model().named_parameters() if p.ndim == 1 and p.requires_grad]
        return dataclasses.replace(
            self.cell.spec,
            groups=[{"params": small, "weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)}] if self.groups else (),
        )

    def model(self, seed: int = 0) -> nn.Module:
        model = zoo.make(self.cell.kind, self.cell.torch_dtype, self.cell.tied, seed=seed)
        if self.cell.frozen != "none":
            zoo.freeze_some(model, seed=1 if self.cell.frozen == "prefix" else 0)
        return model

    def prepare(self, model: nn.Module, device: str, **how: Any) -> Engine:
        batch, traced = zoo.batch(self.cell.kind), self.cell.traced(device)
        return cells.prepare_by_hand(
            model, batch, spec=self.spec, device=device, accumulate=self.cell.accumulate, traced=traced, **how
        )


def train(
    model: nn.Module,
    optimizer: Any,
    kind: str,
    steps: range,
    *,
    accumulate: int = 1,
    engine: Engine | None = None,
    declare: bool = False,
) -> Outcome:
    losses, norms = [], []
    for step in steps:
        torch.manual_seed(1000 + step)
        for micro in range(accumulate):
            out = model(**zoo.batch(kind, seed=step * accumulate + micro))
            loss = out.loss / accumulate
            with (
                engine.last_backward()
                if engine is not None and declare and micro == accumulate - 1
                else contextlib.nullcontext()
            ):
                loss.backward()
            losses.append(float(out.loss.detach()))
        optimizer.step()
        norms.append(float(engine.grad_norm if engine is not None else optimizer.grad_norm))
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    saved = optimizer.state_dict()
    order = [name for group in saved["param_groups"] for name in group["param_names"]]
    state = {
        order[i]: {key: torch.as_tensor(value).detach().clone() for key, value in s.items()}
        for i, s in saved["state"].items()
    }
    return Outcome(losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}, state)


def train_run(run: Run, model: nn.Module, optimizer: Any, steps: range, engine: Engine | None = None) -> Outcome:
    return train(
        model,
        optimizer,
        run.cell.kind,
        steps,
        accumulate=run.cell.accumulate,
        engine=engine,
        declare=run.cell.update != "after_step",
    )


def reference(model: nn.Module, spec: outsize.AdamW) -> cells.Reference:
    return cells.Reference(
        spec.param_groups(model.named_parameters()),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        fp32_grads=spec.fp32_grads,
    )


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "param_names")}
        for group in optimizer.param_groups
    ]


@dataclasses.dataclass
class Uninterrupted:
    before: Outcome
    after: Outcome
    settings: list[dict[str, Any]]
    """Where it would be broken off."""


def uninterrupted(model: nn.Module, spec: outsize.AdamW, go: Callable[[Any, range], Outcome]) -> Uninterrupted:
    optimizer = reference(model, spec)
    before = go(optimizer, range(BROKEN))
    at = settings(optimizer)
    return Uninterrupted(before, go(optimizer, range(BROKEN, STEPS)), at)


@functools.cache
def expected(run: Run) -> Uninterrupted:
    model = run.model()
    return uninterrupted(model, run.spec, lambda optimizer, steps: train_run(run, model, optimizer, steps))


def assert_goes_on(engine: Engine, folder: Path, wanted: Uninterrupted, go: Callable[[range], Outcome]) -> None:
    """Load into this engine, whatever it has trained so far, and train the rest."""
    engine.load(folder)
    assert engine.num_steps == BROKEN
    assert settings(engine.optimizer) == wanted.settings
    for name, value in engine.model.state_dict().items():
        assert torch.equal(value, wanted.before.weights[name]), f"{name} after loading"
    cells.assert_same(go(range(BROKEN, STEPS)), wanted.after)
    assert engine.num_steps == STEPS


# --- runs and ways through plans


def _run(kind: str, *, groups: bool = False, **cell: Any) -> Run:
    return Run(cell=Cell(kind=kind, **cell), groups=groups)


RUNS = {
    "llama": _run("llama", dtype="bf16", accumulate=2, clip=True),
    "llama-untied": _run("llama-untied", groups=True, frozen="scattered"),
    "llama-in-backward": _run("llama", dtype="bf16", update="in_backward"),
    "llama-prefix": _run("llama-untied", dtype="bf16", frozen="prefix", groups=True, fp32_grads=True),
    "qwen3": _run("qwen3", dtype="bf16", fp32_grads=True, accumulate=2),
    "gemma2": _run("gemma2", dtype="bf16", frozen="scattered"),
    "gpt2": _run("gpt2", groups=True, accumulate=2),
    "gpt2-declared": _run("gpt2", dtype="bf16", accumulate=2, update="declared", groups=True),
    "mixtral": _run("mixtral", groups=True),
    "mixtral-frozen": _run("mixtral", dtype="bf16", frozen="scattered", accumulate=2),
    "t5": _run("t5", dtype="bf16", clip=True),
    "t5-in-backward": _run("t5", update="in_backward", frozen="prefix"),
    "bert": _run("bert", dtype="bf16", groups=True, clip=True),
    "plain-tied": _run("plain", tied=True, frozen="scattered"),
    "looped": _run("looped", dtype="bf16", accumulate=2),
    "one-block": _run("one-block", groups=True),
    "mixed": _run("mixed", groups=True, accumulate=2, clip=True),
    "mixed-in-backward": _run("mixed", update="in_backward", frozen="scattered"),
}
Plan = dict[str, Any]
ROUTES: dict[str, tuple[Plan, Plan]] = {
    "host-to-gpu": (
        {"device": "cpu", "weights": "host", "optimizer": "host", "strategy": "recompute"},
        {"device": "sim:64MiB", "weights": "gpu", "optimizer": "gpu", "chunk_bytes": 4096},
    ),
    "gpu-to-host": (
        {"device": "cpu", "weights": "gpu", "optimizer": "gpu"},
        {
            "device": "sim:64MiB",
            "weights": "host",
            "optimizer": "streamed",
            "strategy": "swap",
            "depth": 2,
            "chunk_bytes": 4096,
        },
    ),
    "crossed": (
        {"device": "sim:64MiB", "weights": "host", "optimizer": "gpu", "strategy": "offload", "chunk_bytes": 4096},
        {"device": "cpu", "weights": "gpu", "optimizer": "host", "strategy": "recompute", "chunk_bytes": 2**16},
    ),
}


# Every run goes the crossed route and one of the others; test_a_save_in_the_background below takes each of them from
# the first plan of the one to the second plan of the other. By default most runs go one route, by turns, and two of
# three are saved in the background; `make test-all` has all of it.
GOING = [
    pytest.param(name, route, marks=[] if i < 4 or (i % 2 == 0) == (route == "crossed") else [pytest.mark.full])
    for i, name in enumerate(RUNS)
    for route in (("host-to-gpu", "gpu-to-host")[i // 2 % 2], "crossed")
]
BACKGROUND = [pytest.param(name, marks=[] if i % 3 else [pytest.mark.full]) for i, name in enumerate(RUNS)]


@pytest.mark.parametrize(("name", "route"), GOING)
def test_a_run_that_continues_under_another_plan_is_the_uninterrupted_one(
    name: str, route: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    run, (first, second) = RUNS[name], ROUTES[route]
    wanted = expected(run)
    with cells.closing(run.prepare(run.model(), **first)) as engine:
        cells.assert_same(train_run(run, engine.model, engine.optimizer, range(BROKEN), engine), wanted.before)
        engine.save(tmp_path / "checkpoint-2")
        if route == "crossed":  # saving changes nothing
            cells.assert_same(
                train_run(run, engine.model, engine.optimizer, range(BROKEN, STEPS), engine), wanted.after
            )
    with cells.closing(run.prepare(run.model(seed=OTHER_SEED), **second)) as other:
        if route != "host-to-gpu":  # what it has trained so far leaves no trace
            train_run(run, other.model, other.optimizer, range(9, 10), other)
        assert_goes_on(
            other,
            tmp_path / "checkpoint-2",
            wanted,
            lambda steps: train_run(run, other.model, other.optimizer, steps, other),
        )
    parity_cell((name, route))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that saves takes its time, so that training gets ahead of it wherever it may."""
    pwrite = os.pwrite

    def slowly(*args: Any) -> int:
        if threading.current_thread().name == "outsize-save":
            time.sleep(0.0005)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", slowly)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("name", BACKGROUND)
def test_a_save_in_the_background_holds_the_step_it_was_requested_at(
    name: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """Two more steps are trained meanwhile, and their bits are the plain loop's, too."""
    run = RUNS[name]
    wanted, first = (
        expected(run),
        {**ROUTES["host-to-gpu"][0], "chunk_bytes": 4096, "device": ("cpu", "sim:64MiB")[run.groups]},
    )
    with cells.closing(run.prepare(run.model(), **first)) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "checkpoint-2", background=True)
        cells.assert_same(train_run(run, engine.model, engine.optimizer, range(BROKEN, STEPS), engine), wanted.after)
        engine.finish_saving()
        assert newest(tmp_path) == tmp_path / "checkpoint-2"
    with cells.closing(run.prepare(run.model(seed=OTHER_SEED), **ROUTES["gpu-to-host"][1])) as other:
        assert_goes_on(
            other,
            tmp_path / "checkpoint-2",
            wanted,
            lambda steps: train_run(run, other.model, other.optimizer, steps, other),
        )
    parity_cell((name, "background"))


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("name", in_turn(["llama", "gpt2", "mixtral-frozen", "mixed"]))
def test_evaluation_and_reading_during_a_save_disturb_neither(
    name: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    run = RUNS[name]
    wanted = expected(run)
    with cells.closing(run.prepare(run.model(), **{**ROUTES["host-to-gpu"][0], "chunk_bytes": 4096})) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "checkpoint-2", background=True)
        with torch.no_grad():
            engine.model(**zoo.batch(run.cell.kind, seed=50))
        engine.optimizer.zero_grad()
        assert all(torch.equal(value, wanted.before.weights[name]) for name, value in engine.model.state_dict().items())
        cells.assert_same(train_run(run, engine.model, engine.optimizer, range(BROKEN, STEPS), engine), wanted.after)
    with cells.closing(run.prepare(run.model(seed=OTHER_SEED), **ROUTES["crossed"][1])) as other:
        assert_goes_on(
            other,
            tmp_path / "checkpoint-2",
            wanted,
            lambda steps: train_run(run, other.model, other.optimizer, steps, other),
        )
    parity_cell((name, "read meanwhile"))


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("what", ["write", "load", "save", "detach"])
def test_whatever_writes_weights_waits_for_a_save_on_its_way(what: str, tmp_path: Path) -> None:
    run = RUNS["llama"]
    with cells.closing(run.prepare(run.model(), **{**ROUTES["host-to-gpu"][0], "chunk_bytes": 4096})) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "earlier")
        engine.save(tmp_path / "checkpoint-2", background=True)
        if what == "write":
            engine.model.load_state_dict(
                {name: torch.zeros_like(value) for name, value in engine.model.state_dict().items()}
            )
            engine.optimizer.load_state_dict({**engine.optimizer.state_dict(), "state": {}})
            with engine.gathered() as values:
                values["model.norm.weight"].fill_(5)
        elif what == "load":
            engine.load(tmp_path / "earlier")
        elif what == "save":
            engine.save(tmp_path / "checkpoint-2", replace=True, background=True)
            engine.export(tmp_path / "out")
    for file in ("model.safetensors", "state.safetensors"):
        assert (tmp_path / "checkpoint-2" / file).read_bytes() == (tmp_path / "earlier" / file).read_bytes()


# --- plans that a search makes


@pytest.mark.parametrize("name", in_turn(["llama", "gpt2", "bert", "t5"]))
def test_going_on_under_plans_with_pins(name: str, tmp_path: Path, parity_cell: Callable[[object], None]) -> None:
    run = RUNS[name]
    wanted, batch = expected(run), zoo.batch(run.cell.kind)
    how: dict[str, Any] = {"optimizer": run.spec, "accumulate": run.cell.accumulate, "chunk_bytes": "8KiB"}
    pins = outsize.Pins(n_persist=1, n_optimizer_gpu=1, n_swap=1, n_offload=1, n_buffer=2)
    with cells.closing(outsize.prepare(run.model(), batch, device="sim:32MiB", pins=pins, **how)) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "checkpoint-2", background=True)
    once = {"n_checkpoint_attention": 1, "n_offload_attention": 1}
    other_pins = outsize.Pins(n_persist=0, **(once if name == "llama" else {"n_checkpoint": 2}))
    with cells.closing(
        outsize.prepare(run.model(OTHER_SEED), batch, device="sim:64MiB", pins=other_pins, **how)
    ) as other:
        assert_goes_on(
            other,
            tmp_path / "checkpoint-2",
            wanted,
            lambda steps: train_run(run, other.model, other.optimizer, steps, other),
        )
    parity_cell((name, "pins"))


# --- what else a model has


def odd(seed: int) -> Norms:
    """Running statistics, a parameter that is permuted, one without dimensions and one without elements."""
    model = norms(seed)
    model.layers[1].up.weight.data = model.layers[1].up.weight.data.t().contiguous().t()
    model.temperature = nn.Parameter(torch.tensor(1.0 + seed))
    model.nothing = nn.Parameter(torch.empty(0, 3))
    forward = model.norm.forward
    model.norm.forward = lambda x: forward(x) * model.temperature
    return model


@pytest.mark.parametrize("background", [False, True])
def test_buffers_and_odd_parameters_go_on_too(
    background: bool, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    spec, batch = outsize.AdamW(lr=1e-2, weight_decay=0.1), zoo.batch("plain")
    plain = odd(0)
    wanted = uninterrupted(plain, spec, lambda optimizer, steps: train(plain, optimizer, "plain", steps))
    first = cells.prepare_by_hand(odd(0), batch, spec=spec, weights="host", optimizer="host", chunk_bytes=4096)
    with cells.closing(first) as engine:
        train(engine.model, engine.optimizer, "plain", range(BROKEN), engine=engine)
        engine.save(tmp_path / "checkpoint-2", background=background)
        cells.assert_same(
            train(engine.model, engine.optimizer, "plain", range(BROKEN, STEPS), engine=engine), wanted.after
        )
    with cells.closing(
        cells.prepare_by_hand(odd(3), batch, spec=spec, device="sim:64MiB", weights="gpu", optimizer="host")
    ) as other:
        table = other.model.table
        assert_goes_on(
            other,
            tmp_path / "checkpoint-2",
            wanted,
            lambda steps: train(other.model, other.optimizer, "plain", steps, engine=other),
        )
        assert other.model.table is table and int(other.model.stats.num_batches_tracked) == STEPS
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in other.model.state_dict().items()), (
        "after detach"
    )
    parity_cell(("odd", background))


@pytest.mark.parametrize("name", in_turn(["mixtral-frozen", "llama", "mixed", "mixtral"]))
def test_weights_alone_may_be_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """The optimizer stays as it is, and its masters are the new weights."""
    run, (first, second) = RUNS[name], ROUTES["gpu-to-host"]
    with cells.closing(run.prepare(run.model(), **first)) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "whole")
        engine.save(tmp_path / "model", only_model=True)
    assert (
        sum(read_manifest(tmp_path / "model")["files"].values())
        < sum(read_manifest(tmp_path / "whole")["files"].values()) / 2
    )
    for folder in ("whole", "model"):
        with cells.closing(run.prepare(run.model(OTHER_SEED), **second)) as other:
            trained = train_run(run, other.model, other.optimizer, range(3), other)
            other.load(tmp_path / folder, only_model=True)
            state = train_run(run, other.model, other.optimizer, range(0), other)
            for param, value in state.weights.items():
                assert torch.equal(value, expected(run).before.weights[param])
            for param, parts in trained.state.items():
                for part, value in parts.items():
                    assert torch.equal(state.state[param][part], torch.zeros_like(value) if part == "lo" else value)
            assert other.num_steps == 3


@pytest.mark.parametrize(
    ("weights", "optimizer"), [("host", "host"), ("host", "gpu"), ("gpu", "host"), ("gpu", "gpu"), ("gpu", "streamed")]
)
def test_an_evaluation_right_after_loading_reads_what_was_loaded(weights: str, optimizer: str, tmp_path: Path) -> None:
    """The hazard: a slot still holds the chunk's old weights, and a forward without grad does not load what its slot
    holds.
    """
    run = RUNS["llama"]

    @torch.no_grad()
    def loss(model: nn.Module) -> float:
        return float(model(**zoo.batch("llama", seed=40)).loss)

    with cells.closing(run.prepare(run.model(), **ROUTES["gpu-to-host"][0])) as engine:
        train_run(run, engine.model, engine.optimizer, range(BROKEN), engine)
        engine.save(tmp_path / "checkpoint-2")
        expected = loss(engine.model)
    with cells.closing(run.prepare(run.model(OTHER_SEED), "sim:64MiB", weights=weights, optimizer=optimizer)) as other:
        assert loss(other.model) != expected
        other.load(tmp_path / "checkpoint-2")
        assert loss(other.model) == expected


# --- PEFT


@functools.cache
def expected_adapted(case: Adapted) -> tuple[nn.Module, Uninterrupted]:
    """PEFT by itself: the model where it would be broken off, and how it went on."""
    model = case.model()
    optimizer = reference(model, case.spec)
    go = functools.partial(train, model, optimizer, case.kind, accumulate=case.accumulate)
    before = go(range(BROKEN))
    at = settings(optimizer)
    broken = case.model()
    broken.load_state_dict(model.state_dict())
    return broken, Uninterrupted(before, go(range(BROKEN, STEPS)), at)


def prepare_adapted(case: Adapted, plan: str, seed: int = 0) -> Engine:
    """With other factors than the case's, if `seed` is not 0; the base is always the same."""
    model = case.model()
    with torch.no_grad():
        torch.manual_seed(seed)
        for param in model.parameters() if seed else ():
            if param.requires_grad:
                param.normal_()
    return cells.prepare_by_hand(
        model,
        zoo.batch(case.kind),
        spec=case.spec,
        device=machine(),
        accumulate=case.accumulate,
        chunk_bytes=CHUNK_BYTES,
        traced=traced(case),
        decision=PLANS[plan],
    )


CONTINUED = (
    "lora",
    "lora-bf16",
    "lora-embedding",
    "lora-saved-head",
    "lora-classifier",
    "lora-experts",
    "rslora",
    "dora",
)
"""By default each under one of the routes, by turns."""


@pytest.mark.parametrize(
    ("name", "route"),
    [
        pytest.param(name, route, marks=[] if (i + j) % 2 == 0 else [pytest.mark.full], id=f"{name}-{'-'.join(route)}")
        for i, name in enumerate(CONTINUED)
        for j, route in enumerate((("send", "resident"), ("resident", "recompute")))
    ],
)
def test_an_adapter_continues_and_its_files_are_pefts_own(
    name: str, route: tuple[str, str], tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """The base is not in the checkpoint: its bits are the base's."""
    case = ADAPTED[name]
    plain, wanted = expected_adapted(case)
    folder = tmp_path / "checkpoint-2"
    with cells.closing(prepare_adapted(case, route[0])) as engine:
        train(engine.model, engine.optimizer, case.kind, range(BROKEN), accumulate=case.accumulate, engine=engine)
        engine.save(folder, background=True)
        engine.finish_saving()
    plain.save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "theirs").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    stock = PeftModel.from_pretrained(case.base(), folder, autocast_adapter_dtype=case.fp32_adapters)
    assert torch.equal(logits(stock, case), logits(plain, case))
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    assert sum(read_manifest(folder)["files"].values()) < trained * 20 + 2**17, (
        "twelve bytes a parameter, the adapter in its own form, and some JSON"
    )
    with cells.closing(prepare_adapted(case, route[1], seed=OTHER_SEED)) as other:
        train(other.model, other.optimizer, case.kind, range(8, 9), accumulate=case.accumulate, engine=other)
        go = functools.partial(train, other.model, other.optimizer, case.kind, accumulate=case.accumulate, engine=other)
        assert_goes_on(other, folder, wanted, go)
    parity_cell((name, route))
