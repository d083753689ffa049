"""Store: the memory of a prepared model. Allocates the buffers that the placement names, moves parameters into them,
and reads and writes parameters by name.

[Note: The buffers of a chunk] (schedule/buffers.py lists all kinds)
- HOME: the weights in host memory, if the chunk is streamed or updated on the host. Between uses they are read here.
- WEIGHTS: the weights of a resident chunk, on the GPU. Between uses they are read here if the chunk has no HOME.
- SLOT: GPU memory that streamed chunks pass through. One chunk at a time uses it.
- STATE, HOST_STATE: state tensors of the optimizer and the lower halves of split masters, in the state home.
- GRADIENT, STAGE: where backward writes the gradient: a buffer of its own, or a stage from which it is copied to the
  host.

A parameter's `.data` is set once, to a view of `weights` or of a slot. After that only the flat buffers are written.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, EngineMisuse, ModelUnsupported
from outsize.checkpoint.ranges import Ranges, memory_order
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.model.parts import attachments, named_parts, wrappers
from outsize.model.weights import Weights, is_unmaterialized, require_finite, unmaterialized_like
from outsize.optim.split import join
from outsize.optim.state import split_state
from outsize.progress import counted
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.placement import Placement

_GRADIENTS = (B.GRADIENT, B.STAGE, B.HOST_GRADIENT, B.HOST_STAGE)


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
        """`weights`: the files that unmaterialized parameters are read from. `check_finite`: refuse parameters with NaN
        or infinity.
        """
        self._check_finite = check_finite
        self.place, self.device = place, device
        self.params = dict(named_parts(model))
        """Parameters, and the tensors that quantization attaches to them (model/parts.py)."""
        self.wrappers = {name: (param, {part.name for part in found}) for name, param, found in wrappers(model)}
        """By name: parameters that consist of other tensors, with the names of these parts. They have no memory."""
        self._attached = list(attachments(model))
        self._tables = [(path, m._parameters, dict(m._parameters)) for path, m in model.named_modules()]
        """Path, table of parameters and its entries, of each module."""
        self._children = [(path, m._modules, dict(m._modules)) for path, m in model.named_modules() if m._modules]
        self.gpu: dict[Buffer, Tensor] = {}
        self.host: dict[Buffer, Tensor] = {}
        self.slot_contents: dict[int, int | None] = dict.fromkeys(range(len(place.slots.slot_bytes)))
        """By slot: the chunk whose weights it holds once the issued loads are done."""
        self._addresses: dict[str, int] = {}
        self._mapped: dict[Buffer, Tensor] = {}
        """Host buffers as tensors of the device."""
        self._strides = {name: _permuted_stride(name, p) for name, p in self.params.items()}
        # All device memory first: if it does not fit, no parameter has moved yet.
        self.gpu = {buffer: device.empty(num_bytes) for buffer, num_bytes in place.gpu.items()}
        for buffer, tensor in self.gpu.items():
            if buffer[0] == B.SLOT:
                tensor.fill_(0xFF)  # NaN in every float type: an unused slot is not mistaken for weights
            elif buffer[0] in (B.STATE, B.WEIGHTS):
                tensor.zero_()
        moved: list[int] = []
        try:
            for chunk in counted(place.layout.chunks, "Moving weights to their homes", total=len(place.layout.chunks)):
                self._move_in(chunk.index, weights)
                moved.append(chunk.index)
            rest = {buffer: num_bytes for buffer, num_bytes in place.host.items() if buffer[0] != B.HOME}
            for buffer, num_bytes in counted(rest.items(), "Allocating host memory", total=len(rest)):
                self.host[buffer] = device.host_empty(num_bytes, pinned=place.is_pinned(buffer))
        except BaseException:
            self.release(moved)
            raise

    def _move_in(self, index: int, weights: Weights | None) -> None:
        """Move a chunk's parameters into its home and its resident weights. Copied parameters free their old memory one
        by one; unmaterialized ones are read from their files.
        """
        if (B.HOME, index) in self.place.host:
            self.host[B.HOME, index] = self.device.host_empty(self.place.host[B.HOME, index], pinned=True)
        undo: list[Callable[[], None]] = []
        revert: Callable[[], None]
        try:
            for piece in self.place.chunk(index).pieces:
                param = self.params[piece.name]
                value = self.ranges(piece.name).whole()
                with torch.no_grad():
                    if is_unmaterialized(param):
                        assert weights is not None
                        revert = partial(setattr, param, "data", param.data)
                        self._read_value(weights, piece.name, value)
                    else:
                        revert = partial(_make_plain, param, value)
                        if self._check_finite:
                            with self.device.on_host():
                                require_finite(piece.name, param.data, ModelUnsupported)
                        value.copy_(param.data)
                    param.data = self._ranges(self.place.weights_buffer(index), piece.name).whole()
                undo.append(revert)
                self._addresses[piece.name] = param.data_ptr()
            self.refresh_copies(index)
        except BaseException:
            for revert in undo:
                revert()
            raise

    def _read_value(self, weights: Weights, name: str, value: Tensor) -> None:
        with self.device.on_host():
            on_cpu = value if value.device.type == "cpu" else torch.empty_like(value, device="cpu")
            weights.read_into(name, on_cpu)
            if self._check_finite:
                require_finite(name, on_cpu, BadFile)
            if on_cpu is not value:
                value.copy_(on_cpu)

    def _ranges(self, buffer: Buffer, name: str, *, on_device: bool = False) -> Ranges:
        """A parameter's elements in a buffer of its chunk."""
        flat = self.flat(buffer, self.chunk_of(name), on_device=on_device)
        if buffer[0] in _GRADIENTS:
            return self._updated_part(flat, name)
        _, piece = self.place.layout.location[name]
        param = self.place.graph.param[name]
        dtype: torch.dtype = getattr(torch, param.dtype)
        part = flat[piece.offset : piece.offset + piece.numel].view(dtype)  # the elements of a frozen chunk are bytes
        return Ranges(param.shape, self._strides[name], ((part, 0),))

    def _updated_part(self, flat: Tensor, name: str) -> Ranges:
        """A parameter's part of its chunk's gradient, or of a state tensor."""
        piece = self.place.updated_pieces[name]
        stride = None if self.place.has_coordinates(self.chunk_of(name)) else self._strides[name]
        part = flat[piece.offset : piece.offset + piece.numel]
        return Ranges(self.place.updated_shape(name), stride, ((part, 0),))

    # Buffers of a chunk.

    def buffer(self, buffer: Buffer) -> Tensor:
        """The memory of a buffer, as bytes."""
        return self.gpu[buffer] if buffer in self.gpu else self.host[buffer]

    def flat(self, buffer: Buffer, index: int, *, on_device: bool = False) -> Tensor:
        """The elements of a chunk in a buffer of weights or gradients. `on_device`: as a tensor of the device, over the
        same memory.
        """
        memory = self.buffer(buffer)
        if on_device and buffer in self.host:
            if buffer not in self._mapped:
                self._mapped[buffer] = self.device.map_host(memory)
            memory = self._mapped[buffer]
        chunk = self.place.chunk(index)
        name, numel = chunk.dtype, chunk.numel
        if buffer[0] in _GRADIENTS:
            update = self.place.update_of(index)
            name, numel = update.gradient_dtype, update.numel
        dtype: torch.dtype = getattr(torch, name)
        return memory[: numel * dtype.itemsize].view(dtype)

    def state(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """The optimizer's state tensors, and the lower half of the master (None: the weight is the master), flat, in
        their home.
        """
        on_host = self.place.has_host_state(index)
        return self._as_state(index, self.host[B.HOST_STATE, index] if on_host else self.gpu[B.STATE, index])

    def state_at_update(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """The same at the update site: streamed state is in its state slot."""
        if not self.place.streams_state(index):
            return self.state(index)
        return self._as_state(index, self.gpu[self.place.state_slot(index)][: self.place.update_of(index).state_bytes])

    def _as_state(self, index: int, buffer: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return split_state(buffer, self.place.update_of(index))

    def chunks_with(self, params: Iterable[Tensor]) -> tuple[int, ...]:
        ids = {id(p) for p in params}
        return tuple({self.place.layout.location[name][0] for name, p in self.params.items() if id(p) in ids})

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
        return self.place.layout.location[name][0]

    def ranges(self, name: str, *, on_device: bool = False) -> Ranges:
        """The memory of a parameter's value between uses. `on_device`: as tensors of the device."""
        return self._ranges(self.place.home_buffer(self.chunk_of(name)), name, on_device=on_device)

    def state_ranges(self, name: str) -> dict[str, Ranges]:
        """The memory of a parameter's optimizer state."""
        index = self.chunk_of(name)
        state, lo = self.state(index)
        flats = dict(zip(self.place.update_of(index).state, state, strict=True))
        flats |= {} if lo is None else {"lo": lo}
        return {key: self._updated_part(flat, name) for key, flat in flats.items()}

    def in_buffer(self, buffer: Buffer, name: str) -> Tensor:
        """A parameter, or its gradient, in a buffer of its chunk."""
        return self._ranges(buffer, name).whole()

    def gradient_view(self, name: str) -> Tensor:
        """The memory on the device of a parameter's gradient sum."""
        return self.in_buffer(self.place.gradient_buffer(self.chunk_of(name)), name)

    def arrival_view(self, name: str) -> Tensor | None:
        """The part of an arrival slot for a gradient; None if it arrives in its sum."""
        slot = self.place.arrivals.get(self.chunk_of(name))
        return None if slot is None else self.in_buffer((B.ARRIVAL, slot), name)

    def gradient_ranges(self, name: str, *, on_device: bool = False) -> Ranges:
        """The memory of a gradient between backward and step."""
        index, place = self.chunk_of(name), self.place
        buffer = place.host_gradient_buffer(index) if place.sends_gradient(index) else place.gradient_buffer(index)
        return self._ranges(buffer, name, on_device=on_device)

    def gradient(self, name: str) -> Tensor:
        """A gradient between backward and step, as a tensor of the device."""
        return self.gradient_ranges(name, on_device=True).whole(owns=True)

    def value(self, name: str, *, on_device: bool = False) -> Tensor:
        """A parameter's value between uses: a view behind a storage of its own. `on_device`: as a tensor of the
        device.
        """
        return self.ranges(name, on_device=on_device).whole(owns=True)

    def master(self, name: str) -> Tensor:
        """A parameter's value on the CPU; of a bf16 weight, its exact fp32 master."""
        value = self.value(name).cpu()
        if value.dtype != torch.bfloat16:
            return value
        if not self.place.has_split_masters(self.chunk_of(name)):
            return value.float()
        lower = self.state_ranges(name)["lo"].whole().cpu()
        return join(value, lower)

    def load(self, names: Iterable[str], read: Callable[[str, Ranges], None]) -> None:
        """Replace values: `read` fills the ranges of one parameter. The new values become the master weights too."""
        loaded: dict[int, None] = {}
        try:
            for name in names:
                loaded[self.chunk_of(name)] = None
                read(name, self.ranges(name))
                self.clear_lower_halves(name)
        finally:
            for index in loaded:
                self.refresh_copies(index)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters to new values. An element that changes becomes its own master weight."""
        for name in values:
            self.require_elementwise(name)
        with torch.no_grad(), self.device.on_host():
            for name, value in values.items():
                weight = self.value(name)
                self.clear_lower_halves(name, weight != value.to(weight.device, weight.dtype))
                self.ranges(name).copy_(value)
            for index in {self.chunk_of(name) for name in values}:
                self.refresh_copies(index)

    def require_elementwise(self, name: str) -> None:
        """Raise if a parameter must not be written, because it is made from its coordinates."""
        if self.place.has_coordinates(self.chunk_of(name)):
            raise EngineMisuse(
                f"{name}: it was written, but a method trains it in coordinates, and the next step makes it from them "
                "and its initial value. Call engine.detach(), change the weight and prepare the model again."
            )

    def clear_lower_halves(self, name: str, changed: Tensor | None = None) -> None:
        """Make a bf16 weight that was written from outside its own master: set the lower half of the master to zero,
        all of it or where `changed`.
        """
        if not self.place.has_split_masters(self.chunk_of(name)):
            return
        lower_half = self.state_ranges(name)["lo"]
        if changed is None:
            for lo, _ in lower_half.parts:
                lo.zero_()
        else:
            for lo, where in lower_half.matching(changed):
                lo.masked_fill_(where.to(lo.device), 0)

    def refresh_copies(self, index: int) -> None:
        """Copy a chunk's home to its resident weights, if it has both, and mark slots that hold the chunk as stale."""
        if (B.HOME, index) in self.host and (B.WEIGHTS, index) in self.gpu:
            with torch.no_grad(), self.device.on_host():
                self.gpu[B.WEIGHTS, index].copy_(self.host[B.HOME, index])
        self.invalidate(index)

    def invalidate(self, index: int) -> None:
        """Mark slots that hold an old value of a chunk as stale."""
        for slot, owner in self.slot_contents.items():
            if owner == index:
                self.slot_contents[slot] = None

    def replaced(self) -> str | None:
        """The name of a parameter that was exchanged, added or removed since the model was prepared."""
        for path, own, params in self._tables:
            if len(own) != len(params):
                name = next(iter(own.keys() ^ params.keys()))
                return f"{path}.{name}".lstrip(".")
            for key, param in params.items():
                if own.get(key) is not param:
                    return f"{path}.{key}".lstrip(".")
        for name, holder, attribute, value in self._attached:
            if getattr(holder, attribute, None) is not value:
                return name
        for path, now, before in self._children:
            for key, module in now.items():
                if module is not None and before.get(key) is not module:
                    known = {id(param) for param in self.params.values()}
                    name = next((name for name, param in module.named_parameters() if id(param) not in known), None)
                    if name is not None:
                        return f"{path}.{key}.{name}".lstrip(".")
        return None

    def replaced_data(self) -> list[str]:
        """Parameters whose `.data` was replaced."""
        with without_torch_function():
            return [name for name, param in self.params.items() if param.data_ptr() != self._addresses[name]]

    def release(self, chunks: Iterable[int] | None = None, *, keep: bool = True) -> None:
        """Make the parameters (those of `chunks`, or all) plain CPU tensors and free all buffers, one chunk after the
        other. Without `keep` they become unmaterialized.
        """
        for index in range(len(self.place.layout.chunks)) if chunks is None else chunks:
            for piece in self.place.chunk(index).pieces:
                param = self.params[piece.name]
                with torch.no_grad(), self.device.on_host():
                    value = self.value(piece.name)
                    if keep:
                        _make_plain(param, value)
                    else:
                        param.data = unmaterialized_like(value, value.dtype)
            self.host.pop((B.HOME, index), None)
            self.gpu.pop((B.WEIGHTS, index), None)
        self.gpu.clear()
        self.host.clear()
        self._mapped.clear()


def _make_plain(param: Tensor, value: Tensor) -> None:
    """Give a parameter ordinary CPU memory with this value."""
    with torch.no_grad():
        param.data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def _permuted_stride(name: str, param: Tensor) -> tuple[int, ...] | None:
    """None for a contiguous parameter, its strides for a permuted one."""
    if param.is_contiguous():
        return None
    if not param.permute(memory_order(param.stride())).is_contiguous():
        raise ModelUnsupported(
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}, so its elements overlap or have gaps "
            "between them. Make it contiguous before prepare."
        )
    return param.stride()
