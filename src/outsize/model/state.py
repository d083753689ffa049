"""The state that a module keeps from one forward to the next: buffers, and what its attributes and the globals that its
code uses hold: tensors, arrays, plain values and random generators, in containers and objects.

A forward that writes to it must not run twice in a step, and profiling restores it.
"""

import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from outsize.compat import detect_fake_mode, storage_id
from outsize.model.globals import used_globals
from outsize.model.tensors import map_tensors, tensors_in
from outsize.model.weights import is_unmaterialized

_PLAIN = (bool, int, float, complex, str, type(None))
_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_MAPPINGS, list, set, deque)
"""These types alone: items of a subclass may be made when they are read."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_WITHOUT_STATE = sys.stdlib_module_names | {"torch", "outsize"}
"""Packages whose objects are not searched. Others are if the class of a module is of the same package (a meter beside a
layer, not a trainer), and SimpleNamespace, which is in `types`."""


class _Saved(Protocol):
    """One part of the state, as it was."""

    def changed(self) -> str | None:
        """The name of what has changed in this part."""
        ...

    def restore(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    path: str
    value: Tensor
    data: Tensor
    copy: Tensor | None
    """Copy of the values. None if they are unknown (fake tensors)."""
    version: int

    def changed(self) -> str | None:
        is_same = _version(self.value) == self.version and (self.copy is None or _equal(self.value, self.copy))
        return None if is_same else self.path

    def restore(self) -> None:
        if self.copy is None:
            return
        is_moved = storage_id(self.value.untyped_storage()) != storage_id(self.data.untyped_storage())
        if is_moved or self.value.shape != self.data.shape:
            self.value.data = self.data  # to the device, or to another size
        # Expanded tensors cannot be written, by the model or by this code.
        if all(stride or size == 1 for size, stride in zip(self.value.shape, self.value.stride(), strict=True)):
            with torch.no_grad():
                if not _equal(self.value, self.copy):
                    self.value.copy_(self.copy)


@dataclass(frozen=True, slots=True)
class _SavedArray:
    path: str
    value: "np.ndarray[Any, Any]"
    copy: "np.ndarray[Any, Any]"

    def changed(self) -> str | None:
        return None if self.value.tobytes() == self.copy.tobytes() else self.path

    def restore(self) -> None:
        if self.value.tobytes() != self.copy.tobytes():
            self.value[...] = self.copy


@dataclass(frozen=True, slots=True)
class _SavedGenerator:
    path: str
    value: Any
    state: Any

    def changed(self) -> str | None:
        return None if _equal_states(_state_of(self.value), self.state) else f"the state of {self.path}"

    def restore(self) -> None:
        if isinstance(self.value, np.random.Generator):
            self.value.bit_generator.state = self.state
        elif isinstance(self.value, random.Random):
            self.value.setstate(self.state)
        else:
            self.value.set_state(self.state)


@dataclass(frozen=True, slots=True)
class _SavedContainer:
    path: str
    value: Any
    items: list[Any]
    """Those of a mapping are pairs."""

    def changed(self) -> str | None:
        now = _items(self.value)
        is_same = len(now) == len(self.items) and all(map(_is_same, now, self.items))
        return None if is_same else self.path

    def restore(self) -> None:
        if self.changed() is None:
            return
        self.value.clear()
        if isinstance(self.value, _MAPPINGS):
            for key, value in self.items:
                self.value[key] = value
        else:
            (self.value.update if isinstance(self.value, set) else self.value.extend)(self.items)


@dataclass(frozen=True, slots=True)
class _SavedNames:
    """Attributes, buffers or globals: names bound to values."""

    path: str
    table: dict[str, Any]
    before: dict[str, Any]
    names: Callable[[], Iterable[str]]
    """The names that are bound now."""

    def changed(self) -> str | None:
        for name in self.names():
            was, now = self.before.get(name), self.table[name]
            if was is now:
                continue
            if isinstance(was, _PLAIN) and name in self.before:
                if not _is_same(was, now):
                    return _join(self.path, name)
            elif next(tensors_in(was), None) is not None or next(tensors_in(now), None) is not None:
                return _join(self.path, name)
        return next((_join(self.path, name) for name in self.before if name not in self.table), None)

    def restore(self) -> None:
        for name in [name for name in self.names() if name not in self.before]:
            del self.table[name]
        self.table.update(self.before)


@dataclass(frozen=True, slots=True)
class _SavedHooks:
    """transformers registers hooks in the first forward that needs them, and an attribute that says so."""

    table: dict[Any, Any]
    before: dict[Any, Any]

    def changed(self) -> str | None:
        return None

    def restore(self) -> None:
        if self.table.keys() != self.before.keys():
            self.table.clear()
            self.table.update(self.before)


class ModuleState:
    def __init__(self, module: nn.Module):
        knows_values = detect_fake_mode() is None
        self._saved = [saved for path, value in _parts_of(module) for saved in _save(path, value, knows_values)]
        for name, value, table in used_globals(module):
            if table is not None and isinstance(value, (bool, int, float)):
                self._saved.append(_SavedNames("", table, {name: value}, partial(_one_name, name)))

    def changed(self) -> str | None:
        """The name of the first part of the state that has changed."""
        return next((name for saved in self._saved if (name := saved.changed()) is not None), None)

    def restore(self) -> None:
        for saved in self._saved:
            saved.restore()


def generators_of(module: nn.Module) -> Iterator[Any]:
    """Random generators that a module's forward may draw from, beside the global ones of torch, numpy and Python."""
    return (value for _, value in _parts_of(module) if isinstance(value, _GENERATORS))


def _save(path: str, value: Any, knows_values: bool) -> Iterator[_Saved]:
    if isinstance(value, Tensor):
        has_values = knows_values and value.layout == torch.strided and not value.is_meta
        has_values = has_values and not is_unmaterialized(value)
        copy = value.detach().clone() if has_values else None
        yield _SavedTensor(path, value, value.data, copy, _version(value))
    elif isinstance(value, np.ndarray):
        yield _SavedArray(path, value, value.copy())
    elif isinstance(value, _GENERATORS):
        yield _SavedGenerator(path, value, _state_of(value))
    elif isinstance(value, nn.Module):
        yield _SavedNames(path, value._buffers, dict(value._buffers), partial(list, value._buffers))
        yield _SavedNames(path, value.__dict__, {name: vars(value)[name] for name in _own(value)}, partial(_own, value))
        tables = [table for name in _HOOKS if (table := getattr(value, name, None)) is not None]
        yield from (_SavedHooks(table, dict(table)) for table in tables)
    elif type(value) in _CONTAINERS:
        yield _SavedContainer(path, value, _items(value))
    elif not isinstance(value, tuple):
        yield _SavedNames(path, vars(value), dict(vars(value)), partial(list, vars(value)))


def _parts_of(module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[tuple[str, Any]]:
    """What holds the state of a module, each once, by its path: modules, also those that are hidden in a plain list;
    buffers and other tensors that are no parameters; arrays, generators, containers and objects. Not what is in the
    modules `without`.
    """
    packages = {_package(type(part)) for part in module.modules()} - _WITHOUT_STATE | {"types"}
    seen: dict[int, Any] = {id(part): part for part in without}
    used = [(name, value) for name, value, _ in used_globals(module) if not isinstance(value, nn.Module)]
    todo: list[tuple[str, Any, bool]] = [*((name, value, False) for name, value in reversed(used)), ("", module, True)]
    while todo:
        path, value, in_objects = todo.pop()
        if isinstance(value, (*_PLAIN, nn.Parameter, type)) or id(value) in seen:
            continue
        inside: Iterable[tuple[Any, Any]]
        if isinstance(value, nn.Module):
            own = ((name, vars(value)[name]) for name in _own(value))
            inside = [*value._buffers.items(), *own, *value._modules.items()]
        elif type(value) in _CONTAINERS or isinstance(value, tuple):
            inside = value.items() if isinstance(value, dict) else enumerate(value)
        elif isinstance(value, (Tensor, np.ndarray, *_GENERATORS)):
            inside = ()
        elif in_objects and hasattr(value, "__dict__") and _package(type(value)) in packages:
            inside = vars(value).items()
        else:
            continue
        seen[id(value)] = value
        yield path, value
        todo += reversed([(_join(path, str(name)), item, in_objects) for name, item in inside])


class BoundAttributes:
    """What the first forward of a module leaves behind: values that it binds to attributes for other code to read (an
    auxiliary loss, an attention map), and tensors that later forwards use again (a mask, a table of positions).
    """

    def __init__(self, module: nn.Module, *, without: Iterable[nn.Module] = ()):
        """`without`: modules inside it that have a record of their own."""
        self._module, self._without = module, tuple(without)
        self._before = self._now()
        self._storages = {key: weakref.ref(storage) for key, storage in self._storages_now().items()}
        self._buffers = {
            storage_id(buffer.untyped_storage()): buffer.untyped_storage().nbytes() for buffer in module.buffers()
        }
        self._values: dict[tuple[str, str], Any] = {}
        self.num_bytes = 0
        """Bytes on the device that stay from one step to the next, beside those of the buffers from before."""

    def _now(self) -> dict[tuple[str, str], Any]:
        return {(path, name): vars(part)[name] for path, part in self._module.named_modules() for name in _own(part)}

    def _tensors_now(self) -> Iterator[Tensor]:
        tensors = (value for _, value in _parts_of(self._module, self._without) if isinstance(value, Tensor))
        return (tensor for tensor in tensors if tensor.layout == torch.strided)

    def _storages_now(self) -> dict[int, torch.UntypedStorage]:
        return {storage_id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in self._tensors_now()}

    def forward_ran(self, device: torch.device, is_static: Callable[[Tensor], bool]) -> None:
        """Keep the values that are new, tensors without their graph."""
        new = {
            key: value
            for key, value in self._now().items()
            if key not in self._before or self._before[key] is not value
        }
        self._values = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), new)
        self._before = {}
        now = self._storages_now()
        others = {storage_id(t.untyped_storage()) for t in self._tensors_now() if t.device != device or is_static(t)}
        made = [
            storage.nbytes()
            for key, storage in now.items()
            if key not in others and (key not in self._storages or self._storages[key]() is not storage)
        ]
        self.num_bytes = max(0, sum(made) - sum(size for key, size in self._buffers.items() if key not in now))

    def bind_to(self, module: nn.Module) -> None:
        """Bind the values to another module of the same structure, as if its forward had run."""
        for (path, name), value in self._values.items():
            module.get_submodule(path).__dict__[name] = value


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _equal_states(one: Any, two: Any) -> bool:
    """Whether two states of one generator are equal: tensors, or tuples and dicts of numbers and arrays."""
    if isinstance(one, dict):
        return all(_equal_states(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(_equal_states, one, two))
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    return np.array_equal(one, two) if isinstance(one, np.ndarray) else bool(one == two)


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _version(tensor: Tensor) -> int:
    """The number of writes to a tensor. 0 for one made in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _own(module: nn.Module) -> list[str]:
    """Names of the attributes that not every module has."""
    return [name for name in vars(module) if name not in _INTERNAL and name != "forward"]


def _one_name(name: str) -> tuple[str]:
    return (name,)


def _items(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _is_same(one: Any, two: Any) -> bool:
    """Whether two values are one object, equal plain values, or pairs of these."""
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two) == 2:
        return one is two or all(map(_is_same, one, two))
    return one is two or (type(one) is type(two) and isinstance(one, _PLAIN) and one == two)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaNs count as equal."""
    return one.shape == two.shape and bool(torch.equal(one, two) or torch.equal(one.nan_to_num(), two.nan_to_num()))
