"""Which tensors of a layer a changed setting resizes."""

from collections.abc import Mapping

from torch import Tensor, nn

from outsize.methods.bypass.axes import Axis, Shapes, new_layer, shapes_of, with_sizes
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.subblocks import Kind

Resizing = tuple[int, int, int]
"""The dimension that changes, its size before and then."""


def new_module(parts: LayerParts, kind: Kind, sizes: Mapping[Axis, int], *, on_meta: bool = True) -> nn.Module:
    """A sub-block's module of the teacher's class with other sizes, without values."""
    layer = new_layer(parts.layer, with_sizes(parts.config, sizes), parts.index, on_meta=on_meta)
    return layer.get_submodule(parts.subblocks[kind].module)


def resizings(parts: LayerParts, kind: Kind, sizes: Mapping[Axis, int]) -> dict[str, Resizing]:
    """By name in the layer, of the tensors of a sub-block that are resized."""
    prefix = f"{parts.subblocks[kind].module}."
    given = parts.layer.get_submodule(prefix[:-1]).state_dict(prefix=prefix)
    return changed_dims(given, shapes_of(new_module(parts, kind, sizes), prefix))


def changed_dims(given: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Resizing]:
    found = {}
    for name, shape in shapes.items():
        for dim, (was, now) in enumerate(zip(given[name].shape, shape, strict=True)):
            if was != now:
                found[name] = dim, was, now
    return found
