"""Makes the BlockGraph of a model from a profiling pass: which blocks it has, and which parameters each of them
reads.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from outsize.compat import storage_id
from outsize.model.discover import Layer
from outsize.model.graph import Block, BlockGraph, Param
from outsize.model.parts import Part, distinct_tables, named_parts, parts
from outsize.profile.gradient_order import read_without_grad
from outsize.profile.profiling_pass import ProfilingPass


def build_graph(
    model: nn.Module,
    layers: Sequence[Layer],
    run: ProfilingPass,
    readers: Mapping[int, Collection[int]],
    *,
    reads_outside_module: Collection[int],
    side_outputs: Collection[int],
) -> BlockGraph:
    """`readers`: by id of a parameter, the calls that read it."""
    params = dict(named_parts(model))
    names = {id(p): n for n, p in params.items()}
    labels = [block_name(layers, run.layer_of, call) for call in range(len(run.layer_of))]
    order = list(dict.fromkeys(labels))
    members: dict[str, dict[str, None]] = {label: {} for label in order}
    for label, layer in zip(labels, run.layer_of, strict=True):
        if layer is not None:
            members[label].update(dict.fromkeys(names[id(p)] for _, p in named_parts(layers[layer].module)))
    for name, param in params.items():
        for call in sorted(readers.get(id(param), ())):
            members[labels[call]].setdefault(name)
    blocks = []
    for label in order:
        layer = run.layer_of[labels.index(label)]
        kind = "layer" if layer is not None else label if label in ("stem", "head") else "between"
        structure = layers[layer].structure if layer is not None else label
        blocks.append(Block(name=label, kind=kind, structure=structure, params=tuple(members[label])))  # type: ignore[arg-type]
    buffers = {storage_id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()}
    tables = sum(table.nbytes for table in distinct_tables(model))
    graph = BlockGraph(
        blocks=tuple(blocks),
        calls=tuple(order.index(label) for label in labels),
        has_backward=tuple(call in run.reached for call in range(len(labels))),
        params=tuple(_param(part) for part in parts(model)),
        buffer_bytes=sum(buffers.values()) + tables,
        reads_outside_module=tuple(sorted(reads_outside_module)),
        side_outputs=tuple(sorted(side_outputs)),
    )
    return replace(graph, without_grad=read_without_grad(model, graph, run))


def _param(part: Part) -> Param:
    tensor = part.tensor
    return Param(
        name=part.name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
        stands_for=None if part.num_weights == tensor.numel() else part.num_weights,
    )


def block_name(layers: Sequence[Layer], layer_of: Sequence[int | None], call: int) -> str:
    layer = layer_of[call]
    if layer is not None:
        return layers[layer].name
    if call == 0:
        return "stem"
    if call == len(layer_of) - 1:
        return "head"
    following = next(i for i in layer_of[call:] if i is not None)
    # A list that runs several times has several regions before its first layer.
    after = [layer_of[v + 1] for v in range(1, len(layer_of) - 1) if layer_of[v] is None]
    is_repeated = after.count(layer_of[call + 1]) > 1
    return f"between:{layers[following].name}" + (f"#{call}" if is_repeated else "")
