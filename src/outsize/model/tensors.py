"""Finding the tensors inside what modules take and return: tensors, sequences, mappings, dataclasses and records, nested."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

_SIMPLE = (Tensor, bool, int, float, str, type(None))


def _is_record(value: Any) -> bool:
    """An instance of a class without bases whose attributes are tensors and plain values, such as PEFT's ShadowCarrier.

    A cache is none: layers write to it.
    """
    kind = type(value)
    if kind.__mro__ != (kind, object) or kind.__module__ == "builtins" or not hasattr(value, "__dict__"):
        return False
    fields = vars(value).values()
    return any(isinstance(item, Tensor) for item in fields) and all(isinstance(item, _SIMPLE) for item in fields)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a value that may hold tensors holds, by key, index or attribute."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return vars(value).items() if _is_record(value) else ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for _, item in _items(value):
            yield from tensors_in(item)


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value by their paths, such as `features.input_ids` and `images.0`."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for name, item in _items(value):
            yield from named_tensors(item, f"{path}.{name}" if path else str(name))


def with_grad(value: Any) -> list[Tensor]:
    """The distinct tensors in `value` that require grad."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with every tensor replaced. Mappings other than dict, dataclasses and records are changed in a shallow copy."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, map_tensors(function, getattr(value, field.name)))
        return copied
    if _is_record(value):
        copied = copy.copy(value)
        vars(copied).update({name: function(item) for name, item in vars(value).items() if isinstance(item, Tensor)})
        return copied
    return value
