"""What shorter batches leave free under a plan that was made for the longest."""

from outsize.base.units import show_bytes
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.plan.placement import Placement
from outsize.plan.plan import Plan
from outsize.plan.schedule import compile_schedule
from outsize.planner.memory import activation_peak
from outsize.profile.trace import ModelTrace


def gpu_bytes_with(plan: Plan, graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace) -> int | None:
    """The device at its fullest, under the plan, with batches like that of the trace. None where its layers do not know
    what they are to do.
    """
    strategies = plan.decision.strategies
    if trace.graph != plan.graph or any(
        strategy not in trace.strategies(call) for call, strategy in enumerate(strategies)
    ):
        return None
    # What is allocated for the whole run is as large as the longest batch needs it.
    place = Placement(graph, layout, plan.decision, plan.step_config, plan.work, plan.shared)
    work = trace.works(strategies)
    other = Placement(graph, layout, plan.decision, plan.step_config, work, trace.shared)
    schedule = compile_schedule(place, only_steps=True)
    peak, _ = activation_peak(schedule, other, trace.held_bytes)
    return place.gpu_bytes + peak


def of_half_length(plan: Plan, graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace) -> str:
    """In words, for a trace of batches that are half as long; empty where nothing can be said."""
    gpu_bytes = gpu_bytes_with(plan, graph, layout, trace)
    if gpu_bytes is None:
        return ""
    return (
        f"batches half as long leave {show_bytes(max(0, plan.estimate.gpu_bytes - gpu_bytes))} more free (GPU "
        f"{show_bytes(gpu_bytes)})"
    )
