"""Landings: in which call's backward the gradient of each parameter is complete, as a trial run saw it.

[Note: Weights that some calls read] A layer that runs several times may read a weight in some of its
calls alone, by what the data says: an expert. The plan has its gradient land in the first call of the layer,
which is the last in backward. One that is complete earlier waits for that (runtime/gradients.py). The memory of it is
reserved, since the profiling run has seen other calls read it than the training will.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from outsize.base.errors import ModelUnsupported, tell
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.profile.profiling_pass import ProfilingPass


def read_without_grad(model: nn.Module, graph: BlockGraph, run: ProfilingPass) -> tuple[tuple[int, str], ...]:
    """Calls that have a backward, each with the trainable parameters of its block that it adds no gradient to.

    A teacher's pass under no_grad may share a call with the start of the student's, a layer that runs without grad may
    be followed by code that does not, and a module that layers share may have parts for each of them. A call whose
    backward came after the one in which the gradient was complete has added nothing to it, unless it is a call of the
    same layer: see [Note: Weights that some calls read].
    """
    found = []
    for name, param in model.named_parameters():
        accumulated = run.completions.get(id(param), set())
        for call in graph.users[name] if param.requires_grad else ():
            adds = call in run.skipped or (bool(accumulated) and min(accumulated) <= call)
            if (
                accumulated
                and min(accumulated) >= 0
                and run.layer_of[call] is not None
                and call not in run.without_grad
            ):
                adds = adds or run.layer_of[call] == run.layer_of[min(accumulated)]
            if graph.has_backward[call] and not adds and (call in run.without_grad or bool(accumulated)):
                found.append((call, name))
    return tuple(found)


def require_landings(
    model: nn.Module, graph: BlockGraph, run: ProfilingPass, readers: Mapping[int, Collection[int]]
) -> None:
    """The engine takes each gradient once per backward, in a call that it knows. `readers`: by id of a parameter, the
    calls that were seen to read it.
    """
    for name, param in model.named_parameters():
        accumulated = run.completions.get(id(param), set())
        if accumulated and not graph.backward_users[name]:
            where = graph.call_name(graph.users[name][0]) if graph.users[name] else "no block"
            found = f"{name} has a gradient, and the backward of {where} that reads it is not seen"
            do = f"Read it in the forward of a module of its own, or freeze it with {name}.requires_grad_(False)"
            raise ModelUnsupported(
                tell(
                    "weights outside of layers are read by modules that are called, or on the way to the next layer",
                    found,
                    do,
                )
            )
        early = [
            v
            for v in graph.users[name]
            if graph.has_backward[v] and run.layer_of[v] is not None and v not in run.without_grad | run.skipped
        ]
        if (
            accumulated
            and min(accumulated) >= 0
            and (missed := [v for v in early if v < min(accumulated) and v in readers.get(id(param), ())])
        ):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.call_name(min(accumulated))}, not in "
                f"that of {graph.call_name(missed[0])}, "
                "which reads it first: a value goes from one to the other by another way than a layer's inputs and "
                "outputs. Return that value "
                "from the layer, and compute what depends on a layer's weights in its forward."
            )
        if accumulated and 0 <= min(accumulated) < min(graph.backward_users[name]):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.call_name(min(accumulated))}, which runs "
                "before the block that has it. "
                "Compute what depends on a layer's weights in its forward, or after it has run."
            )
        if len(accumulated) > 1:
            names = " and ".join(dict.fromkeys(graph.call_name(call) for call in sorted(accumulated) if call >= 0))
            raise ModelUnsupported(
                f"{name} gets its gradient in {len(accumulated)} parts, from different calls of {names}, as "
                "with torch.utils.checkpoint(use_reentrant=True) in a "
                "layer that runs several times. Use use_reentrant=False."
            )


def bytes_of_waiting_gradients(
    layers: Sequence[Layer], run: ProfilingPass, readers: Mapping[int, Collection[int]]
) -> int:
    """The most that gradients take which wait for the call that they land in. `run`: a discovery, with the `readers`
    that it saw.
    """
    calls_of_layer: dict[int, list[int]] = {}
    for call, index in enumerate(run.layer_of):
        if index is not None and call not in run.without_grad:
            calls_of_layer.setdefault(index, []).append(call)
    repeated = {layers[index]: calls for index, calls in calls_of_layer.items() if len(calls) > 1}
    chosen: set[tuple[str, str]] = set()
    for layer, calls in repeated.items():
        for name, param in layer.module.named_parameters():
            if param.requires_grad and any(
                call not in readers.get(id(param), ()) for call in calls if call not in run.skipped
            ):
                chosen.add((layer.structure, _choice(layer.module, name)))
    waiting: dict[int, int] = {}
    for layer in repeated:
        for name, param in layer.module.named_parameters():
            if param.requires_grad and any(
                f"{name}.".startswith(f"{prefix}.") for structure, prefix in chosen if structure == layer.structure
            ):
                waiting[id(param)] = param.nbytes
    return sum(waiting.values())


def _choice(layer: nn.Module, name: str) -> str:
    """The innermost list or dict of modules around a weight, of which another may be read the next time. Without one,
    the weight itself.
    """
    parts = name.split(".")
    for num in range(len(parts) - 1, 0, -1):
        if isinstance(layer.get_submodule(".".join(parts[:num])), (nn.ModuleList, nn.ModuleDict)):
            return ".".join(parts[:num])
    return name
