"""Store: the bytes of a prepared model. Allocates what the placement names, moves parameters in, and reads and writes
them by name.

[Note: The lives of a chunk] home      its weights on the host, if it streams or is updated there; the canonical between
uses weights   its weights on the device for good, if it is resident; the canonical if no home exists slot      device
memory it passes through, if it streams; owned by one chunk at a time state     moments and the lower half of split
masters, where the optimizer lives gradient  where backward leaves gradients: a buffer of its own, or a staging slot
from which they leave for the host A parameter's `.data` is set once, to a view into `weights` or `slot`, and never
again. Only the flat buffers are written.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, ModelUnsupported
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.layout.chunks import Piece
from outsize.model.weights import Weights, is_unmaterialized, require_finite, unmaterialized_like
from outsize.progress import counted
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.placement import Placement


class Store:
    def __init__(
        self,
        model: nn.Module,
        place: Placement,
        device: Device,
        weights: Weights | None = None,
        *,
        check_finite: bool = False,
    ):
        """`weights`: where the values of unmaterialized parameters are read from. `check_finite`: refuse NaN and
        infinity in what is moved in.
        """
        self._check_finite = check_finite
        self.place, self.device = place, device
        self.params = dict(model.named_parameters())
        self._tables = [(path, m._parameters, dict(m._parameters)) for path, m in model.named_modules()]
        """Each module's own table of parameters, and what is in it."""
        self.gpu: dict[Buffer, Tensor] = {}
        self.host: dict[Buffer, Tensor] = {}
        self.slot_contents: dict[int, int | None] = dict.fromkeys(range(len(place.slots.slot_bytes)))
        """Per slot: the chunk whose weights it holds, or is about to hold on the lanes."""
        self._addresses: dict[str, int] = {}
        self._mapped: dict[Buffer, Tensor] = {}
        """Host buffers as tensors of the device."""
        self._strides = {name: _dense_stride(name, p) for name, p in self.params.items()}
        # All device memory first: if it does not fit, no parameter has moved yet.
        self.gpu = {buffer: device.empty(num_bytes) for buffer, num_bytes in place.gpu.items()}
        for buffer, tensor in self.gpu.items():
            if buffer[0] == B.SLOT:
                tensor.fill_(0xFF)  # NaN in every float type: a slot that nobody owns does not pass for weights
            elif buffer[0] in ("state", "weights"):
                tensor.zero_()
        moved: list[int] = []
        try:
            for chunk in counted(
                place.layout.chunks, "Bringing weights to their homes", total=len(place.layout.chunks)
            ):
                self._move_in(chunk.index, weights)
                moved.append(chunk.index)
            rest = {buffer: num_bytes for buffer, num_bytes in place.host.items() if buffer[0] != B.HOME}
            for buffer, num_bytes in counted(rest.items(), "Making room on the host", total=len(rest)):
                self.host[buffer] = device.host_empty(num_bytes, pinned=place.is_pinned(buffer))
        except BaseException:
            self.release(moved)
            raise

    def _move_in(self, index: int, weights: Weights | None) -> None:
        """Bring a chunk's parameters to where they live: copied, each one's old storage freed as it moves, or read from
        their files.
        """
        buffers = []
        if (B.HOME, index) in self.place.host:
            self.host[B.HOME, index] = self.device.host_empty(self.place.host[B.HOME, index], pinned=True)
            buffers.append(self.host[B.HOME, index])
        if (B.WEIGHTS, index) in self.gpu:
            buffers.append(self.gpu[B.WEIGHTS, index])
        in_use = self.gpu[self.place.weights_buffer(index)]
        undo: list[Callable[[], None]] = []
        try:
            for piece in self.place.chunk(index).pieces:
                param = self.params[piece.name]
                views = [self._view(buffer, index, piece) for buffer in buffers]
                with torch.no_grad():
                    if is_unmaterialized(param):
                        assert weights is not None
                        undo.append(partial(setattr, param, "data", param.data))
                        self.fill(views, partial(self._read_into, weights, piece.name))
                    else:
                        undo.append(partial(_give_own, param, views[0]))
                        if self._check_finite:
                            with self.device.on_host():
                                require_finite(piece.name, param.data, ModelUnsupported)
                        for view in views:
                            view.copy_(param.data)
                    param.data = self._view(in_use, index, piece)
                self._addresses[piece.name] = param.data_ptr()
        except BaseException:
            for take_back in undo[:-1]:  # the last one has not moved
                take_back()
            raise

    def _read_into(self, weights: Weights, name: str, tensor: Tensor) -> None:
        with self.device.on_host():
            weights.read_into(name, tensor)
            if self._check_finite:
                require_finite(name, tensor, BadFile)

    def fill(self, views: list[Tensor], read_into: Callable[[Tensor], None]) -> None:
        """Read one tensor into all its places: straight into the first if that is host memory."""
        first = views[0]
        if first.device.type != "cpu":
            with self.device.on_host():
                first = torch.empty_like(first, device="cpu")
        read_into(first)
        for view in views:
            if view is not first:
                view.copy_(first)

    def _view(
        self, buffer: Tensor, index: int, piece: Piece, *, dtype: torch.dtype | None = None, owns: bool = False
    ) -> Tensor:
        """A parameter-shaped view into a chunk-shaped buffer. `owns`: behind a storage of its own, for code that looks
        at storages.
        """
        flat = self.flat(buffer, index, dtype=dtype)[piece.offset : piece.offset + piece.numel]
        flat = own_storage(flat) if owns else flat
        shape = self.place.graph.param[piece.name].shape
        stride = self._strides[piece.name]
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)

    def flat(self, buffer: Tensor, index: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """A chunk-shaped buffer as its elements."""
        dtype = dtype or getattr(torch, self.place.chunk(index).dtype)
        return buffer[: self.place.chunk(index).numel * dtype.itemsize].view(dtype)

    def buffer(self, buffer: Buffer) -> Tensor:
        """The memory of a buffer, as bytes."""
        return self.gpu[buffer] if buffer in self.gpu else self.host[buffer]

    # Buffers of a chunk.

    def weights(self, index: int) -> Tensor:
        """What the device computes with, as bytes."""
        return self.gpu[self.place.weights_buffer(index)][: self.place.chunk(index).nbytes]

    def home(self, index: int) -> Tensor:
        return self.host[B.HOME, index]

    def gradient(self, index: int) -> Tensor:
        """On the device, as bytes."""
        return self.gpu[self.place.gradient_buffer(index)][: self.place.update_of(index).gradient_bytes]

    def host_gradient(self, index: int) -> Tensor:
        return self.host[self.place.host_gradient_buffer(index)][: self.place.update_of(index).gradient_bytes]

    def gradient_dtype(self, index: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.place.update_of(index).gradient_dtype)
        return dtype

    def gradient_view(self, name: str) -> Tensor:
        index, piece = self.place.layout.place[name]
        return self._view(self.gradient(index), index, piece, dtype=self.gradient_dtype(index))

    def waiting_gradient_view(self, name: str) -> Tensor:
        """Where a gradient waits between backward and step."""
        index, piece = self.place.layout.place[name]
        buffer = self.host_gradient(index) if self.place.sends_gradient(index) else self.gradient(index)
        return self._view(buffer, index, piece, dtype=self.gradient_dtype(index))

    def waiting_gradient_on_device(self, name: str) -> Tensor:
        """The same memory as a tensor of the device."""
        index, piece = self.place.layout.place[name]
        on_host = self.place.sends_gradient(index)
        buffer = self._map(self.place.host_gradient_buffer(index)) if on_host else self.gradient(index)
        return self._view(buffer, index, piece, dtype=self.gradient_dtype(index), owns=True)

    def _map(self, buffer: Buffer) -> Tensor:
        if buffer not in self._mapped:
            self._mapped[buffer] = self.device.map_host(self.host[buffer])
        return self._mapped[buffer]

    def state(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """The optimizer's state tensors, and the lower half of the master (None: the weight is the master), flat, in
        their home.
        """
        on_host = self.place.has_host_state(index)
        return self._as_state(index, self.host[B.HOST_STATE, index] if on_host else self.gpu[B.STATE, index])

    def state_at_update(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """The same at the update site: streamed state is in its slot."""
        if not self.place.streams_state(index):
            return self.state(index)
        return self._as_state(index, self.gpu[self.place.state_slot(index)][: self.place.update_of(index).state_bytes])

    def _as_state(self, index: int, buffer: Tensor) -> tuple[list[Tensor], Tensor | None]:
        n = self.place.chunk(index).numel
        count = len(self.place.step_config.optimizer.state)
        state = [buffer[4 * n * i : 4 * n * (i + 1)].view(torch.float32) for i in range(count)]
        return state, buffer[4 * n * count :].view(torch.int16) if self.place.update_of(index).is_split else None

    def canonical(self, index: int) -> Tensor:
        """The bytes that hold a chunk's weights between uses. Drain the lanes before reading."""
        return self.home(index) if self.place.has_host_weights(index) else self.gpu[B.WEIGHTS, index]

    def chunks_with(self, params: Iterable[nn.Parameter | None]) -> tuple[int, ...]:
        ids = {id(p) for p in params}
        return tuple({self.place.layout.place[name][0] for name, p in self.params.items() if id(p) in ids})

    def host_chunks(self) -> set[int]:
        """Chunks whose weights and state are in host memory."""
        place = self.place
        return {
            c.index
            for c in place.layout.chunks
            if place.has_host_weights(c.index) and (not place.is_updated(c.index) or place.has_host_state(c.index))
        }

    # Parameters by name, as checkpoint/parameter_store.py expects. The lanes are idle when these are called.

    def chunk_of(self, name: str) -> int:
        return self.place.layout.place[name][0]

    def read(self, name: str, *, owns: bool = False) -> Tensor:
        """A view of the parameter's value at home."""
        index, piece = self.place.layout.place[name]
        return self._view(self.canonical(index), index, piece, owns=owns)

    def device_view(self, name: str) -> Tensor:
        """The same value as a tensor of the device, over the same memory."""
        index, piece = self.place.layout.place[name]
        buffer = self._map((B.HOME, index)) if self.place.has_host_weights(index) else self.gpu[B.WEIGHTS, index]
        return self._view(buffer, index, piece, owns=True)

    def copies(self, name: str) -> list[Tensor]:
        """All views of a parameter's value outside of slots: at home, and on the device where it is resident."""
        index, piece = self.place.layout.place[name]
        buffers = [self.host.get((B.HOME, index)), self.gpu.get((B.WEIGHTS, index))]
        return [self._view(buffer, index, piece) for buffer in buffers if buffer is not None]

    def load(self, name: str, read_into: Callable[[Tensor], None]) -> None:
        """Read a new value into every copy. It becomes the master weight too."""
        index = self.chunk_of(name)
        self.fill(self.copies(name), read_into)
        self.invalidate(index)
        if self.place.has_split_masters(index):
            self.state_views(name)["lo"].zero_()

    def write(self, name: str, value: Tensor) -> None:
        """A new value from outside: where it differs from the weight, it is the master too."""
        index, piece = self.place.layout.place[name]
        with torch.no_grad(), self.device.on_host():
            weight = self.read(name)
            self.clear_remainders(name, weight != value.to(weight.device, weight.dtype))
            weight.copy_(value)
            if self.place.has_host_weights(index) and not self.place.streams(index):
                self._view(self.gpu[B.WEIGHTS, index], index, piece).copy_(value)
        self.invalidate(index)

    def clear_remainders(self, name: str, changed: Tensor) -> None:
        """Where a bf16 weight was changed from outside, the new value is the master: its lower half is zero."""
        if self.place.has_split_masters(self.chunk_of(name)):
            lo = self.state_views(name)["lo"]
            lo.masked_fill_(changed.to(lo.device), 0)

    def refresh_copies(self, index: int) -> None:
        """A chunk's home was written from outside: bring it to the resident copy, if there is one, and mark slots that
        hold it as stale.
        """
        if self.place.has_host_weights(index) and not self.place.streams(index):
            with torch.no_grad(), self.device.on_host():
                self.gpu[B.WEIGHTS, index].copy_(self.home(index))
        self.invalidate(index)

    def invalidate(self, index: int) -> None:
        """A chunk's home has changed: what a slot holds of it is old."""
        for slot, owner in self.slot_contents.items():
            if owner == index:
                self.slot_contents[slot] = None

    def state_views(self, name: str) -> dict[str, Tensor]:
        """A parameter's optimizer state, as parameter-shaped views of where it lives."""
        index, piece = self.place.layout.place[name]
        state, lo = self.state(index)
        shape, stride = self.place.graph.param[name].shape, self._strides[name]

        def view(flat: Tensor) -> Tensor:
            part = own_storage(flat[piece.offset : piece.offset + piece.numel])
            return part.view(shape) if stride is None else part.as_strided(shape, stride)

        views = {key: view(flat) for key, flat in zip(self.place.step_config.optimizer.state, state, strict=True)}
        return views if lo is None else {**views, "lo": view(lo)}

    def replaced(self) -> str | None:
        """A parameter of the model that is not the one it was prepared with: exchanged, added or removed since."""
        for path, own, params in self._tables:
            if len(own) != len(params):
                name = next(iter(own.keys() ^ params.keys()))
                return f"{path}.{name}".lstrip(".")
            for key, param in params.items():
                if own.get(key) is not param:
                    return f"{path}.{key}".lstrip(".")
        return None

    def replaced_data(self) -> list[str]:
        """Parameters whose `.data` somebody has replaced."""
        with without_torch_function():
            return [name for name, param in self.params.items() if param.data_ptr() != self._addresses[name]]

    def release(self, chunks: Iterable[int] | None = None, *, keep: bool = True) -> None:
        """Give every parameter (or those of some chunks) an ordinary CPU tensor of its own and free its chunk, one
        chunk after the other.

        Without `keep` they get unmaterialized ones.
        """
        for index in range(len(self.place.layout.chunks)) if chunks is None else chunks:
            for piece in self.place.chunk(index).pieces:
                param = self.params[piece.name]
                with torch.no_grad(), self.device.on_host():
                    value = self.read(piece.name)
                    if keep:
                        _give_own(param, value)
                    else:
                        param.data = unmaterialized_like(value, value.dtype)
            self.host.pop((B.HOME, index), None)
            self.gpu.pop((B.WEIGHTS, index), None)
        self.gpu.clear()
        self.host.clear()
        self._mapped.clear()


def own_storage(flat: Tensor) -> Tensor:
    """The same memory behind a storage of its own. Buffers hold tensors of several dtypes, and torch.save refuses a
    storage that is read as two.
    """
    start = flat.storage_offset() * flat.itemsize
    storage = (
        flat.untyped_storage()[start : start + flat.nbytes]
        if flat.numel()
        else torch.UntypedStorage(0, device=flat.device)
    )
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, flat.shape)  # type: ignore[call-overload]


def _give_own(param: nn.Parameter, value: Tensor) -> None:
    """An ordinary CPU tensor with this value."""
    with torch.no_grad():
        param.data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def _dense_stride(name: str, param: nn.Parameter) -> tuple[int, ...] | None:
    """None for a contiguous parameter, its strides for one that is merely permuted."""
    if param.is_contiguous():
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    if extent != math.prod(param.shape):
        raise ModelUnsupported(
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}, so its elements overlap or have gaps "
            "between them. Make it contiguous before prepare."
        )
    return tuple(param.stride())
