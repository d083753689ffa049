"""The arguments of a call with their tensors moved to a device. A forward's writes into a list, dict or object among
them are applied to the caller's objects too.
"""

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from outsize.model.tensors import items_of, with_items

_Get = Callable[[], Any]
_Move = Callable[[Tensor], Tensor]
_Passed = dict[int, tuple[Any, Any]]
"""By id of a value of the caller: the value, and the one that is passed instead."""


class MovedArguments:
    """`args` and `kwargs` are passed to the forward. A container without tensors to move is passed itself. Of any other
    a copy is passed, and `write_back` applies the changes of the copy to the original."""

    def __init__(self, move: _Move, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._originals: dict[int, tuple[_Get, Any]] = {}
        """By id of a passed container: its getter, and the original."""
        self._copies: list[tuple[Any, Any, dict[Any, _Get]]] = []
        """Containers of the caller, with the copy that is passed and the items that the copy had."""
        passed: _Passed = {}
        self.args = tuple(self._pass(move, value, passed) for value in args)
        self.kwargs = {name: self._pass(move, value, passed) for name, value in kwargs.items()}

    def _pass(self, move: _Move, value: Any, passed: _Passed) -> Any:
        if id(value) not in passed:
            passed[id(value)] = (
                value,
                self._moved(move, value) if isinstance(value, Tensor) else self._copied(move, value, passed),
            )
        return passed[id(value)][1]

    def _moved(self, move: _Move, tensor: Tensor) -> Tensor:
        moved = move(tensor)
        if moved is not tensor:
            # A weak reference, since a forward may drop its inputs to free their memory.
            self._originals[id(moved)] = (weakref.ref(moved), tensor)
        return moved

    def _copied(self, move: _Move, value: Any, passed: _Passed) -> Any:
        before = dict(items_of(value))
        items = {key: self._pass(move, item, passed) for key, item in before.items()}
        if all(items[key] is item for key, item in before.items()):
            return value
        copy = with_items(value, items)
        if copy is not value:
            self._originals[id(copy)] = (lambda: copy, value)
            if not isinstance(value, tuple):
                self._copies.append((value, copy, {key: _getter(item) for key, item in _entries(copy).items()}))
        return copy

    def write_back(self) -> None:
        for original, copy, before in self._copies:
            now = _entries(copy)
            if isinstance(original, list):
                if len(now) != len(before) or any(now[i] is not get() for i, get in before.items()):
                    original[:] = [self._original(item) for item in now.values()]
                continue
            for key in [key for key in before if key not in now]:
                _remove(original, key)
            for key, item in now.items():
                if key not in before or before[key]() is not item:
                    _set(original, key, self._original(item))

    def _original(self, value: Any) -> Any:
        get, original = self._originals.get(id(value), (lambda: None, None))
        return original if get() is value else value


def _getter(item: Any) -> _Get:
    return weakref.ref(item) if isinstance(item, Tensor) else lambda: item


def _entries(value: Any) -> Mapping[Any, Any]:
    """Items by key, index or attribute; of an object all attributes, not only dataclass fields."""
    if isinstance(value, (Mapping, list)):
        return dict(items_of(value))
    return dict(vars(value)) if hasattr(value, "__dict__") else dict(items_of(value))


def _set(value: Any, key: Any, item: Any) -> None:
    if isinstance(value, MutableMapping):
        value[key] = item
    else:
        object.__setattr__(value, key, item)


def _remove(value: Any, key: Any) -> None:
    if isinstance(value, MutableMapping):
        value.pop(key, None)
    elif hasattr(value, key):
        object.__delattr__(value, key)
