"""Plan files: written whole or not at all, and refused with the reason when they do not belong or do not add up.

Everything that a plan claims and that can be known without running it is compared here: with the model it is to drive,
and with itself. A plan that passes can be handed to the runtime, which trusts it.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from outsize.base.errors import ConfigError, PlanInvalid, tell
from outsize.base.records import dumps, fingerprint, loads
from outsize.base.units import show_bytes
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGY
from outsize.plan.placement import Placement
from outsize.plan.plan import FORMAT, Plan

_AGAIN = "Plan again"


def check(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> None:
    """Raises PlanInvalid with the first thing that is wrong."""
    _expect(
        plan.format == FORMAT,
        f"a plan of format {FORMAT}",
        f"this one has format {plan.format}",
        "Plan again with this version of outsize",
    )
    _check_model(plan, graph, layout)
    _check_decision(plan, graph, layout)
    _check_work(plan, graph)
    _check_estimate(plan, Placement(graph, layout, plan.decision, plan.step_config, plan.work, plan.shared))


def _check_model(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> None:
    made_for = fingerprint(graph)
    counts = f"{len(graph.calls)} calls, {len(layout.chunks)} chunks, {graph.num_params:,} parameters"
    buffers = plan.estimate.gpu_parts.get("buffers", 0)
    is_cast = plan.graph != made_for and plan.graph == fingerprint(replace(graph, buffer_bytes=buffers))
    do = (
        "model.to(dtype) casts them with the weights: cast these alone (from_pretrained and from_config take "
        "dtype=), or plan for the model as it is"
    )
    _expect(not is_cast, f"buffers of {graph.buffer_bytes} bytes, as the model has", f"the plan is for {buffers}", do)
    theirs = f"{len(plan.decision.strategies)} calls, {len(plan.decision.homes)} chunks"
    _expect(
        plan.graph == made_for,
        f"a plan for this model ({made_for}: {counts})",
        f"it was made for another model ({plan.graph}: {theirs})",
        _AGAIN,
    )
    _expect(
        plan.chunk_bytes == layout.chunk_bytes,
        f"chunks of {plan.chunk_bytes} bytes, as in the plan",
        f"the model has chunks of {layout.chunk_bytes}",
        "Lay it out with the plan's chunk_bytes",
    )


def _check_decision(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> None:
    decision, step_config = plan.decision, plan.step_config
    for name, found, wanted in (
        ("homes", len(decision.homes), len(layout.chunks)),
        ("strategies", len(decision.strategies), len(graph.calls)),
        ("work", len(plan.work), len(graph.calls)),
    ):
        _expect(found == wanted, f"{wanted} {name} for this model", f"the plan has {found}", _AGAIN)
    _expect(decision.depth >= 0, "a depth of 0 or more", f"it is {decision.depth}", _AGAIN)
    _expect(
        decision.host_update_interval >= 1,
        "a host_update_interval of 1 or more",
        f"it is {decision.host_update_interval}",
        _AGAIN,
    )
    _expect(step_config.accumulate >= 1, "accumulate of 1 or more", f"it is {step_config.accumulate}", _AGAIN)
    for chunk, homes in zip(layout.chunks, decision.homes, strict=True):
        _expect(
            chunk.trainable or homes.optimizer == homes.weights,
            f"one home for the frozen chunk {chunk.index} ({chunk.pieces[0].name}, …)",
            f"its weights are at {homes.weights} and its optimizer at {homes.optimizer}",
            "Give both the same home; nothing is updated there",
        )
    for call, strategy in enumerate(decision.strategies):
        name = graph.call_name(call)
        is_layer = graph.blocks[graph.calls[call]].kind == "layer"
        _expect(
            is_layer or strategy == "keep",
            f"the strategy keep for {name}, which is no layer",
            f"it is {strategy}",
            "Set it to keep",
        )
        _expect(
            graph.has_backward[call] or strategy == "keep",
            f"the strategy keep for {name}, which has no backward",
            f"it is {strategy}",
            "Set it to keep",
        )


def _check_work(plan: Plan, graph: BlockGraph) -> None:
    for call, (strategy, work) in enumerate(zip(plan.decision.strategies, plan.work, strict=True)):
        name, sends = graph.call_name(call), bool(STRATEGY[strategy].sends)
        wanted = f"{'some' if sends else 'no'} sent_bytes for {name}, which is to {strategy}"
        _expect(sends == (work.sent_bytes > 0), wanted, f"there are {work.sent_bytes}", _AGAIN)
        seconds = (
            work.forward_seconds,
            work.backward_seconds,
            work.forward_launch_seconds,
            work.backward_launch_seconds,
        )
        _expect(
            all(0 <= s < float("inf") for s in seconds),
            f"seconds of 0 or more for {name}",
            f"they are {seconds}",
            "Profile the model again",
        )
    for tensor in plan.shared:
        known = [
            tensor.call,
            max(tensor.allocated_in, 0),
            *(call for call, _ in (*tensor.held_by, *tensor.freed_early_in, *tensor.sent_by)),
        ]
        _expect(
            all(0 <= v < len(plan.work) for v in known),
            f"shared tensors of calls 0 to {len(plan.work) - 1}",
            f"one has {known}",
            _AGAIN,
        )
        at = tensor.freed_in
        _expect(
            -1 <= at <= len(plan.work),
            f"a freed_in of shared tensors from -1 to {len(plan.work)}",
            f"one has {at}",
            _AGAIN,
        )


def _check_estimate(plan: Plan, place: Placement) -> None:
    estimate = plan.estimate
    for name, needed, budget in (
        ("GPU", estimate.gpu_bytes, plan.gpu_budget_bytes),
        ("host", estimate.host_bytes, plan.host_budget_bytes),
    ):
        _expect(
            needed <= budget,
            f"an estimate within the plan's {name} budget of {show_bytes(budget)}",
            f"it is {show_bytes(needed)}",
            _AGAIN,
        )
    # A decision that was edited by hand no longer allocates what the estimate says.
    _expect(
        place.gpu_bytes <= estimate.gpu_bytes,
        f"at least {place.gpu_bytes} bytes of GPU memory in the estimate",
        f"it says {estimate.gpu_bytes}",
        _AGAIN,
    )
    _expect(
        place.host_bytes == estimate.host_bytes,
        f"{place.host_bytes} bytes of host memory in the estimate",
        f"it says {estimate.host_bytes}",
        _AGAIN,
    )
    gpu_parts = place.parts(place.gpu) | ({"buffers": place.graph.buffer_bytes} if place.graph.buffer_bytes else {})
    for name, parts, found in (
        ("gpu_parts", gpu_parts, estimate.gpu_parts),
        ("host_parts", place.parts(place.host), estimate.host_parts),
    ):
        _expect(
            parts == found, f"{name} that follow from the plan's homes ({parts})", f"the estimate says {found}", _AGAIN
        )


def _expect(holds: bool, expected: str, found: str, do: str) -> None:
    if not holds:
        raise PlanInvalid(tell(f"expected {expected}", found, do))


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan. A crash leaves the file that was there, or none."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(plan) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; `check` still has to say whether it belongs to the model."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanInvalid(
            tell(f"a plan file at {path}", "there is none", "Write one with `outsize plan`, or correct the path")
        ) from None
    except UnicodeDecodeError:
        raise PlanInvalid(tell(f"a plan file at {path}", "it is no text", "Write one with `outsize plan`")) from None
    except OSError as error:
        raise PlanInvalid(
            tell(f"a plan file at {path}", str(error.strerror), "Write one with `outsize plan`, or correct the path")
        ) from None
    try:
        return loads(Plan, text, where=str(path))
    except ConfigError as error:
        raise PlanInvalid(str(error)) from None
