"""Runs one way of training a zoo model under a hand-made plan, and the plain loop it must equal to the bit."""

import dataclasses
from typing import Any

import torch
from torch import nn

import zoo
from outsize.base.records import fingerprint
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.layout.chunks import ChunkLayout, pack
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.work import Strategy
from outsize.plan.placement import Placement
from outsize.plan.plan import FORMAT, Decision, Homes, Plan, Terms
from outsize.plan.schedule import compile_schedule
from outsize.planner.simulate import simulate
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer
from outsize.reference import AdamW as Reference
from outsize.runtime.engine import Engine, Planned
from outsize.runtime.optimizer import AdamW

GiB = 2**30


def uniform(
    graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, *, strategy: Strategy = "keep", weights: str = "gpu", optimizer: str = "gpu", depth: int = 1
) -> Decision:
    """The same for every chunk and every layer that can have it."""
    homes = tuple(Homes(weights=weights, optimizer=optimizer if c.trainable else weights) for c in layout.chunks)  # type: ignore[arg-type]
    strategies = tuple(strategy if strategy in trace.strategies(v) else "keep" for v in range(len(graph.visits)))
    return Decision(homes=homes, strategies=strategies, depth=depth)  # type: ignore[arg-type]


def make_plan(
    graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, device: Device, decision: Decision, terms: Terms, budget: int = 16 * GiB
) -> Plan:
    work = tuple(trace.work(v, s) for v, s in enumerate(decision.strategies))
    place = Placement(graph, layout, decision, terms, work)
    estimate = simulate(place, compile_schedule(place), device.spec, held_bytes=trace.held_bytes)
    return Plan(
        format=FORMAT, graph=fingerprint(graph), hardware=device.spec.name, chunk_bytes=layout.chunk_bytes, inputs=trace.inputs, terms=terms, decision=decision,
        work=work, held_bytes=trace.held_bytes, gpu_budget_bytes=budget, host_budget_bytes=16 * GiB, estimate=estimate, provenance=trace.provenance,
        search="by hand",
    )  # fmt: skip


def prepare_by_hand(
    model: nn.Module, batch: Any, *, spec: AdamW, device: str = "cpu", accumulate: int = 1, chunk_bytes: int = 16 * 1024, budget: int = 16 * GiB, **how: Any
) -> Engine:
    where = choose_device(device)
    layers = find_layers(model)
    graph, trace = Tracer(model, batch, layers, where).trace()
    layout = pack(graph, chunk_bytes)
    terms = Terms(update=spec.update, accumulate=accumulate, fp32_grads=spec.fp32_grads)
    decision = how.pop("decision", None) or uniform(graph, layout, trace, **how)
    plan = make_plan(graph, layout, trace, where, decision(graph, layout, trace) if callable(decision) else decision, terms, budget)

    def planner(model: nn.Module, batch: Any, terms: Terms) -> Planned:
        raise AssertionError("a hand-made plan is not made again")

    return Engine(model, layers, Planned(graph, layout, plan), device=where, optimizer=spec, planner=planner)


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]


def batches(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(name, seed=i) for i in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], *, steps: int, accumulate: int, engine: Engine | None = None, declare: bool = False) -> Outcome:
    torch.manual_seed(1234)
    losses, norms = [], []
    feed = iter(data * (steps * accumulate))
    for _ in range(steps):
        for micro in range(accumulate):
            out = model(**next(feed))
            loss = out.loss / accumulate if accumulate > 1 else out.loss
            if declare and engine is not None and micro == accumulate - 1:
                with engine.last_backward():
                    loss.backward()
            else:
                loss.backward()
            losses.append(float(out.loss.detach()))
        optimizer.step()
        norms.append(float(engine.grad_norm if engine is not None else optimizer.grad_norm))  # type: ignore[attr-defined]
        optimizer.zero_grad()
    names = [n for n, p in model.named_parameters()]
    weights = {n: v.detach().clone() for n, v in model.state_dict().items() if n in names}
    saved = optimizer.state_dict()
    order = [n for n, p in model.named_parameters() if p.requires_grad]
    state = {order[i]: {k: torch.as_tensor(v).detach().clone() for k, v in s.items()} for i, s in saved["state"].items()}
    return Outcome(losses, norms, weights, state)


def plain(model: nn.Module, data: list[Any], *, spec: AdamW, steps: int = 5, accumulate: int = 1) -> Outcome:
    reference = Reference(
        [p for p in model.parameters() if p.requires_grad], lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm, nonfinite=spec.nonfinite, fp32_grads=spec.fp32_grads,
    )  # fmt: skip
    return train(model, reference, data, steps=steps, accumulate=accumulate)


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
