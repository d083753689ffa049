"""Makes a plain model of a quantized one: its linear layers with the values that their codes stand for."""

from typing import Any

import torch
from torch import Tensor, nn

from outsize.model.parts import quant_state_of
from outsize.quant.installed import bitsandbytes
from outsize.quant.replace import is_transposed, linear_layers, replace_layers
from outsize.quant.weight_only import WeightOnly

_MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""What `mark_quantized` sets."""


def dequantize(model: Any, plain: nn.Module, dtype: torch.dtype) -> None:
    """Replace the quantized layers of a model in host memory. `plain`: a model of the same config on meta, with the
    layers as they were.
    """
    layers: dict[str, nn.Module] = {}
    with torch.no_grad():
        for path, linear in linear_layers(plain):
            weight = _dense(layer := model.get_submodule(path), dtype)
            if weight is None:
                continue
            values = weight.t().contiguous() if is_transposed(linear) else weight
            linear.weight = nn.Parameter(values, requires_grad=False)
            linear.bias = layer.bias
            layers[path] = linear
    replace_layers(model, layers)
    for name in _MARKS:
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _dense(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """The weight of a quantized layer in `dtype`, outputs as rows. None: the layer is not quantized."""
    if isinstance(layer, WeightOnly):
        return layer.dense_weight(dtype)
    if (state := quant_state_of(layer.weight)) is None:
        return None
    found: Tensor = bitsandbytes().functional.dequantize_4bit(layer.weight.data, state)
    return found.to(dtype)
