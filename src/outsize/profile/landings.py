"""Landings: in which visit's backward the gradient of each parameter is complete, as a trial run saw it.

[Note: Weights that some calls read]
A layer that runs several times may read a weight in some of its calls alone, by what the data says: an expert. The plan has its gradient land in the first
call of the layer, which is the last in backward. One that is complete earlier waits for that (runtime/gradients.py). The memory of it is reserved, since the
profiling run has seen other calls read it than the training will.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from outsize.base.errors import ModelUnsupported, tell
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.profile.passes import Pass


def read_without_grad(model: nn.Module, graph: BlockGraph, run: Pass) -> tuple[tuple[int, str], ...]:
    """Visits that have a backward, each with the trainable parameters of its block that it adds no gradient to.

    A teacher's pass under no_grad may share a visit with the start of the student's, a layer that runs without grad may be followed by code that
    does not, and a module that layers share may have parts for each of them. A visit whose backward came after the one in which the gradient was
    complete has added nothing to it, unless it is a call of the same layer: see [Note: Weights that some calls read].
    """
    found = []
    for name, param in model.named_parameters():
        landed = run.landings.get(id(param), set())
        for visit in graph.users[name] if param.requires_grad else ():
            adds = visit in run.skipped or (bool(landed) and min(landed) <= visit)
            if landed and min(landed) >= 0 and run.layer_of[visit] is not None and visit not in run.without_grad:
                adds = adds or run.layer_of[visit] == run.layer_of[min(landed)]
            if graph.has_backward[visit] and not adds and (visit in run.without_grad or bool(landed)):
                found.append((visit, name))
    return tuple(found)


def require_landings(model: nn.Module, graph: BlockGraph, run: Pass, readers: Mapping[int, Collection[int]]) -> None:
    """The engine takes each gradient once per backward, in a visit that it knows. `readers`: by id of a parameter, the visits that were seen to read it."""
    for name, param in model.named_parameters():
        landed = run.landings.get(id(param), set())
        if landed and not graph.backward_users[name]:
            where = graph.visit_name(graph.users[name][0]) if graph.users[name] else "no block"
            found = f"{name} has a gradient, and the backward of {where} that reads it is not seen"
            do = f"Read it in the forward of a module of its own, or freeze it with {name}.requires_grad_(False)"
            raise ModelUnsupported(tell("weights outside of layers are read by modules that are called, or on the way to the next layer", found, do))
        early = [v for v in graph.users[name] if graph.has_backward[v] and run.layer_of[v] is not None and v not in run.without_grad | run.skipped]
        if landed and min(landed) >= 0 and (missed := [v for v in early if v < min(landed) and v in readers.get(id(param), ())]):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.visit_name(min(landed))}, not in that of {graph.visit_name(missed[0])}, "
                "which reads it first: a value goes from one to the other by another way than a layer's inputs and outputs. Return that value "
                "from the layer, and compute what depends on a layer's weights in its forward."
            )
        if landed and 0 <= min(landed) < min(graph.backward_users[name]):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.visit_name(min(landed))}, which runs before the block that has it. "
                "Compute what depends on a layer's weights in its forward, or after it has run."
            )
        if len(landed) > 1:
            names = " and ".join(dict.fromkeys(graph.visit_name(visit) for visit in sorted(landed) if visit >= 0))
            raise ModelUnsupported(
                f"{name} gets its gradient in {len(landed)} parts, from different calls of {names}, as with torch.utils.checkpoint(use_reentrant=True) in a "
                "layer that runs several times. Use use_reentrant=False."
            )


def bytes_of_waiting_gradients(layers: Sequence[Layer], run: Pass, readers: Mapping[int, Collection[int]]) -> int:
    """The most that gradients take which wait for the visit that they land in. `run`: a scout, with the `readers` that it saw."""
    calls: dict[int, list[int]] = {}
    for visit, index in enumerate(run.layer_of):
        if index is not None and visit not in run.without_grad:
            calls.setdefault(index, []).append(visit)
    repeated = {layers[index]: visits for index, visits in calls.items() if len(visits) > 1}
    chosen: set[tuple[str, str]] = set()
    for layer, visits in repeated.items():
        for name, param in layer.module.named_parameters():
            if param.requires_grad and any(visit not in readers.get(id(param), ()) for visit in visits if visit not in run.skipped):
                chosen.add((layer.structure, _choice(layer.module, name)))
    waiting: dict[int, int] = {}
    for layer in repeated:
        for name, param in layer.module.named_parameters():
            if param.requires_grad and any(f"{name}.".startswith(f"{prefix}.") for structure, prefix in chosen if structure == layer.structure):
                waiting[id(param)] = param.nbytes
    return sum(waiting.values())


def _choice(layer: nn.Module, name: str) -> str:
    """The innermost list or dict of modules around a weight, of which another may be read the next time. Without one, the weight itself."""
    parts = name.split(".")
    for num in range(len(parts) - 1, 0, -1):
        if isinstance(layer.get_submodule(".".join(parts[:num])), (nn.ModuleList, nn.ModuleDict)):
            return ".".join(parts[:num])
    return name
