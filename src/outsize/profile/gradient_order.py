"""Determines in which call's backward the gradient of each parameter is complete, from the profiling run.

[Note: Weights that some calls read] A layer that runs several times may read a weight in some of its calls only,
depending on the data: an expert. In the plan its gradient is complete in the first call of the layer, which is the last
in backward. A gradient that is complete earlier waits for that call (runtime/gradients.py). Its memory is reserved,
since other calls read it in the profiling run than will in training.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from outsize.base.errors import ModelUnsupported
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.profile.profiling_pass import ProfilingPass


def read_without_grad(model: nn.Module, graph: BlockGraph, run: ProfilingPass) -> tuple[tuple[int, str], ...]:
    """Pairs of a call that has a backward and a trainable parameter of its block to which it adds no gradient.

    A teacher's pass under no_grad may share a call with the start of the student's. A layer that runs without grad may
    be followed by code with grad. A module that layers share may have parts for each of them. A call whose backward
    came after the one in which the gradient was complete has added nothing to it, unless it is a call of the same
    layer: see [Note: Weights that some calls read].
    """
    found = []
    for name, param in model.named_parameters():
        completed_in = run.completions.get(id(param), set())
        for call in graph.users[name] if param.requires_grad else ():
            adds = call in run.skipped or (bool(completed_in) and min(completed_in) <= call)
            is_layer_with_grad = run.layer_of[call] is not None and call not in run.without_grad
            if completed_in and min(completed_in) >= 0 and is_layer_with_grad:
                adds = adds or run.layer_of[call] == run.layer_of[min(completed_in)]
            if graph.has_backward[call] and not adds and (call in run.without_grad or bool(completed_in)):
                found.append((call, name))
    return tuple(found)


def require_known_order(
    model: nn.Module, graph: BlockGraph, run: ProfilingPass, readers: Mapping[int, Collection[int]]
) -> None:
    """Refuse a model with a gradient that is not complete once per backward, in the call that the graph has. `readers`:
    by id of a parameter, the calls that were seen to read it.
    """
    for name, param in model.named_parameters():
        completed_in = run.completions.get(id(param), set())
        if not completed_in:
            continue
        if not graph.backward_users[name]:
            where = graph.call_name(graph.users[name][0]) if graph.users[name] else "no block"
            raise ModelUnsupported(
                f"{name} has a gradient, but no backward of a block that reads it ({where}) was seen: it is read "
                "outside of layers by code that is in no called module. Read it in the forward of a module of its own, "
                f"or freeze it with {name}.requires_grad_(False)."
            )
        first = min(completed_in)
        measured_layers = [
            v
            for v in graph.users[name]
            if graph.has_backward[v] and run.layer_of[v] is not None and v not in run.without_grad | run.skipped
        ]
        missed = [v for v in measured_layers if v < first and v in readers.get(id(param), ())]
        if first >= 0 and missed:
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.call_name(first)}, not in that of "
                f"{graph.call_name(missed[0])}, which reads it first: a value passes from one to the other "
                "outside of the layers' inputs and outputs. Return that value from the layer, and compute what "
                "depends on a layer's weights in its forward."
            )
        if 0 <= first < min(graph.backward_users[name]):
            raise ModelUnsupported(
                f"{name}: its gradient is complete in the backward of {graph.call_name(first)}, which runs before the "
                "block that has it. Compute what depends on a layer's weights in its forward, or after it has run."
            )
        if len(completed_in) > 1:
            names = " and ".join(dict.fromkeys(graph.call_name(call) for call in sorted(completed_in) if call >= 0))
            raise ModelUnsupported(
                f"{name} gets its gradient in {len(completed_in)} parts, from different calls of {names}, as with "
                "torch.utils.checkpoint(use_reentrant=True) in a layer that runs several times. Use "
                "use_reentrant=False."
            )


def bytes_of_waiting_gradients(
    model: nn.Module, layers: Sequence[Layer], run: ProfilingPass, readers: Mapping[int, Collection[int]]
) -> int:
    """The most bytes of gradients that wait for the call in which the plan has them complete. `run`: a discovery pass,
    with the `readers` that it saw.
    """
    calls_of_layer: dict[int, list[int]] = {}
    for call, index in enumerate(run.layer_of):
        if index is not None and call not in run.without_grad:
            calls_of_layer.setdefault(index, []).append(call)
    repeated = {layers[index]: calls for index, calls in calls_of_layer.items() if len(calls) > 1}
    optional: set[tuple[str, str]] = set()
    """By structure of a layer: parts that some of its calls do not read."""
    for layer, calls in repeated.items():
        for name, param in layer.module.named_parameters():
            measured = [call for call in calls if call not in run.skipped]
            if param.requires_grad and any(call not in readers.get(id(param), ()) for call in measured):
                optional.add((layer.structure, _list_around(layer.module, name)))
    waiting: dict[int, int] = {}
    for layer in repeated:
        prefixes = [prefix for structure, prefix in optional if structure == layer.structure]
        for name, param in layer.module.named_parameters():
            if param.requires_grad and any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes):
                waiting[id(param)] = param.nbytes
    # What code after a call of a layer reads (a norm after the second call) belongs to the block of that layer, too.
    own = {id(param) for layer in layers for param in layer.module.parameters()}
    first_call = {call: calls[0] for calls in calls_of_layer.values() for call in calls}
    for param in model.parameters():
        reads = readers.get(id(param), ()) if param.requires_grad and id(param) not in own else ()
        if reads and min(first_call.get(call, call) for call in reads) < min(reads):
            waiting[id(param)] = param.nbytes
    return sum(waiting.values())


def _list_around(layer: nn.Module, name: str) -> str:
    """The innermost list or dict of modules that a weight is in, from which the next call may read another element.
    Without one, the weight itself.
    """
    parts = name.split(".")
    for num in range(len(parts) - 1, 0, -1):
        if isinstance(layer.get_submodule(".".join(parts[:num])), (nn.ModuleList, nn.ModuleDict)):
            return ".".join(parts[:num])
    return name
