"""PlacedWeights: the weights of a model that are on the device while it is profiled.

Only the weights of layers that run, and those outside of layers, are copied there. Their values are as before
afterwards.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.compat import detect_fake_mode, storage_id
from outsize.device.device import Device
from outsize.model.discover import Layer
from outsize.model.parts import named_parts, parts_by_parameter, share_tables
from outsize.model.weights import Weights, bytes_of, is_unmaterialized

_MAX_COMPARED_BYTES = 4 * 2**20
"""Larger parameters on another device are compared with the original only if their version shows a write. Codebooks
are smaller."""


class PlacedWeights:
    def __init__(self, model: nn.Module, device: Device, source: Weights | None):
        """`source`: where the values of unmaterialized parameters are read from."""
        self._model, self._device, self._source = model, device, source
        self._names = {id(p): name for name, p in named_parts(model)}
        self._siblings: dict[int, list[Tensor]] = {}
        """By id of a parameter or part: all parts. A call that reads one may read the others in evaluation."""
        for _, param, parts in parts_by_parameter(model):
            tensors = [part.tensor for part in parts]
            self._siblings |= {id(tensor): tensors for tensor in (param, *tensors)}
        self._originals: dict[Tensor, Tensor] = {}
        """The data of parameters that were copied to the device."""
        self._saved: dict[Tensor, torch.UntypedStorage] = {}
        """Values of parameters that were on the device already: a forward may write them."""
        self._versions: dict[Tensor, int] = {}
        self._storages: dict[Tensor, int] = {}
        self._params_in_storage: dict[int, dict[Tensor, None]] = {}
        self._static: set[int] = set()
        """Storages of parameters and lookup tables."""
        self._buffers: set[int] = set()
        """Storages of buffers."""
        self._restore_tables: Callable[[], None] = lambda: None
        self.is_placing = False
        """Weights are being copied to the device, which reads them."""

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a weight or buffer."""
        storage = storage_id(tensor.untyped_storage())
        return storage in self._static or storage in self._buffers

    def parameters_in(self, tensor: Tensor) -> Collection[Tensor]:
        """The parameters in whose memory a tensor lies, with all their parts."""
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._siblings:
            return self._siblings.get(id(tensor), (tensor,))
        if tensor.layout != torch.strided:
            return ()
        found = self._params_in_storage.get(storage_id(tensor.untyped_storage()), ())
        return {sibling: None for param in found for sibling in self._siblings.get(id(param), (param,))}

    def place(self, module: nn.Module) -> None:
        """Copy a module's weights to the device until profiling ends."""
        self._place(part for _, part in named_parts(module))

    def _place(self, params: Iterable[Tensor]) -> None:
        self.is_placing = True
        device = self._device.torch_device
        for param in params:
            if is_unmaterialized(param):
                self._originals[param] = param.data
                assert self._source is not None
                with self._device.on_host():
                    value = torch.empty(param.shape, dtype=param.dtype)
                    self._source.read_into(self._names[id(param)], value)
                param.data = value.to(device)
            elif param.device != device:
                self._originals[param] = param.data
                param.data = param.data.to(device)
            elif param not in self._originals and param not in self._saved and detect_fake_mode() is None:
                with self._device.on_host():
                    self._saved[param] = bytes_of(param).clone()
            self._versions.setdefault(param, param._version)
            storage = self._storages[param] = storage_id(param.untyped_storage())
            self._static.add(storage)
            self._params_in_storage.setdefault(storage, {})[param] = None
        self.is_placing = False

    @contextmanager
    def restored_at_end(self) -> Iterator[None]:
        values = [(p, p.data) for _, p in named_parts(self._model)]
        try:
            yield
        finally:
            for param, data in values:
                param.data = data
            for param, saved in self._saved.items():
                if self._is_written(param):
                    bytes_of(param).copy_(saved)
            self._restore_tables()
            for table in (self._originals, self._params_in_storage, self._saved, self._versions):
                table.clear()

    def place_outside_of(self, layers: Sequence[Layer]) -> None:
        """Copy the weights that are in no layer, and all lookup tables, to the device."""
        inside = {id(p) for layer in layers for _, p in named_parts(layer.module)}
        self._place([p for _, p in named_parts(self._model) if id(p) not in inside])
        tables, self._restore_tables = share_tables(self._model, lambda t: t.to(self._device.torch_device))
        self._static |= {storage_id(table.untyped_storage()) for table in tables}

    def place_buffers(self) -> None:
        """Copy all buffers to the device."""
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(self._device.torch_device)
        self._buffers = {storage_id(b.untyped_storage()) for b in self._model.buffers()}

    def require_unchanged(self, *, compares_values: bool) -> None:
        """Refuse a model whose forward writes or replaces its parameters: they are views into the engine's buffers, and
        the new value would be lost.
        """
        for name, param in named_parts(self._model):
            if param in self._storages and storage_id(param.untyped_storage()) != self._storages[param]:
                raise ModelUnsupported(
                    f"{name}: the model's forward replaces the data of this parameter, which outsize keeps in a buffer "
                    "of its own. Write new values between steps, inside `with engine.gathered(name)`, or train this "
                    "model without outsize."
                )
            if compares_values and param in self._versions and self._is_written(param):
                raise ModelUnsupported(
                    f"{name}: the model's forward writes this parameter (as nn.Embedding(max_norm=...) and codebooks "
                    "do), and a plan may stream it from the host, where the write would be lost. Keep it as a buffer, "
                    "or write it between steps."
                )

    def _is_written(self, param: Tensor) -> bool:
        """Whether its values differ from before. The version alone does not show it: the same values may have
        been written (PEFT's parametrizations).
        """
        if param in self._saved:
            saved, now = (
                torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (self._saved[param], bytes_of(param))
            )
            return not torch.equal(saved, now)
        original = self._originals.get(param)
        if original is None or is_unmaterialized(original) or detect_fake_mode() is not None:
            return False
        if param.nbytes > _MAX_COMPARED_BYTES and param._version == self._versions[param]:
            return False
        return not torch.equal(original.nan_to_num(), param.data.to(original.device).nan_to_num())
