"""Finding the tensors inside what modules take and return: tensors, sequences, mappings and dataclasses, nested."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting with every tensor replaced. Mappings other than dict, and dataclasses, are changed through a shallow copy."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, Mapping):
        return type(value)({key: map_tensors(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value
