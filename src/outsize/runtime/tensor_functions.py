"""Functions of torch as prepared parameters see them: which access no memory, which write, and their arguments."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.compat import OpOverload, TensorBase

_ATTRIBUTES = (
    "shape dtype device layout requires_grad is_leaf grad_fn ndim is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested is_mps is_xpu is_mkldnn nbytes itemsize names name output_nr retains_grad _version _backward_hooks "
    "_post_accumulate_grad_hooks _base _grad_fn"
)
_METHODS = (
    "requires_grad_ size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex "
    "is_signed get_device register_hook is_inference __len__ detach_"
)
METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    vars(TensorBase)["requires_grad"].__set__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Functions that do not access a parameter's memory."""
REBINDS = {"set_", "resize_", "resize_as_", "share_memory_", "swap_tensors"}
"""Names of functions that give a tensor other memory."""
_data: Any = Tensor.data
_grad: Any = Tensor.grad
DATA_GET, DATA_SET = _data.__get__, _data.__set__
GRAD_GET, GRAD_SET, GRAD_DELETE = _grad.__get__, _grad.__set__, _grad.__delete__
COMPUTES = {F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm}
"""Operators of modules on their weights whose results are not views of them."""
_INPLACE_DUNDERS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift")
}


def writes_first(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is known to write its first argument. Other writes are found by the tensor's version."""
    if isinstance(func, OpOverload):
        return func._schema.is_mutable
    return (
        name == "__setitem__"
        or name in _INPLACE_DUNDERS
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )


def tensors_among(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, also in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_among(item)
    elif isinstance(value, dict):
        yield from tensors_among(list(value.values()))


def replaced(value: Any, memory: Mapping[int, Tensor]) -> Any:
    """Arguments with other tensors in place of some. `memory`: by id of the tensor that is replaced."""
    if isinstance(value, Tensor):
        return memory.get(id(value), value)
    if isinstance(value, (list, tuple)):
        items = [replaced(item, memory) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or torch.Size
    if isinstance(value, dict):
        return {key: replaced(item, memory) for key, item in value.items()}
    return value
