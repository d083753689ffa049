"""Finding the tensors inside what modules take and return: tensors, sequences, mappings and dataclasses, nested."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def with_grad(value: Any) -> list[Tensor]:
    """The distinct tensors in `value` that require grad."""
    return list({id(t): t for t in tensors_in(value) if t.requires_grad}.values())


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with every tensor replaced. Mappings other than dict, and dataclasses, are changed in a shallow copy."""
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
    return value
