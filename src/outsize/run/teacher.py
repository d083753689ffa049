"""The teacher of a pruning run: its weights stay in their files, apart from those that are in use.

A layer is first loaded into host memory, where its variants are made, and then moved to the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile
from outsize.device.device import Device
from outsize.model.build import Built
from outsize.model.weights import is_unmaterialized, require_finite, unmaterialized_like


class Teacher:
    def __init__(self, built: Built, device: Device):
        self.model = built.model.eval().requires_grad_(False)
        self._weights, self._device = built.weights, device
        self._names = {id(param): name for name, param in self.model.named_parameters()}
        self._in_memory: dict[int, Tensor] = {}
        """Host tensors of parameters on the device, of a model whose weights are not in files."""
        self._placed: set[int] = set()
        self._stem: list[nn.Parameter] = []
        self._finds_stem = False
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = device.keep(buffer)

    @property
    def is_in_files(self) -> bool:
        return self._weights is not None

    @property
    def resident_bytes(self) -> int:
        """Device memory of all buffers, and of the weights that stay there for the whole run."""
        return sum(param.nbytes for param in self._stem) + sum(buffer.nbytes for buffer in self.model.buffers())

    @contextmanager
    def finding_stem(self) -> Iterator[None]:
        """Modules outside of the layers that run within the block keep their weights on the device."""
        self._finds_stem = True
        try:
            yield
        finally:
            self._finds_stem = False

    @contextmanager
    def materialized(self, module: nn.Module) -> Iterator[None]:
        """A module has its weights on the device within the block."""
        moved = [param for param in _params(module) if id(param) not in self._placed]
        self.load(module)
        self.place(module)
        try:
            yield
        finally:
            if self._finds_stem:
                self._stem += moved
            else:
                self._release(moved)

    def load(self, module: nn.Module) -> None:
        """Read a module's weights into host memory."""
        for param in _params(module):
            if is_unmaterialized(param):
                assert self._weights is not None
                with self._device.on_host():
                    data = torch.empty(param.shape, dtype=param.dtype)
                    name = self._names[id(param)]
                    self._weights.read_into(name, data)
                    require_finite(name, data, BadFile)
                param.data = data

    def place(self, module: nn.Module) -> None:
        """Move a loaded module's weights to the device."""
        for param in _params(module):
            if id(param) not in self._placed:
                host = param.data
                param.data = self._device.put(host)
                if self._weights is None:
                    self._in_memory[id(param)] = host
                self._placed.add(id(param))

    def release(self, module: nn.Module) -> None:
        """Drop a module's weights, wherever they are."""
        self._release(_params(module))

    def _release(self, params: list[nn.Parameter]) -> None:
        stay = {id(param) for param in self._stem}
        for param in params:
            if id(param) in stay:
                continue
            if self._weights is not None:
                with self._device.on_host():
                    param.data = unmaterialized_like(param, param.dtype)
            elif id(param) in self._placed:
                param.data = self._in_memory.pop(id(param))
            self._placed.discard(id(param))

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()


def _params(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())
