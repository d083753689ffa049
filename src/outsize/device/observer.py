"""Observer: counts live device memory by the allocation and release of storages, independently of plans.

A dispatch mode sees the outputs of every operator. A storage that it has not seen counts as allocated until its
finalizer runs. Memory that an operator allocates inside and frees is counted for the operators of `_HIDDEN`;
workspaces of other kernels are not. The device `sim` enforces its budget by this count, and
predictions must equal it to the byte.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from outsize.base.repeats import times
from outsize.compat import TorchDispatchMode, current_dispatch_modes, pop_dispatch_mode, push_dispatch_mode, storage_id

_WHERE = torch.ops.prim.device.default
"""Reads the device of a fake tensor: not an operator to count."""
_aten = torch.ops.aten
_NO_TRAFFIC = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.set_}
"""Allocate or exchange memory without reading or writing it."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> float:
    pairs = query.shape[:-1].numel() * key.shape[-2] / (2 if is_causal else 1)  # kernels skip the masked half
    return 2.0 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    is_causal: bool,
    **_: Any,
) -> float:
    return 2.5 * _attention(query, key, value, dropout, is_causal)  # five matrix products, two in forward


def _grouped(rows: Tensor, columns: Tensor, *_: Any, **__: Any) -> float:
    return 2.0 * rows.numel() * columns.shape[-1]


class _Hidden(NamedTuple):
    """What an operator does inside, where the dispatch mode sees nothing."""

    scratch_bytes: Callable[..., int] = lambda *_, **__: 0
    """Memory that it allocates and frees, while its result is allocated too. Written once and read once."""
    flops: Callable[..., float] = lambda *_, **__: 0.0


def _dequantized(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    *_: Any,
) -> int:
    """`gemm_4bit` makes the whole weight in the dtype of x, and of nested scales two copies in fp32. On CUDA a fused
    kernel may do without, depending on the GPU, for at most 1,536 rows.
    """
    scales = 0 if absmax_8bit is None else 8 * absmax_8bit.numel()
    return math.prod(shape) * x.element_size() + scales


def _times_packed(x: Tensor, packed: Tensor, shape: Sequence[int], *_: Any) -> float:
    return 2.0 * x.numel() * shape[0]


def _int8_product(a: Tensor, b: Tensor, *_: Any) -> float:
    return 2.0 * a.numel() * b.shape[0]


def _int32_result(
    a: Tensor,
    b: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """`int8_scaled_mm`: the product in int32, and in fp16 if the result has another dtype."""
    numel = a.numel() // a.shape[-1] * b.shape[0]
    return numel * (4 if dtype in (None, torch.float16) else 6)


_HIDDEN = {
    "bitsandbytes::gemm_4bit": _Hidden(_dequantized, _times_packed),
    "bitsandbytes::gemv_4bit": _Hidden(flops=_times_packed),
    "bitsandbytes::dequantize_4bit": _Hidden(),
    "bitsandbytes::dequantize_blockwise": _Hidden(),
    "bitsandbytes::int8_scaled_mm": _Hidden(_int32_result, _int8_product),
    "bitsandbytes::int8_linear_matmul": _Hidden(flops=_int8_product),
    "bitsandbytes::int8_vectorwise_dequant": _Hidden(lambda a, *_: 4 * a.numel()),
}
"""Operators of bitsandbytes 0.50 that read weights. The sizes are those of their CUDA code."""
_COUNTED_NAMESPACES = {"aten", "prim", "prims", "outsize"}


def hides_memory(func: Any) -> bool:
    """Whether an operator may allocate memory inside that no table has."""
    return func.namespace not in _COUNTED_NAMESPACES and func._overloadpacket._qualified_op_name not in _HIDDEN


_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
}
"""Formulas that torch's own counter lacks."""
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
_PACKED_ATTENTION = {"outsize::packed_attention", "outsize::packed_attention_backward"}
"""Of model/packed_attention.py, which has their formulas."""
ATTENTION_SHARE = 0.75
"""Share of a matrix product's FLOP/s that attention reaches. Measured on the H200: 329 to 501 TFLOP/s of 670."""
VIEW_LAUNCH, ATTENTION_LAUNCH = 1 / 3, 2.0
"""CPU time to launch a view and attention, relative to another operator. Fitted to layers' forwards and backwards on
the H200: see decision 13."""


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, also in lists. Called for every operator: walking a general
    tree takes too long.
    """
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold its elements: itself, or indices and values of a sparse tensor, which has no storage."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def push_mode(mode: TorchDispatchMode) -> None:
    """Enter a dispatch mode beyond a `with` block: a backward pass sees the modes of its caller.

    It goes to the bottom of the stack, so that callers' `with` blocks still find their own modes on top.
    """
    above = [pop_dispatch_mode() for _ in current_dispatch_modes()]
    push_dispatch_mode(mode)
    for other in reversed(above):
        push_dispatch_mode(other)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode that `push_mode` entered, wherever it is in this thread's stack."""
    above = []
    while current_dispatch_modes():
        top = pop_dispatch_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        push_dispatch_mode(other)


def _aliases(key: int, args: Any, kwargs: Any) -> bool:
    """Whether a storage is an argument's: a view of it or a write into it allocates nothing."""
    for leaf in tensors_of(*args, *kwargs.values()):
        for part in parts_of(leaf):
            if storage_id(part.untyped_storage()) == key:
                return True
    return False


def _released(observer: "weakref.ref[Observer]", key: int) -> None:
    alive = observer()
    if alive is not None:
        alive.live_bytes -= alive._alive.pop(key, 0)
        alive._earlier.pop(key, None)


class Observer(TorchDispatchMode):
    def __init__(self, on_allocation: Callable[[int, int], None] | None = None) -> None:
        """`on_allocation(new_bytes, live_bytes)` may raise to refuse; `live_bytes` includes the new ones."""
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0.0
        self.moved_bytes = 0
        self.launches = 0.0
        """Operators, weighted by the CPU time of their launch."""
        self.active = True
        self.seconds = 0.0
        self.cost_of: Callable[[float, int], float] | None = None
        """Seconds of an operator from its FLOPs and memory traffic. None: FLOPs, traffic, launches and seconds are not
        counted."""
        self.on_read: Callable[[Any, Tensor], None] | None = None
        """Called with an operator and every tensor that it reads."""
        self._alive: dict[int, int] = {}  # storage to bytes
        self._earlier: dict[int, int] = {}  # the same, of those before `begin_anew`
        self._on_allocation = on_allocation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.active and func is not _WHERE:
            if self.on_read is not None:
                for leaf in tensors_of(*args, *kwargs.values()):
                    self.on_read(func, leaf)
            if isinstance(out, Tensor):
                leaves: Sequence[Tensor] = parts_of(out)
            else:
                made = tensors_of(*out) if isinstance(out, (list, tuple)) else ()
                leaves = [part for leaf in made for part in parts_of(leaf)]
            for leaf in leaves:
                key = storage_id(leaf.untyped_storage())
                if key not in self._alive and not _aliases(key, args, kwargs):
                    self.adopt(leaf)
            hidden = _HIDDEN.get(func._overloadpacket._qualified_op_name)
            scratch = 0 if hidden is None else hidden.scratch_bytes(*args, **kwargs)
            if scratch:
                self._hold(scratch)
            if self.cost_of is not None:
                self._count(func, args, kwargs, out, leaves, hidden, self.cost_of)
        return out

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is released."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._alive or key in self._earlier:
            return
        num_bytes = storage.nbytes()
        if self._on_allocation is not None:
            self._on_allocation(num_bytes, self.live_bytes + num_bytes)
        self._alive[key] = num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # The registry of finalizers is global, so a long-lived storage must not keep the observer alive.
        weakref.finalize(storage, _released, weakref.ref(self), key)

    def _hold(self, num_bytes: int) -> None:
        """Count memory that an operator has allocated beside its result, and freed."""
        if self._on_allocation is not None:
            self._on_allocation(num_bytes, self.live_bytes + num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + num_bytes)

    def begin_anew(self) -> None:
        """Count from zero: storages that are alive now count in `earlier_bytes` and not in `live_bytes`."""
        self._earlier |= self._alive
        self._alive = {}
        self.live_bytes = self.peak_bytes = 0

    @property
    def earlier_bytes(self) -> int:
        """Bytes of storages from before `begin_anew` that are still alive."""
        return sum(self._earlier.values())

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        leaves: Sequence[Tensor],
        hidden: _Hidden | None,
        cost_of: Callable[[float, int], float],
    ) -> None:
        packet = func._overloadpacket
        formula: Any = _FLOPS.get(packet) or flop_registry.get(packet)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
        flops += hidden.flops(*args, **kwargs) if hidden is not None else 0.0
        is_attention = packet in _ATTENTION or packet._qualified_op_name in _PACKED_ATTENTION
        moves = not func.is_view and packet not in _NO_TRAFFIC
        read = (part for t in tensors_of(*args, *kwargs.values()) for part in parts_of(t))
        moved = sum(t.nbytes for t in read) + sum(t.nbytes for t in leaves) if moves else 0
        moved += 2 * hidden.scratch_bytes(*args, **kwargs) if hidden is not None else 0
        count = times()
        self.flops += count * flops
        self.moved_bytes += count * moved
        self.launches += count * (VIEW_LAUNCH if func.is_view else ATTENTION_LAUNCH if is_attention else 1.0)
        self.seconds += count * cost_of(flops / ATTENTION_SHARE if is_attention else flops, moved)

    @contextmanager
    def paused(self) -> Iterator[None]:
        was, self.active = self.active, False
        try:
            yield
        finally:
            self.active = was

    # The Meter protocol.

    def level(self) -> int:
        return self.live_bytes

    def peak(self) -> int:
        return self.peak_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes
