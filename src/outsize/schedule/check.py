"""Saves, loads and checks plan files.

`check` compares everything in a plan that can be checked without running it, with the model and with the rest of the
plan. The runtime relies on these checks and does not repeat them.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from outsize.base.errors import ConfigError, PlanInvalid
from outsize.base.records import dumps, fingerprint, loads
from outsize.base.units import show_bytes
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGY
from outsize.schedule.placement import Placement
from outsize.schedule.plan import FORMAT, Plan


def check(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> None:
    """Raise PlanInvalid for the first error in the plan."""
    _require(
        plan.format == FORMAT,
        f"it has format {plan.format}, and this version of outsize reads format {FORMAT}",
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
    _require(
        not is_cast,
        f"it was made for {buffers} bytes of buffers, and the model has {graph.buffer_bytes}",
        "model.to(dtype) casts buffers with the weights: cast the weights alone (from_pretrained and from_config take "
        "dtype=), or plan for the model as it is",
    )
    theirs = f"{len(plan.decision.strategies)} calls, {len(plan.decision.homes)} chunks"
    _require(
        plan.graph == made_for,
        f"it was made for another model ({plan.graph}: {theirs}) than this one ({made_for}: {counts})",
    )
    _require(
        plan.chunk_bytes == layout.chunk_bytes,
        f"its chunk_bytes is {plan.chunk_bytes}, and the model is laid out with {layout.chunk_bytes}",
        "Lay the model out with the plan's chunk_bytes",
    )


def _check_decision(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> None:
    decision, step_config = plan.decision, plan.step_config
    for name, found, wanted in (
        ("homes", len(decision.homes), len(layout.chunks)),
        ("strategies", len(decision.strategies), len(graph.calls)),
        ("work entries", len(plan.work), len(graph.calls)),
    ):
        _require(found == wanted, f"it has {found} {name}, and this model needs {wanted}")
    _require(decision.depth >= 0, f"depth is {decision.depth}, below 0")
    _require(decision.host_update_interval >= 1, f"host_update_interval is {decision.host_update_interval}, below 1")
    _require(step_config.accumulate >= 1, f"accumulate is {step_config.accumulate}, below 1")
    for chunk, homes in zip(layout.chunks, decision.homes, strict=True):
        what = f"chunk {chunk.index} ({chunk.pieces[0].name}, …)"
        _require(
            step_config.update_of(chunk) is not None or homes.weights == homes.state == homes.update,
            f"the frozen {what} has weights on {homes.weights}, state on {homes.state} and update on {homes.update}",
            "Give all three the same value; a frozen chunk is not updated",
        )
        _require(
            (homes.state, homes.update) != ("gpu", "host"),
            f"{what} has its optimizer state on the GPU and its update on the host",
            "Update state on the GPU there; state on the host may be updated on either",
        )
    for call, strategy in enumerate(decision.strategies):
        name = graph.call_name(call)
        is_layer = graph.blocks[graph.calls[call]].kind == "layer"
        _require(
            is_layer or strategy == "keep",
            f"the strategy of {name} is {strategy}, but {name} is not a layer",
            "Set it to keep",
        )
        _require(
            graph.has_backward[call] or strategy == "keep",
            f"the strategy of {name} is {strategy}, but {name} has no backward",
            "Set it to keep",
        )


def _check_work(plan: Plan, graph: BlockGraph) -> None:
    for call, (strategy, work) in enumerate(zip(plan.decision.strategies, plan.work, strict=True)):
        name, sends = graph.call_name(call), bool(STRATEGY[strategy].sends)
        _require(
            sends == (work.sent_bytes > 0),
            f"sent_bytes of {name} is {work.sent_bytes}, but its strategy {strategy} sends "
            f"{'some' if sends else 'none'}",
        )
        seconds = (
            work.forward_seconds,
            work.backward_seconds,
            work.forward_launch_seconds,
            work.backward_launch_seconds,
        )
        _require(
            all(0 <= s < float("inf") for s in seconds),
            f"the seconds of {name} are {seconds}, and not all of them are finite and 0 or more",
            "Profile the model again",
        )
    for tensor in plan.shared:
        known = [
            tensor.call,
            max(tensor.allocated_in, 0),
            *(call for call, _ in (*tensor.held_by, *tensor.freed_early_in, *tensor.sent_by)),
        ]
        _require(
            all(0 <= v < len(plan.work) for v in known),
            f"a shared tensor refers to calls {known}, and the model has calls 0 to {len(plan.work) - 1}",
        )
        _require(
            -1 <= tensor.freed_in <= len(plan.work),
            f"freed_in of a shared tensor is {tensor.freed_in}, not between -1 and {len(plan.work)}",
        )


def _check_estimate(plan: Plan, place: Placement) -> None:
    estimate = plan.estimate
    for name, needed, budget in (
        ("GPU", estimate.gpu_bytes, plan.gpu_budget_bytes),
        ("host", estimate.host_bytes, plan.host_budget_bytes),
    ):
        _require(
            needed <= budget, f"its estimate of {show_bytes(needed)} is over its {name} budget of {show_bytes(budget)}"
        )
    # If the decision was edited by hand, it allocates other sizes than the estimate has.
    _require(
        place.gpu_bytes <= estimate.gpu_bytes,
        f"its estimate is {estimate.gpu_bytes} bytes of GPU memory, but its decision takes at least {place.gpu_bytes}",
    )
    _require(
        place.host_bytes == estimate.host_bytes,
        f"its estimate is {estimate.host_bytes} bytes of host memory, but its decision takes {place.host_bytes}",
    )
    gpu_parts = place.parts(place.gpu) | ({"buffers": place.graph.buffer_bytes} if place.graph.buffer_bytes else {})
    for name, parts, found in (
        ("gpu_parts", gpu_parts, estimate.gpu_parts),
        ("host_parts", place.parts(place.host), estimate.host_parts),
    ):
        _require(parts == found, f"{name} of its estimate is {found}, but its decision takes {parts}")


def _require(holds: bool, wrong: str, do: str = "Plan again") -> None:
    """Raise PlanInvalid if `holds` is False. `wrong`: what is wrong; `do`: what the user can do."""
    if not holds:
        raise PlanInvalid(f"plan: {wrong}. {do}.")


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan atomically: after a crash, the path holds the previous file or none."""
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
    """Read a plan. Call `check` to verify that it fits the model."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanInvalid(
            f"{path}: the plan file does not exist. Write one with `outsize plan`, or correct the path."
        ) from None
    except UnicodeDecodeError:
        raise PlanInvalid(f"{path}: the plan file is not UTF-8 text. Write one with `outsize plan`.") from None
    except OSError as error:
        raise PlanInvalid(
            f"{path}: the plan file cannot be read ({error.strerror}). Write one with `outsize plan`, or correct the "
            "path."
        ) from None
    try:
        return loads(Plan, text, where=str(path))
    except ConfigError as error:
        raise PlanInvalid(str(error)) from None
