"""Checks that the trial run's gradients came in where the plan expects them: in the backward of the first block that reads the weight."""

from collections.abc import Collection, Mapping

from torch import nn

from outsize.base.errors import ModelUnsupported, tell
from outsize.model.graph import BlockGraph


def require_landings(model: nn.Module, graph: BlockGraph, came: Mapping[int, int], skipped: Collection[int]) -> None:
    """`came`: by id of a parameter, the visit in whose backward its gradient was complete, -1 if in none. `skipped`: visits that did not run."""
    for name, param in model.named_parameters():
        if id(param) not in came:
            continue
        with_backward = [visit for visit in graph.users[name] if graph.has_backward[visit]]
        if not with_backward:
            where = graph.visit_name(graph.users[name][0]) if graph.users[name] else "no block"
            found = f"{name} has a gradient, and the backward of {where} that reads it is not seen"
            do = f"Read it in the forward of a module of its own, or freeze it with {name}.requires_grad_(False)"
            raise ModelUnsupported(tell("weights outside of layers are read by modules that are called, or on the way to the next layer", found, do))
        visit, first = came[id(param)], next((visit for visit in with_backward if visit not in skipped), None)
        if first is not None and visit not in (first, -1):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.visit_name(visit)}, not in that of {graph.visit_name(first)}, "
                "which reads it first: a value goes from one to the other by another way than a layer's inputs and outputs. Return that value "
                "from the layer, and compute what depends on a layer's weights in its forward."
            )
