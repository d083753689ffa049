"""Finds the globals and class attributes that the code of a model's modules refers to."""

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_DEPTH = 3
"""Functions that a method calls are searched too, and those that they call."""


def used_globals(model: nn.Module) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """Names and values of globals, attributes of the modules' classes, and variables in closures, with the namespace of
    a global. Code of torch is not searched.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__ if not _is_of_torch(base.__module__)}
    seen: set[int] = set()
    for each in sorted(classes, key=lambda each: (each.__module__, each.__qualname__)):
        for name, value in vars(each).items():
            if (function := _function(value)) is not None:
                yield from _used_by(function, _DEPTH, seen)
            elif not name.startswith("__"):
                yield name, value, None
    for module in model.modules():
        for value in vars(module).values():  # a forward that a user or another library has replaced
            if (function := _function(value)) is not None:
                yield from _used_by(function, _DEPTH, seen)


def _function(value: Any) -> FunctionType | None:
    value = value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value
    value = value.fget if isinstance(value, property) else value
    return value if isinstance(value, FunctionType) and not _is_of_torch(value.__module__) else None


def _used_by(function: FunctionType, depth: int, seen: set[int]) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    table = function.__globals__
    found = [(name, table[name], table) for name in sorted(_names_in(function.__code__)) if name in table]
    held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inside = [(name, cell.cell_contents, None) for name, cell in held if _is_set(cell)]
    inside.append(("", getattr(function, "__wrapped__", None), None))
    for name, value, where in (*found, *inside):
        if (other := _function(value)) is None:
            yield name, value, where
        elif depth:
            yield from _used_by(other, depth - 1, seen)


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@cache
def _names_in(code: CodeType) -> frozenset[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_of_torch(module: str | None) -> bool:
    return module is None or module.split(".")[0] in ("torch", "builtins", "typing", "abc")
