"""Fake tensors for a model without weights, with real values where they decide what the model runs."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.compat import fake_tensor
from outsize.device.observer import tensors_of

LARGE = 2**24
"""Elements. Larger tensors stay fake: a mask of tokens × tokens would dominate the time, and models branch on masks of
rows × tokens."""


class FakeWeights(fake_tensor.FakeTensorMode):
    """Fake tensors, except values that depend only on the batch or on a random number.

    Token ids, positions and masks are integers that do not depend on weights. Models read them (is anything masked? is
    this batch packed?) and then save different tensors. The same holds for single random numbers (drop this layer?).
    These are computed unless they are large; everything else is fake.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls: autograd reads devices
            return args[0].fake_device
        if func._overloadpacket in _INDEXED:
            args = (args[0], _as_indices(args[1]), *args[2:])
        given = tensors_of(*args, *(kwargs or {}).values())
        is_made = func._overloadpacket in _FILLED
        is_known = (given or is_made) and not any(
            isinstance(t, fake_tensor.FakeTensor) or t.is_floating_point() for t in given
        )
        if is_known and _num_elements(given, args if is_made else ()) < LARGE:
            out = func(*args, **(kwargs or {}))
            if not any(t.is_floating_point() for t in tensors_of(out)):
                return out
        if func is torch.ops.aten._to_copy.default and (mask := _mask_of(args[0], kwargs or {})) is not None:
            return mask
        # The cache of results would keep a storage among the arguments alive.
        self.cache_enabled, was = (
            self.cache_enabled and func is not torch.ops.aten.set_.source_Storage,
            self.cache_enabled,
        )
        try:
            shape: Any = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = was
        if func._overloadpacket in _DRAWN and shape.numel() == 1:
            # A constant for torch, which computes what depends only on constants.
            return self.fake_tensor_converter.from_real_tensor(self, func(*args, **(kwargs or {})), make_constant=True)
        if is_made:
            shape.filled = partial(func, *args, **(kwargs or {})), shape._version
        return shape


def _num_elements(given: list[Tensor], sizes: tuple[Any, ...]) -> int:
    """Elements of an operator's result, if it broadcasts its inputs. `sizes`: the arguments of a factory function."""
    if not given:
        return math.prod(sizes[0]) if sizes and isinstance(sizes[0], (list, tuple)) else 0
    dims = max(t.dim() for t in given)
    return math.prod(max((t.shape[-i] for t in given if t.dim() >= i), default=1) for i in range(1, dims + 1))


_INDEXED = {
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._index_put_impl_,
    torch.ops.aten._unsafe_index,
}


def _as_indices(indices: Any) -> list[Tensor | None]:
    """Index tensors in place of masks with known values, so that the size of the result is known."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, fake_tensor.FakeTensor):
            places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return places


def _mask_of(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The real values of a filled float tensor that is cast to integers; None for other tensors.

    Decoders cast `torch.ones` to a mask and branch on whether anything is masked. Float tensors are fake until then, so
    this fills the tensor again.
    """
    fill, version = getattr(tensor, "filled", (None, 0))
    dtype = kwargs.get("dtype") or tensor.dtype
    if fill is None or tensor._version != version or dtype.is_floating_point or tensor.numel() >= LARGE:
        return None
    return torch.ops.aten._to_copy.default(fill(), **kwargs)


_FILLED = {
    torch.ops.aten.arange,
    torch.ops.aten.full,
    torch.ops.aten.ones,
    torch.ops.aten.zeros,
    torch.ops.aten.scalar_tensor,
}
"""Factory functions with known values. Not `empty`, whose memory must stay fake."""
_DRAWN = {torch.ops.aten.rand, torch.ops.aten.randn, torch.ops.aten.randint}
