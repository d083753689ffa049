"""How the frozen weight below an adapter is read.

An autograd Function keeps a `BaseWeight` on its `ctx` and reads it again in backward. That is correct for a streamed
base: a parameter's address never changes, and its chunk is in its slot again when the backward of its block runs. A
quantized weight is dequantized for each use, and its dense form is never saved.

Another format needs a class with the members of `BaseWeight` and a case in `base_weight`.
"""

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.compat import is_traceable_wrapper_subclass
from outsize.quant.weight_only import WeightOnly

_COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BaseWeight(Protocol):
    @property
    def is_quantized(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the layer computes in without autocast. None: that of its input."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype, of shape (outputs, inputs)."""


@dataclass(slots=True)
class DenseWeight:
    weight: Tensor
    is_quantized: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


@dataclass(slots=True)
class FourBitWeight:
    """Of bitsandbytes' `Linear4bit`."""

    packed: Tensor
    quant_state: Any
    dtype: torch.dtype | None
    is_quantized: bool = True

    def dense(self, dtype: torch.dtype) -> Tensor:
        found: Tensor = sys.modules["bitsandbytes"].functional.dequantize_4bit(self.packed, self.quant_state)
        return found.to(dtype)


@dataclass(slots=True)
class WeightOnlyWeight:
    """Of an int8 or fp8 layer of ours."""

    layer: WeightOnly
    dtype: torch.dtype | None = None
    is_quantized: bool = True

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.layer.dense_weight(dtype)


def base_weight(layer: nn.Module) -> BaseWeight | str:
    """The weight of a linear layer, or why it cannot be read here."""
    weight: Any = getattr(layer, "weight", None)
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None and isinstance(layer, bitsandbytes.nn.Linear4bit):
        state = getattr(weight, "quant_state", None)
        if state is None:
            return "4-bit weights that are not quantized yet"
        if getattr(state, "packing_format_for_cpu", False):
            return "4-bit weights that are packed for inference"
        if tuple(state.shape) != (layer.out_features, layer.in_features):
            return "4-bit weights of transposed shape"
        return FourBitWeight(weight, state, layer.compute_dtype)
    if isinstance(layer, WeightOnly):
        return WeightOnlyWeight(layer)
    if type(layer).forward is not nn.Linear.forward or is_traceable_wrapper_subclass(weight):
        return f"a base of type {type(layer).__name__}"
    if not isinstance(weight, Tensor) or weight.dtype not in _COMPUTED_IN:
        return f"a base in {getattr(weight, 'dtype', None)}"
    return DenseWeight(weight)
