"""Runs one way of training a zoo model under a hand-made plan, and the plain loop it must equal to the bit.

A `Cell` is one such way: the kind of model, what lives where, what layers do with their activations, and how the loop
trains. `run` trains it through the engine, `expected` by a plain loop with the reference optimizer. Plain outcomes are
kept per process, and traces in the session's profile cache as well (conftest.py): many cells share them, and tracing
takes longer than the training. The model itself is built anew for every cell.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import zoo
from synthetic import make_homes
from torch import nn

import outsize
from outsize.base.records import fingerprint
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout, pack
from outsize.methods.osft.method import OSFT
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.strategies import Strategy
from outsize.optim.adamw import AdamW
from outsize.optim.method import MethodSpec
from outsize.optim.spec import OptimizerSpec
from outsize.planner.simulate import simulate
from outsize.profile import cache
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer  # noqa: F401 - for tests of models of their own
from outsize.reference import AdamW as Reference
from outsize.runtime.engine import Engine, PlannedModel
from outsize.schedule.placement import Placement
from outsize.schedule.plan import FORMAT, Decision, Plan, StepConfig
from outsize.schedule.schedule import compile_schedule

STEPS = 3
MAX_GRAD_NORM = 0.05
"""Below the norm of every zoo model, so that clipping clips."""
GiB = 2**30
CHUNK_BYTES = 16 * 1024
Traced = tuple[BlockGraph, ModelTrace]
Decide = Callable[[BlockGraph, ChunkLayout, ModelTrace], Decision]


def uniform(
    graph: BlockGraph,
    layout: ChunkLayout,
    trace: ModelTrace,
    *,
    strategy: Strategy = "keep",
    weights: str = "gpu",
    optimizer: str = "gpu",
    depth: int = 1,
    host_update_interval: int = 2,
) -> Decision:
    """The same for every chunk and every layer that can have it. With updates in backward, those of every second chunk
    come after it.
    """
    homes = tuple(make_homes(weights, optimizer, chunk.is_updated) for chunk in layout.chunks)
    strategies = tuple(strategy if strategy in trace.strategies(v) else "keep" for v in range(len(graph.calls)))
    return Decision(homes=homes, strategies=strategies, depth=depth, host_update_interval=host_update_interval)  # type: ignore[arg-type]


def make_plan(
    graph: BlockGraph,
    layout: ChunkLayout,
    trace: ModelTrace,
    device: Device,
    decision: Decision,
    step_config: StepConfig,
    budget: int | None = 16 * GiB,
) -> Plan:
    """`budget` None: exactly what the plan says it needs."""
    work = trace.works(decision.strategies)
    place = Placement(graph, layout, decision, step_config, work, trace.shared)
    estimate = simulate(place, compile_schedule(place), device.spec, held_bytes=trace.held_bytes)
    return Plan(
        format=FORMAT,
        graph=fingerprint(graph),
        hardware=device.spec.name,
        chunk_bytes=layout.chunk_bytes,
        inputs=trace.inputs,
        step_config=step_config,
        decision=decision,
        work=work,
        held_bytes=trace.held_bytes,
        shared=trace.shared,
        tile_tokens=trace.tile_tokens,
        tiled=trace.tiled,
        gpu_budget_bytes=estimate.gpu_bytes if budget is None else budget,
        host_budget_bytes=16 * GiB,
        estimate=estimate,
        provenance=trace.provenance,
        search="by hand",
    )


def prepare_by_hand(
    model: nn.Module,
    batch: Any,
    *,
    spec: OptimizerSpec,
    device: str | Device = "cpu",
    accumulate: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    budget: int | None = 16 * GiB,
    traced: Traced | None = None,
    method: MethodSpec | None = None,
    tile_tokens: int = 0,
    **how: Any,
) -> Engine:
    """An engine under a plan that no search made: `decision=` (a Decision, or a function that makes one), or what
    `uniform` takes.
    """
    where = choose_device(device)
    where.count_anew()  # garbage of earlier tests on a device that tests share is not this plan's
    layers = find_layers(model)
    bound = None if method is None else method.bind(model)
    coordinates = {} if bound is None else bound.coordinates
    # Bytes are the same on `sim`, which does not time.
    graph, trace = traced or cache.traced(
        model, batch, layers, SimDevice(lookup("1GiB")) if where.kind == "cpu" else where, tile_tokens=tile_tokens
    )
    layout = pack(graph, chunk_bytes, in_coordinates=coordinates)
    step_config = dataclasses.replace(spec.step_config(accumulate), coordinates=coordinates)
    decision = how.pop("decision", None) or uniform(graph, layout, trace, **how)
    plan = make_plan(
        graph,
        layout,
        trace,
        where,
        decision(graph, layout, trace) if callable(decision) else decision,
        step_config,
        budget,
    )

    def planner(model: nn.Module, batch: Any, step_config: StepConfig) -> PlannedModel:
        raise AssertionError("a hand-made plan is not made again")

    return Engine(
        model, layers, PlannedModel(graph, layout, plan), device=where, optimizer=spec, planner=planner, method=bound
    )


@contextlib.contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    """Detach at the end, also of an engine that stopped in the middle of a pass: its dispatch modes must not outlive
    the test.
    """
    try:
        yield engine
    finally:
        engine.detach()


# --- training


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]


def batches(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(name, seed=i) for i in range(count)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[Any],
    *,
    steps: int,
    accumulate: int,
    engine: Engine | None = None,
    declare: bool = False,
    autocast: bool = False,
    autocast_cache: bool = True,
    schedule: Callable[[int], float] | None = None,
    after: Callable[[str], None] = lambda what: None,
) -> Outcome:
    """The loop of every test. `out` lives until the next forward returns, which is what plans count with.

    `schedule`: factor of the learning rate by step. `after` is called with `forward`, `backward` and `step` after each
    of them.
    """
    torch.manual_seed(1234)
    losses, norms = [], []
    feed = iter(data * (steps * accumulate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule is not None else None
    for _ in range(steps):
        for micro in range(accumulate):
            with (
                torch.autocast("cpu", torch.bfloat16, cache_enabled=autocast_cache)
                if autocast
                else contextlib.nullcontext()
            ):
                out = model(**next(feed))
            after("forward")
            loss = out.loss / accumulate if accumulate > 1 else out.loss
            with (
                engine.last_backward()
                if declare and engine is not None and micro == accumulate - 1
                else contextlib.nullcontext()
            ):
                loss.backward()
            losses.append(float(out.loss.detach()))
            after("backward")
        optimizer.step()
        after("step")
        if scheduler is not None:
            scheduler.step()
        norms.append(float(engine.grad_norm if engine is not None else optimizer.grad_norm))  # type: ignore[attr-defined]
        optimizer.zero_grad()
    names = {n for n, _ in model.named_parameters()}
    weights = {n: v.detach().clone() for n, v in model.state_dict().items() if n in names}
    saved = optimizer.state_dict()
    order = [n for group in saved["param_groups"] for n in group["param_names"]]
    state = {
        order[i]: {k: torch.as_tensor(v).detach().clone() for k, v in s.items()} for i, s in saved["state"].items()
    }
    return Outcome(losses, norms, weights, state)


def plain(
    model: nn.Module,
    data: list[Any],
    *,
    spec: AdamW,
    steps: int = STEPS,
    accumulate: int = 1,
    method: OSFT | None = None,
    **how: Any,
) -> Outcome:
    if method is not None:
        settings = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "update"}
        optimizer = outsize.osft.AdamW(model, method, **settings)
        outcome = train(model, optimizer, data, steps=steps, accumulate=accumulate, **how)
        for name, weight in optimizer.split_weights.items():
            outcome.state[name]["coordinates"] = weight.params["drift"].detach().clone()
        return outcome
    reference = Reference(
        spec.param_groups(model.named_parameters()),
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        nonfinite=spec.nonfinite,
        fp32_grads=spec.fp32_grads,
    )
    return train(model, reference, data, steps=steps, accumulate=accumulate, **how)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Equal to the bit: losses, norms, weights, moments, masters, step counts."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    assert found.state.keys() == expected.state.keys()
    for name, state in expected.state.items():
        assert found.state[name].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found.state[name][key].to(value.dtype), value), (name, key)


# --- cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    kind: str
    dtype: Literal["fp32", "bf16"] = "fp32"
    tied: bool | None = None
    """None: the kind's own habit."""
    frozen: Literal["none", "scattered", "prefix"] = "none"
    strategy: Strategy = "keep"
    weights: Literal["gpu", "host"] = "gpu"
    optimizer: Literal["gpu", "host", "streamed"] = "gpu"
    depth: int = 1
    clip: bool = False
    accumulate: int = 1
    update: Literal["after_step", "declared", "in_backward"] = "after_step"
    """`declared`: the loop declares its last backward though the plan does not count on it; `in_backward`: the plan
    does.
    """
    fp32_grads: bool = False
    autocast: bool = False
    osft: float | None = None
    """Share of free directions, with outsize.OSFT."""

    def __str__(self) -> str:
        words = [
            self.kind,
            self.dtype,
            self.strategy,
            f"{self.weights}/{self.optimizer}",
            f"depth{self.depth}",
            f"accumulate{self.accumulate}",
            self.update,
        ]
        words += [f"osft{self.osft}"] if self.osft is not None else []
        words += ["tied" if self.tied else "untied"] if self.tied is not None else []
        words += [f"frozen_{self.frozen}"] if self.frozen != "none" else []
        return "-".join(words + [name for name in ("clip", "fp32_grads", "autocast") if getattr(self, name)])

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def spec(self) -> AdamW:
        # A large rate: weights must move by much more than a rounding in three steps.
        return AdamW(
            lr=1e-2,
            weight_decay=0.1,
            max_grad_norm=MAX_GRAD_NORM if self.clip else None,
            fp32_grads=self.fp32_grads,
            update="in_backward" if self.update == "in_backward" else "after_step",
        )

    @property
    def method(self) -> OSFT | None:
        return None if self.osft is None else OSFT(unfreeze_rank_ratio=self.osft)

    def model(self) -> nn.Module:
        model = zoo.make(self.kind, self.torch_dtype, self.tied)
        if self.frozen != "none":
            zoo.freeze_some(model, seed=1 if self.frozen == "prefix" else 0)
        return model

    def traced(self, device: str | Device = "cpu") -> Traced:
        """Of a model that is the cell's but another one than is trained. On `sim`, which does not time, also for the
        CPU: bytes are the same there.
        """
        where = choose_device(device)
        if where.kind == "cpu":
            where = SimDevice(lookup("1GiB"))
        # The size of a device and its name do not enter a trace.
        key = (self._model_only, where.kind, dataclasses.replace(where.spec, name="", gpu_bytes=0))
        if key not in _TRACES:
            model = self.model()
            with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
                _TRACES[key] = cache.traced(model, zoo.batch(self.kind), find_layers(model), where)
        return _TRACES[key]

    @property
    def _model_only(self) -> "Cell":
        """The cell without what a trace does not depend on."""
        return Cell(kind=self.kind, dtype=self.dtype, tied=self.tied, frozen=self.frozen, autocast=self.autocast)

    @property
    def _loop_only(self) -> "Cell":
        """The cell without what a plain loop does not have."""
        return dataclasses.replace(self, strategy="keep", weights="gpu", optimizer="gpu", depth=1, update="after_step")


_TRACES: dict[tuple[Cell, str, HardwareSpec], Traced] = {}


def prepare(cell: Cell, device: str | Device = "cpu", **how: Any) -> Engine:
    """An engine for the cell; `how` is what prepare_by_hand takes beyond that, such as a decision."""
    if "decision" not in how:
        how |= {"strategy": cell.strategy, "weights": cell.weights, "optimizer": cell.optimizer, "depth": cell.depth}
    how.setdefault("spec", cell.spec)
    how.setdefault("method", cell.method)
    return prepare_by_hand(
        cell.model(), zoo.batch(cell.kind), device=device, accumulate=cell.accumulate, traced=cell.traced(device), **how
    )


def train_cell(cell: Cell, engine: Engine, *, steps: int = STEPS, **how: Any) -> Outcome:
    data = batches(cell.kind, 3)
    declare = cell.update != "after_step"
    return train(
        engine.model,
        engine.optimizer,
        data,
        steps=steps,
        accumulate=cell.accumulate,
        engine=engine,
        declare=declare,
        autocast=cell.autocast,
        **how,
    )


def run(cell: Cell, device: str | Device = "cpu", *, steps: int = STEPS, **how: Any) -> Outcome:
    """Train the cell through the engine. The plain model that it leaves has the weights it trained."""
    with closing(prepare(cell, device, **how)) as engine:
        outcome = train_cell(cell, engine, steps=steps)
    for name, param in engine.model.named_parameters():
        assert torch.equal(param.detach(), outcome.weights[name].to(param.device)), f"{name} after detach"
    return outcome


def expected(cell: Cell, *, steps: int = STEPS) -> Outcome:
    """What the plain loop gives, of which there is one for many cells."""
    return _plain_once(cell._loop_only, steps)


@functools.cache
def _plain_once(cell: Cell, steps: int) -> Outcome:
    outcome = plain(
        cell.model(),
        batches(cell.kind, 3),
        spec=cell.spec,
        steps=steps,
        accumulate=cell.accumulate,
        autocast=cell.autocast,
        method=cell.method,
    )
    assert not cell.clip or max(outcome.norms) > MAX_GRAD_NORM, "clipping must clip, or it is not tested"
    return outcome
