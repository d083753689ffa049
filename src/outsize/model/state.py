"""What a module remembers from one forward to the next: buffers, tensors and plain values in its attributes.

A forward that writes any of it must not run twice in a step, and a profiling run puts it back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class _Entry:
    module: nn.Module
    path: str
    name: str
    is_buffer: bool
    value: Any
    copy: Tensor | None
    """Of a tensor's values; None where they are not known (fake tensors) or the value is a plain one."""
    version: int

    def now(self) -> Any:
        table = self.module._buffers if self.is_buffer else self.module.__dict__
        return table.get(self.name)

    def has_changed(self) -> bool:
        now = self.now()
        if not isinstance(self.value, Tensor):
            return now is not self.value and (type(now) is not type(self.value) or now != self.value)
        if now is not self.value or now._version != self.version:
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
        self._module = module
        self._entries: list[_Entry] = []
        for path, part in module.named_modules():
            tensors = [(name, value, True) for name, value in part._buffers.items() if value is not None]
            tensors += [(name, value, False) for name, value in vars(part).items() if isinstance(value, Tensor)]
            for name, value, is_buffer in tensors:
                copy = value.detach().clone() if knows_values and value.layout == torch.strided and not value.is_meta else None
                self._entries.append(_Entry(part, path, name, is_buffer, value, copy, value._version))
            plain = [(name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN) and name != "training"]
            self._entries += [_Entry(part, path, name, False, value, None, 0) for name, value in plain]
        self._names = self._all_names()

    def _all_names(self) -> set[tuple[str, str]]:
        """Tensors in attributes: a forward may leave new ones."""
        return {(path, name) for path, part in self._module.named_modules() for name, value in vars(part).items() if isinstance(value, Tensor)}

    def changed(self) -> str | None:
        """The name of the first part of the state that is another one now."""
        for entry in self._entries:
            if entry.has_changed():
                return f"{entry.path}.{entry.name}".lstrip(".")
        return None

    def restore(self) -> None:
        for entry in self._entries:
            entry.restore()
        for path, name in self._all_names() - self._names:
            self._module.get_submodule(path).__dict__.pop(name, None)


def _equal(one: Tensor, two: Tensor) -> bool:
    """Bit for bit, but for NaNs."""
    return one.shape == two.shape and bool(torch.equal(one, two) or torch.equal(one.nan_to_num(), two.nan_to_num()))
