"""The state that a module keeps from one forward to the next: buffers, tensors and plain values in its attributes.

A forward that writes to it must not run twice in a step, and profiling restores it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import detect_fake_mode, storage_id
from outsize.model.tensors import map_tensors, tensors_in

_PLAIN = (bool, int, float, complex, str, type(None))
_INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))


@dataclass(frozen=True, slots=True)
class _Entry:
    module: nn.Module
    path: str
    name: str
    is_buffer: bool
    value: Any
    copy: Tensor | None
    """Copy of a tensor's values. None if they are unknown (fake tensors) or the value is no tensor."""
    version: int

    def now(self) -> Any:
        table = self.module._buffers if self.is_buffer else self.module.__dict__
        return table.get(self.name)

    def has_changed(self) -> bool:
        now = self.now()
        if not isinstance(self.value, Tensor):
            return now is not self.value and (type(now) is not type(self.value) or now != self.value)
        if now is not self.value or _version(now) != self.version:
            return True
        return self.copy is not None and not _equal(now, self.copy)

    def restore(self) -> None:
        table: Any = self.module._buffers if self.is_buffer else self.module.__dict__
        table[self.name] = self.value
        if self.copy is not None and not _equal(self.value, self.copy):
            with torch.no_grad():
                self.value.copy_(self.copy)


class ModuleState:
    def __init__(self, module: nn.Module):
        knows_values = detect_fake_mode() is None
        self._entries: list[_Entry] = []
        self._collections: list[tuple[str, Any, list[Any]]] = []
        """Lists and dicts in attributes, with their items."""
        for path, part in module.named_modules():
            tensors = [(name, value, True) for name, value in part._buffers.items() if value is not None]
            tensors += [(name, value, False) for name, value in vars(part).items() if isinstance(value, Tensor)]
            for name, value, is_buffer in tensors:
                has_values = knows_values and value.layout == torch.strided and not value.is_meta
                copy = value.detach().clone() if has_values else None
                self._entries.append(_Entry(part, path, name, is_buffer, value, copy, _version(value)))
            self._collections += [
                (f"{path}.{name}".lstrip("."), value, _items(value))
                for name, value in _own(part)
                if type(value) in (list, dict)
            ]
            plain = [
                (name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN) and name != "training"
            ]
            self._entries += [_Entry(part, path, name, False, value, None, 0) for name, value in plain]
        self._bound = [(path, part, dict(_own(part))) for path, part in module.named_modules()]
        """All attributes: a forward may bind other values, or new attributes."""
        self._hooks = [
            (table, dict(table))
            for part in module.modules()
            for name in _HOOKS
            if (table := getattr(part, name, None)) is not None
        ]
        """transformers registers hooks in the first forward that needs them, and an attribute that says so."""

    def changed(self) -> str | None:
        """The name of the first part of the state that has changed."""
        for entry in self._entries:
            if entry.has_changed():
                return f"{entry.path}.{entry.name}".lstrip(".")
        for path, part, before in self._bound:
            for name, value in _own(part):
                if before.get(name) is not value and next(tensors_in(value), None) is not None:
                    return f"{path}.{name}".lstrip(".")
        return next((name for name, value, items in self._collections if not _is_same(_items(value), items)), None)

    def restore(self) -> None:
        for _, part, before in self._bound:
            for name in [name for name, _ in _own(part) if name not in before]:
                del part.__dict__[name]
            part.__dict__.update(before)
        for table, hooks in self._hooks:
            if table.keys() != hooks.keys():
                table.clear()
                table.update(hooks)
        for entry in self._entries:
            entry.restore()
        for _, value, items in self._collections:
            if not _is_same(_items(value), items):
                value.clear()
                value.update(items) if isinstance(value, dict) else value.extend(items)


class BoundAttributes:
    """Values that a module's forward binds to its attributes, for other code to read: an auxiliary loss, an attention
    map.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._before = self._now()
        self._values: dict[tuple[str, str], Any] = {}

    def _now(self) -> dict[tuple[str, str], Any]:
        return {(path, name): value for path, part in self._module.named_modules() for name, value in _own(part)}

    def forward_ran(self) -> None:
        """Keep the values that are new, tensors without their graph."""
        new = {
            key: value
            for key, value in self._now().items()
            if key not in self._before or self._before[key] is not value
        }
        self._values = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), new)
        self._before = {}

    def num_bytes(self, device: torch.device, is_static: Callable[[Tensor], bool]) -> int:
        """Bytes that the attributes hold from one step to the next, until they are bound again."""
        tensors = [
            t for t in tensors_in(self._values) if t.device == device and t.layout == torch.strided and not is_static(t)
        ]
        return sum({storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())

    def bind_to(self, module: nn.Module) -> None:
        """Bind the values to another module of the same structure, as if its forward had run."""
        for (path, name), value in self._values.items():
            module.get_submodule(path).__dict__[name] = value


def generators_of(model: nn.Module) -> Iterator[torch.Generator]:
    """Random generators in attributes of modules, directly or in a dict or list."""
    for module in model.modules():
        for value in vars(module).values():
            for item in value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,):
                if isinstance(item, torch.Generator):
                    yield item


def _version(tensor: Tensor) -> int:
    """The number of writes to a tensor. 0 for one made in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if name not in _INTERNAL and name != "forward")


def _items(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _is_same(one: list[Any], two: list[Any]) -> bool:
    """Whether both have the same objects. Items of dicts are pairs."""
    flat = [[part for item in items for part in (item if isinstance(item, tuple) else (item,))] for items in (one, two)]
    return len(flat[0]) == len(flat[1]) and all(a is b for a, b in zip(*flat, strict=True))


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaNs count as equal."""
    return one.shape == two.shape and bool(torch.equal(one, two) or torch.equal(one.nan_to_num(), two.nan_to_num()))
