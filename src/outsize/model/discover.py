"""Finds a model's layers: the elements of the stacks in its module tree (model/stacks.py), or of the lists that the
user names.

Layers may share modules and parameters (VeRA's projections, the attention of Zamba): these belong to every layer that
has them. The profiling run shows whether and in which order the layers run (profile/tracer.py). A list whose elements
are never called is no stack of layers, and its parameters belong to the region that reads them.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.base.errors import ConfigError
from outsize.model.parts import describe
from outsize.model.stacks import Named, Stack, find_stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    name: str
    module: nn.Module
    structure: str
    """Equal for layers that do the same work with other weights."""
    is_last: bool
    """It is the last of its list: a region begins when it returns."""
    stack: str = ""
    """Path of its list."""
    stages: "tuple[Layer, ...]" = ()
    """If it is part of a stage: all stages of that list. The stages are the layers if their parts do not feed one
    another.
    """


def find_layers(
    model: nn.Module, paths: Sequence[str] | None = None, *, in_sequentials: bool = True
) -> tuple[Layer, ...]:
    """All layers, list by list in the order of the tree. `paths`: use these lists instead (`model.layers`); empty for
    no layers.
    """
    if paths is None and in_sequentials:
        try:
            return _layers(find_stacks(model))
        except ConfigError:  # several Sequentials share modules
            return find_layers(model, in_sequentials=False)
    return _layers(list(_named_lists(model, paths)) if paths is not None else find_stacks(model, in_sequentials=False))


def _layers(stacks: list[Stack]) -> tuple[Layer, ...]:
    stages = {id(outer): _layers_of([outer]) for stack in stacks if (outer := stack.outer) is not None}
    return _layers_of(stacks, stages)


def _layers_of(stacks: list[Stack], stages: "dict[int, tuple[Layer, ...]] | None" = None) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    seen: set[int] = set()
    for stack in stacks:
        elements = []
        for name, module in stack.elements:
            if (
                id(module) not in seen
            ):  # one that is in a list twice, or in two lists, is one layer that runs repeatedly
                elements.append((name, module))
                seen.add(id(module))
        last = len(elements) - 1
        structures = _structures([module for _, module in elements]) if elements else []
        outer = (stages or {}).get(id(stack.outer), ())
        for i, (name, module) in enumerate(elements):
            layers.append(
                Layer(
                    name=name, module=module, structure=structures[i], is_last=i == last, stack=stack.path, stages=outer
                )
            )
    _require_separate(layers)
    return tuple(layers)


def stages_to_join(
    layers: Sequence[Layer], layer_of: Sequence[int | None], feeds: Mapping[int, int]
) -> "set[tuple[Layer, ...]]":
    """Stages that are layers themselves, since their parts do not feed one another (a layer's experts, the two lists of
    a UNet's block).

    `layer_of`: by call, the layer, None for a region. `feeds`: calls whose output is the input of a later layer, with
    the call of that layer.
    """
    pairs = Counter(layer.stages for layer in layers if layer.stages and not layer.is_last)
    found: Counter[tuple[Layer, ...]] = Counter()
    for maker, taker in ((layer_of[call], layer_of[later]) for call, later in feeds.items()):
        assert maker is not None and taker is not None
        found[layers[maker].stages] += layers[maker].stack == layers[taker].stack
    return {stages for stages in pairs if 2 * found[stages] < pairs[stages]}


def with_stages_joined(layers: Iterable[Layer], joined: "Collection[tuple[Layer, ...]]") -> tuple[Layer, ...]:
    """The layers, with these stages in place of their parts."""
    return tuple(
        dict.fromkeys(layer for part in layers for layer in (part.stages if part.stages in joined else (part,)))
    )


def layers_in_graph(layers: tuple[Layer, ...], blocks: Collection[str]) -> tuple[Layer, ...]:
    """The layers of the module tree that the profiling run found to be blocks, by name."""
    stages = {layer.stages for layer in layers if layer.stages}
    split = {
        part.stages for part in layers if part.name in blocks and all(part.name != stage.name for stage in part.stages)
    }
    return tuple(layer for layer in with_stages_joined(layers, stages - split) if layer.name in blocks)


def _require_separate(layers: list[Layer]) -> None:
    """Refuse a layer that is inside another layer, or is the same module. Layers may share other modules."""
    order = {id(layer.module): i for i, layer in enumerate(layers)}
    for i, layer in enumerate(layers):
        for other in (order[id(module)] for module in layer.module.modules() if id(module) in order):
            if other != i:
                raise ConfigError(
                    f"{layers[max(i, other)].name} shares a module with {layers[min(i, other)].name}, but layers must "
                    "be separate modules. Name the lists of layers with blocks=['path.to.list']."
                )


def _named_lists(model: nn.Module, paths: Sequence[str]) -> Iterable[Stack]:
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"blocks: {path!r} is named {paths.count(path)} times. Name it once.")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            lists = [name for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
            raise ConfigError(f"blocks: the model has no {path!r}. Choose among {', '.join(lists)}.") from None
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise ConfigError(
                f"blocks: {path!r} is a {type(module).__name__}, not an nn.ModuleList or nn.Sequential. Name the list "
                "itself, without an index."
            )
        elements: list[Named] = [
            (f"{path}.{name}" if path else name, element)
            for name, element in module._modules.items()
            if element is not None
        ]
        yield Stack(path=path, elements=elements)


def _structures(modules: list[nn.Module]) -> list[str]:
    """One hash per layer over classes, parameters, buffers and plain settings, without settings that number the
    layers.
    """
    facts = [_facts(module) for module in modules]
    counting = {
        key
        for key, value in facts[0].items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and len(facts) > 1
        and all(isinstance(f.get(key), int) and f[key] - value == i for i, f in enumerate(facts))
    }
    return [
        hashlib.sha256(repr(sorted((k, repr(v)) for k, v in f.items() if k not in counting)).encode()).hexdigest()[:12]
        for f in facts
    ]


def is_setting(value: Any) -> bool:
    """A plain value, or a tuple of these."""
    return isinstance(value, (bool, int, float, str, type(None))) or (
        isinstance(value, tuple) and all(map(is_setting, value))
    )


def _facts(layer: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for path, module in layer.named_modules():
        facts[f"{path}:class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key != "training" and not key.startswith("_") and is_setting(value):
                facts[f"{path}.{key}"] = value
    for i, part in enumerate(describe(layer)):
        facts[f"{i}:part"] = part
    for path, buffer in layer.named_buffers(remove_duplicate=False):
        facts[f"{path}:buffer"] = (tuple(buffer.shape), str(buffer.dtype))
    return facts
