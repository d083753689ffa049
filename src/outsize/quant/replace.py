"""Replaces the linear layers of a model by quantized ones with unmaterialized weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from outsize import compat
from outsize.base.errors import ModelUnsupported
from outsize.quant.settings import Quantization


def quantizable(model: nn.Module, skip: tuple[str, ...] = ()) -> list[str]:
    """The paths of the linear layers that transformers quantizes: all but the output head, tied weights and those that
    it keeps in fp32. `skip`: names of modules, or ends of names, that are not quantized either.
    """
    private = compat.transformers()
    kept = [*private.get_keys_to_not_convert(model), *skip, *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    found = [path for path, _ in linear_layers(model) if private.should_convert_module(path, kept)]
    if not found:
        raise ModelUnsupported(
            f"{type(model).__name__} has no linear layers that can be quantized. Remove load_in_4bit and load_in_8bit, "
            "or shorten llm_int8_skip_modules."
        )
    return found


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those of torch, and the transposed ones of GPT-2. Other classes compute something else."""
    from transformers.pytorch_utils import Conv1D

    return [(path, module) for path, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def is_transposed(linear: nn.Module) -> bool:
    return not isinstance(linear, nn.Linear)


def features(linear: Any) -> tuple[int, int]:
    """Its output and input features."""
    rows, columns = linear.weight.shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def quantized_layer(quantization: Quantization, dtype: torch.dtype) -> Callable[[Any], nn.Module]:
    """Makes the layer that replaces a linear layer. `dtype`: of the model."""
    from outsize.quant.modules import Int8Linear, four_bit_linear, quant_state

    name, quant_type = quantization.bnb_4bit_compute_dtype, quantization.bnb_4bit_quant_type
    compute_dtype = dtype if name is None else getattr(torch, name)

    def make(linear: Any) -> nn.Module:
        if quantization.load_in_8bit:
            return Int8Linear(features(linear), linear.bias, dtype)
        nested = quantization.bnb_4bit_use_double_quant
        state = quant_state(features(linear), linear.weight.dtype, quant_type, nested=nested)
        made: nn.Module = four_bit_linear(features(linear), linear.bias, state, compute_dtype)
        return made

    return make


def quantized_layers(model: nn.Module, quantization: Quantization) -> list[nn.Module]:
    """Replace the linear layers of a model by quantized ones with unmaterialized weights, and return these."""
    settings = config_section(model, quantization)
    layers: dict[str, Any] = {
        path: model.get_submodule(path) for path in quantizable(model, quantization.llm_int8_skip_modules)
    }
    make = quantized_layer(quantization, next(iter(layers.values())).weight.dtype)
    made = {path: make(layer) for path, layer in layers.items()}
    replace_layers(model, made)
    mark_quantized(model, settings)
    return list(made.values())


def replace_layers(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """`made`: by path. A layer that the model has under several paths is replaced under all of them."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    for path, layer in made.items():
        old = model.get_submodule(path)
        layer.train(old.training)
        for other in paths[id(old)]:
            model.set_submodule(other, layer)


def mark_quantized(model: Any, settings: Mapping[str, Any]) -> None:
    """Set what transformers and PEFT read of a quantized model. `settings`: `quantization_config` of a config."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.config.quantization_config = quantizer.quantization_config
    model.quantization_method = quantizer.quantization_config.quant_method
    model.is_loaded_in_4bit = bool(settings.get("load_in_4bit"))
    model.is_loaded_in_8bit = bool(settings.get("load_in_8bit"))


def config_section(model: Any, quantization: Quantization) -> dict[str, Any]:
    """`quantization_config` of a model that is quantized while it is read."""
    skip: list[str] = list(quantization.llm_int8_skip_modules)
    if skip:  # transformers takes a list for all modules that are left out
        skip = sorted({*skip, *compat.transformers().get_keys_to_not_convert(model)})
    shared = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": skip or None}
    if quantization.load_in_8bit:
        return {**shared, "load_in_8bit": True}
    return {
        **shared,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quantization.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": quantization.bnb_4bit_use_double_quant,
        "bnb_4bit_compute_dtype": quantization.bnb_4bit_compute_dtype or str(model.dtype).removeprefix("torch."),
    }
