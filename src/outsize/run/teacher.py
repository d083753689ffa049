"""The teacher of a pruning run: its weights stay in their files, apart from those that are in use.

A layer is first loaded into host memory, where its variants are made, and then moved to the device.
"""

from collections.abc import Iterable, Iterator, Sequence
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
        """Parameters that `materialized` gets within the block stay on the device."""
        self._finds_stem = True
        try:
            yield
        finally:
            self._finds_stem = False

    @contextmanager
    def materialized(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Parameters have their values on the device within the block."""
        moved = [param for param in params if id(param) not in self._placed]
        self.load(moved)
        self.place(moved)
        try:
            yield
        finally:
            if self._finds_stem:
                self._stem += moved
            else:
                self.release(moved)

    def load(self, params: Iterable[nn.Parameter]) -> None:
        """Read parameters into host memory."""
        with self._device.on_host():
            for param in params:
                if is_unmaterialized(param):
                    assert self._weights is not None
                    data = torch.empty(param.shape, dtype=param.dtype)
                    name = self._names[id(param)]
                    self._weights.read_into(name, data)
                    require_finite(name, data, BadFile)
                    param.data = data

    def value(self, name: str) -> Tensor:
        """A parameter's values in host memory, wherever it is. It stays there."""
        param = self.model.get_parameter(name)
        with self._device.on_host():
            if not is_unmaterialized(param):
                return param.detach().to("cpu")
            assert self._weights is not None
            data = torch.empty(param.shape, dtype=param.dtype)
            self._weights.read_into(self._names[id(param)], data)
            require_finite(name, data, BadFile)
            return data

    def place(self, params: Iterable[nn.Parameter]) -> None:
        """Move loaded parameters to the device."""
        for param in params:
            if id(param) not in self._placed:
                host = param.data
                param.data = self._device.keep(host)
                if self._weights is None:
                    self._in_memory[id(param)] = host
                self._placed.add(id(param))

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Drop parameters, wherever they are, unless they stay for the whole run."""
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
