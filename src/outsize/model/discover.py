"""Finds a model's layers from its module tree: the elements of every outermost nn.ModuleList.

No table of model families. A list inside a layer (T5's sub-layers, a layer's experts) belongs to that layer. Layers may share modules
and parameters (VeRA's projections, the attention of Zamba): these belong to every layer that has them. Whether and in which order the
layers run is not read off the tree but seen when the model runs (profile/tracer.py): a list whose elements are never called
is no stack of layers, and its parameters belong to the region that reads them.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.base.errors import ConfigError, tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    name: str
    module: nn.Module
    structure: str
    """Equal for layers that do the same work on other weights."""
    is_last: bool
    """Of its list: a region begins when it returns."""


def find_layers(model: nn.Module, paths: Sequence[str] | None = None) -> tuple[Layer, ...]:
    """All layers, list by list in the order of the tree. `paths` names the lists instead (`model.layers`)."""
    lists = list(_named_lists(model, paths)) if paths else list(_outermost_lists(model))
    layers: list[Layer] = []
    for path, modules in lists:
        structures = _structures(modules) if modules else []
        for i, module in enumerate(modules):
            name = f"{path}.{i}" if path else str(i)
            layers.append(Layer(name=name, module=module, structure=structures[i], is_last=i + 1 == len(modules)))
    _require_separate(layers)
    return tuple(layers)


def _require_separate(layers: list[Layer]) -> None:
    """Refuse a layer that is another layer, or is inside one. A module that is inside of several layers is fine."""
    order = {id(layer.module): i for i, layer in enumerate(layers)}
    for i, layer in enumerate(layers):
        for other in (order[id(module)] for module in layer.module.modules() if id(module) in order):
            if other != i:
                found = f"{layers[max(i, other)].name} shares a module with {layers[min(i, other)].name}"
                raise ConfigError(tell("layers do not contain one another", found, "Name the lists of layers with blocks=['path.to.list']"))


def _outermost_lists(model: nn.Module, path: str = "") -> Iterable[tuple[str, list[nn.Module]]]:
    for name, child in model.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            if any(True for _ in child.parameters()):
                yield where, list(child)
        else:
            yield from _outermost_lists(child, where)


def _named_lists(model: nn.Module, paths: Sequence[str]) -> Iterable[tuple[str, list[nn.Module]]]:
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(tell("blocks names each list of layers once", f"{path!r} is named {paths.count(path)} times", "Name it once"))
        try:
            module = model.get_submodule(path)
        except AttributeError:
            lists = [name for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
            raise ConfigError(tell("blocks names a list of modules in the model", f"there is no {path!r}", f"Choose among {', '.join(lists)}")) from None
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            found = f"{path!r} is a {type(module).__name__}"
            raise ConfigError(tell("blocks names an nn.ModuleList or nn.Sequential", found, "Name the list itself, without an index"))
        yield path, list(module)


def _structures(modules: list[nn.Module]) -> list[str]:
    """One hash per layer over classes, parameters, buffers and plain settings; settings that merely count the layers do not enter."""
    facts = [_facts(module) for module in modules]
    counting = {
        key
        for key, value in facts[0].items()
        if isinstance(value, int) and not isinstance(value, bool) and len(facts) > 1
        and all(isinstance(f.get(key), int) and f[key] - value == i for i, f in enumerate(facts))
    }  # fmt: skip
    return [hashlib.sha256(repr(sorted((k, repr(v)) for k, v in f.items() if k not in counting)).encode()).hexdigest()[:12] for f in facts]


def _facts(layer: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for path, module in layer.named_modules():
        facts[f"{path}:class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key != "training" and not key.startswith("_") and isinstance(value, (bool, int, float, str, tuple, type(None))):
                facts[f"{path}.{key}"] = value
    for path, param in layer.named_parameters(remove_duplicate=False):
        facts[f"{path}:param"] = (tuple(param.shape), str(param.dtype), param.requires_grad)
    for path, buffer in layer.named_buffers(remove_duplicate=False):
        facts[f"{path}:buffer"] = (tuple(buffer.shape), str(buffer.dtype))
    return facts
