"""Quantizes weights while they are read: the model never exists in its own dtype."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, ModelUnsupported
from outsize.model.parts import named_parts
from outsize.model.weights import Weights, is_unmaterialized, require_finite
from outsize.quant.four_bit import quantize_4bit
from outsize.quant.replace import is_transposed, quantizable, quantized_layers
from outsize.quant.settings import Quantization

_PIECE = 2**18
"""Weights that are converted to fp16 at once, for int8. Temporary tensors stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Unquantized:
    """A weight as it is read."""

    name: str
    """The first of its names, by which the source of all weights has it."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool


class QuantizingWeights:
    """A source of quantized weights (see `Weights`). It holds one weight as it is read, and the scales of the last one
    that was quantized until they are read.
    """

    def __init__(self, weights: Weights, quantized: Mapping[str, Unquantized], quantization: Quantization):
        """`quantized`: by the name of the weight. `weights` has all parameters as they are without quantization."""
        self._weights, self._quantized, self._quantization = weights, quantized, quantization
        self._unread: dict[str, Tensor] = {}
        self._buffer: Tensor | None = None

    def read_into(self, name: str, tensor: Tensor) -> None:
        weight = self._weight_of(name)
        if weight is None:
            self._weights.read_into(name, tensor)
        elif name in self._unread:
            tensor.copy_(self._unread.pop(name))
        elif name == weight and tensor.is_contiguous():
            self._unread = self._quantize(weight, tensor)
        else:
            self._unread = self._quantize(weight, None)
            tensor.copy_(self._unread.pop(name))

    def close(self) -> None:
        self._unread, self._buffer = {}, None
        self._weights.close()

    def _weight_of(self, name: str) -> str | None:
        """The quantized weight that a part belongs to."""
        path, _, last = name.rpartition(".")
        candidates = (name, path, f"{path}.weight" if last == "SCB" else "")
        return next((each for each in candidates if each in self._quantized), None)

    def _quantize(self, name: str, into: Tensor | None) -> dict[str, Tensor]:
        """The parts of a weight, without the weight itself if that is written to `into`."""
        value = self._read(name)
        found: dict[str, Tensor]
        if self._quantization.load_in_8bit:
            packed = torch.empty(value.shape, dtype=torch.int8) if into is None else into
            found = {f"{name.removesuffix('weight')}SCB": _quantize_rows(name, value, packed)}
        else:
            packed = torch.empty((value.numel() + 1) // 2, 1, dtype=torch.uint8) if into is None else into
            settings = self._quantization
            scales = quantize_4bit(
                value, packed, settings.bnb_4bit_quant_type, double=settings.bnb_4bit_use_double_quant
            )
            parts = zip(("absmax", "nested_absmax", "nested_offset"), scales, strict=True)
            found = {f"{name}.{part}": scale for part, scale in parts if scale is not None}
            # NaN and infinity do not show in codes. They do in the largest absolute values, also in their mean.
            if not all(bool(scale.isfinite().all()) for scale in found.values()):
                require_finite(name, value, BadFile)
                raise ModelUnsupported(
                    f"{name}: the mean of its scales exceeds fp32. Set bnb_4bit_use_double_quant: false."
                )
        if into is None:
            found[name] = packed
        return found

    def _read(self, name: str) -> Tensor:
        """The weight as it is without quantization, with output features as rows."""
        of = self._quantized[name]
        numel = of.shape[0] * of.shape[1]
        if self._buffer is None:
            largest = max(each.shape[0] * each.shape[1] for each in self._quantized.values())
            self._buffer = torch.empty(largest, dtype=of.dtype)
        if self._buffer.dtype != of.dtype:
            self._buffer = torch.empty(len(self._buffer), dtype=of.dtype)
        value = self._buffer[:numel].view(of.shape)
        self._weights.read_into(of.name, value)
        return value.t().contiguous() if of.is_transposed else value


def _quantize_rows(name: str, value: Tensor, packed: Tensor) -> Tensor:
    """Write the int8 codes of a weight to `packed`, as bitsandbytes does, from fp16. Returns the scales of its rows."""
    scales = torch.empty(len(value))
    rows = max(1, _PIECE // value.shape[1])
    for at in range(0, len(value), rows):
        half = value[at : at + rows].half()
        scale = scales[at : at + rows] = half.abs().amax(1).float()
        factor = (127 / scale).masked_fill(scale == 0, 0).unsqueeze(1)
        packed[at : at + rows] = (half * factor).round_()
    if not bool(scales.isfinite().all()):
        require_finite(name, value, BadFile)
        raise ModelUnsupported(
            f"{name}: a value of {float(value.abs().max()):.3g} exceeds fp16, in which bitsandbytes quantizes to int8. "
            "Use load_in_4bit, or remove load_in_8bit."
        )
    return scales


def quantize(model: nn.Module, weights: Weights, quantization: Quantization) -> QuantizingWeights:
    """Replace the linear layers of a model on meta by quantized ones, whose weights are unmaterialized. `weights`: of
    the model as it is.
    """
    layers: dict[str, Any] = {
        path: model.get_submodule(path) for path in quantizable(model, quantization.llm_int8_skip_modules)
    }
    names = {id(param): name for name, param in model.named_parameters()}
    quantized = {
        f"{path}.weight": Unquantized(
            names[id(layer.weight)], tuple(layer.weight.shape), layer.weight.dtype, is_transposed(layer)
        )
        for path, layer in layers.items()
    }
    first_of: dict[str, str] = {}
    for name, each in quantized.items():
        if (other := first_of.setdefault(each.name, name)) != name:
            raise ModelUnsupported(f"{name} is the same weight as {other}. Name both in llm_int8_skip_modules.")
    quantized_layers(model, quantization)
    return QuantizingWeights(weights, quantized, quantization)


class _InMemory:
    """Weights that a model had."""

    def __init__(self, values: dict[str, Tensor]):
        self._values = values

    def read_into(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self._values.pop(name))

    def close(self) -> None:
        self._values.clear()


def quantize_in_memory(model: nn.Module, quantization: Quantization) -> None:
    """Quantize a model whose weights are in host memory, one by one."""
    with torch.no_grad():
        values = {name: param.data for name, param in model.named_parameters()}
        source = quantize(model, _InMemory(values), quantization)
        for name, part in named_parts(model):
            if is_unmaterialized(part):
                data = torch.empty(part.shape, dtype=part.dtype)
                source.read_into(name, data)
                part.data = data
        source.close()
