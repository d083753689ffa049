"""PlacedWeights: the weights of a model that are on the device while it is profiled.

Only the weights of layers that run, and those outside of layers, are copied there. Their values are as before
afterwards.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.compat import detect_fake_mode, storage_id
from outsize.device.device import Device
from outsize.model.discover import Layer
from outsize.model.weights import Weights, bytes_of, is_unmaterialized

_MAX_COMPARED_BYTES = 4 * 2**20
"""Larger parameters on another device are compared with the original only if their version shows a write. Codebooks
are smaller."""


class PlacedWeights:
    def __init__(self, model: nn.Module, device: Device, source: Weights | None):
        """`source`: where the values of unmaterialized parameters are read from."""
        self._model, self._device, self._source = model, device, source
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._originals: dict[nn.Parameter, Tensor] = {}
        """The data of parameters that were copied to the device."""
        self._saved: dict[nn.Parameter, torch.UntypedStorage] = {}
        """Values of parameters that were on the device already: a forward may write them."""
        self._versions: dict[nn.Parameter, int] = {}
        self._storages: dict[nn.Parameter, int] = {}
        self._params_in_storage: dict[int, dict[nn.Parameter, None]] = {}
        self._static: set[int] = set()
        """Storages of parameters."""
        self._buffers: set[int] = set()
        """Storages of buffers."""
        self.is_placing = False
        """Weights are being copied to the device, which reads them."""

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a weight or buffer."""
        storage = storage_id(tensor.untyped_storage())
        return storage in self._static or storage in self._buffers

    def parameters_in(self, tensor: Tensor) -> Collection[Tensor]:
        """The parameters in whose memory a tensor lies."""
        if isinstance(tensor, nn.Parameter):
            return (tensor,)
        if tensor.layout != torch.strided:
            return ()
        return self._params_in_storage.get(storage_id(tensor.untyped_storage()), ())

    def place(self, module: nn.Module) -> None:
        """Copy a module's weights to the device until profiling ends."""
        self.is_placing = True
        device = self._device.torch_device
        for param in module.parameters():
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
        values = [(p, p.data) for p in self._model.parameters()]
        try:
            yield
        finally:
            for param, data in values:
                param.data = data
            for param, saved in self._saved.items():
                if self._is_written(param):
                    bytes_of(param).copy_(saved)
            for table in (self._originals, self._params_in_storage, self._saved, self._versions):
                table.clear()

    def place_outside_of(self, layers: Sequence[Layer]) -> None:
        """Copy the weights that are in no layer to the device."""
        inside = {id(p) for layer in layers for p in layer.module.parameters()}
        self.place(nn.ParameterList([p for p in self._model.parameters() if id(p) not in inside]))

    def place_buffers(self) -> None:
        """Copy all buffers to the device."""
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(self._device.torch_device)
        self._buffers = {storage_id(b.untyped_storage()) for b in self._model.buffers()}

    def require_unchanged(self, *, compares_values: bool) -> None:
        """Refuse a model whose forward writes or replaces its parameters: they are views into the engine's buffers, and
        the new value would be lost.
        """
        for name, param in self._model.named_parameters():
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

    def _is_written(self, param: nn.Parameter) -> bool:
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
