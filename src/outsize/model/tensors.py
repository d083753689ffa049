"""Finds the tensors in arguments and outputs of modules: in nested sequences, mappings, dataclasses and records."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

_SIMPLE = (Tensor, bool, int, float, str, type(None))


def _is_record(value: Any, outer: tuple[int, ...] = ()) -> bool:
    """An instance of a class without bases whose attributes are tensors, plain values and containers of these:
    SimpleNamespace, PEFT's ShadowCarrier.

    It may have no tensor yet: a layer that writes one into it gets a copy for its second run, as of a dict.
    transformers' caches are no records: they hold objects of other kinds. `outer`: ids of the values that hold it.
    """
    kind = type(value)
    if kind.__mro__ != (kind, object) or kind.__module__ == "builtins" or not getattr(value, "__dict__", None):
        return False
    return _is_plain(vars(value), (*outer, id(value)))


def _is_plain(value: Any, outer: tuple[int, ...]) -> bool:
    if isinstance(value, _SIMPLE):
        return True
    if id(value) in outer:
        return False
    if isinstance(value, (Mapping, tuple, list)) or is_dataclass(value):
        return all(_is_plain(item, (*outer, id(value))) for _, item in items_of(value))
    return _is_record(value, outer)


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container by key, index or attribute."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return vars(value).items() if _is_record(value) else ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for _, item in items_of(value):
            yield from tensors_in(item)


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value by their paths, such as `features.input_ids` and `images.0`."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for name, item in items_of(value):
            yield from named_tensors(item, f"{path}.{name}" if path else str(name))


def with_grad(value: Any) -> list[Tensor]:
    """The distinct tensors in `value` that require grad."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())


def all_with_grad(value: Any) -> list[Tensor]:
    """`with_grad`, also for tensors in attributes of other objects: a model may return a class of its own."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Tensor):
            if item.requires_grad:
                found[id(item)] = item
        elif not isinstance(item, (*_SIMPLE, nn.Module, type)) and id(item) not in seen:
            seen[id(item)] = item
            inside = [inner for _, inner in items_of(item)] or _attributes(item)
            todo.extend(reversed(inside))
    return list(found.values())


def _attributes(value: Any) -> list[Any]:
    """Attributes of an instance of a Python class, or the items of a set."""
    if isinstance(value, (set, frozenset)):
        return [*value]
    if type(value).__module__ == "builtins":
        return []
    slots = [name for kind in type(value).__mro__ for name in _names_of_slots(kind)]
    return (
        [*vars(value).values()]
        if hasattr(value, "__dict__")
        else [getattr(value, name) for name in slots if hasattr(value, name)]
    )


def _names_of_slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with every tensor replaced. All containers are copied."""
    if isinstance(value, Tensor):
        return function(value)
    return with_items(value, {key: map_tensors(function, item) for key, item in items_of(value)})


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """A copy of a container with other values for its keys, indices or fields. Mappings other than dict, dataclasses
    and records are changed in a shallow copy. What is no container, or cannot be changed, is returned itself."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    if isinstance(value, (tuple, list)):
        return type(value)(items.values())
    if type(value) is dict:
        return dict(items)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in items.items():
            mapped[key] = item
        return mapped
    if isinstance(value, Mapping) or not (items or is_dataclass(value)):
        return value
    copied = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(copied, name, item)
    return copied
