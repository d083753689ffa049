"""Recognizes quantized models by their config and by the tensors in their files.

Those of bitsandbytes and fp8 are read for adapters (quant/stored.py), others are refused. Read as plain numbers,
quantized weights lack their scales, and training would start from garbage.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile, ModelUnsupported
from outsize.checkpoint.tensorfile import TensorSpec

_SECTIONS = ("quantization_config", "compression_config")
READ = ("bitsandbytes", "fp8")
"""Methods whose folders are read, for adapters."""
_DO = (
    "Use the unquantized model (for adapters, with load_in_4bit if memory is short), or dequantize it with "
    "transformers (from_pretrained with FineGrainedFP8Config(dequantize=True) or Mxfp4Config(dequantize=True), or "
    "model.dequantize()) and save that"
)
_SCALES = re.compile(
    r"""(?P<weight>.+?)(?:
        # fp8, nvfp4, compressed-tensors
        [._]scale_inv
      | \.(?:weight|input|activation|output)_(?:scale(?:_inv|_2)?|global_scale|zero_point|packed|shape|g_idx)
        # mxfp4
      | _(?:scales|blocks)
        # gptq, awq
      | \.(?:qweight|qzeros|scales|g_idx)
        # bitsandbytes
      | \.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+|SCB|weight_format)
    )""",
    re.VERBOSE,
)
"""Names of tensors that quantization methods store with weights, or in their place."""
_FP8 = {dtype for name, dtype in vars(torch).items() if name.startswith("float8_") and isinstance(dtype, torch.dtype)}


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """The name of the method that a config (as in config.json) quantizes with, also in a nested config such as
    text_config. None: not quantized.
    """
    settings = quantization_section(config)
    return None if settings is None else _method(settings)


def quantization_section(config: Mapping[str, Any]) -> Any:
    """What a config says of quantization. None: nothing."""
    for section in _SECTIONS:
        if (settings := config.get(section)) is not None and settings != {}:
            return settings
    for value in config.values():
        if isinstance(value, Mapping) and (found := quantization_section(value)) is not None:
            return found
    return None


def _method(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return f"an unknown method ({settings!r})"
    if (method := settings.get("quant_method")) is not None:
        return str(getattr(method, "value", method))
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return f"an unknown method (its keys are {', '.join(map(str, settings))})"


def refuse_quantized_config(config: Mapping[str, Any], where: object, *, for_adapter: bool = False) -> None:
    """`for_adapter`: the methods of READ pass."""
    method = quantization_of(config)
    if method is None or (for_adapter and method in READ):
        return
    if method in READ:
        raise ModelUnsupported(
            f"{where}: its weights are quantized with {method}, and only adapters can be trained on these. Set "
            "adapter: lora in a run file (docs/lora.md), or use the unquantized model."
        )
    raise ModelUnsupported(f"{where}: its weights are quantized with {method}, which outsize does not read. {_DO}.")


def refuse_quantized_folder(folder: Path) -> None:
    """Refuse a folder by its config.json, if that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(config, Mapping):
        refuse_quantized_config(config, folder)


def refuse_quantized_tensors(
    stored: Mapping[str, tuple[Path, TensorSpec]], params: Mapping[str, Tensor], known: Collection[str]
) -> None:
    """Refuse files with scales of weights, or with weights in 8-bit or integer storage.

    Args:
        stored: by key, its file and its spec there.
        params: the model's parameters by key.
        known: keys of the model, whose own tensors may have any name.
    """
    for key, (path, spec) in stored.items():
        is_part = key in params and params[key].dtype == spec.dtype
        is_integer = key in params and params[key].is_floating_point() and not spec.dtype.is_floating_point
        if (spec.dtype in _FP8 and not is_part) or is_integer:
            dtype = str(spec.dtype).removeprefix("torch.")
            raise BadFile(
                f"{path}: {key} is stored as {dtype}, which outsize does not read as a weight: it is quantized. {_DO}."
            )
        scale = _SCALES.fullmatch(key) if key not in known else None
        if scale is not None and _has_sibling(key, scale["weight"], stored.keys() | params.keys()):
            raise BadFile(
                f"{path}: {key} lies beside the weights, as in a quantized model, which outsize does not read. {_DO}."
            )


def _has_sibling(key: str, weight: str, keys: Collection[str]) -> bool:
    """Whether there is another tensor of the same module or weight. A name alone may be anything."""
    return any(other != key and (other == weight or other.startswith((f"{weight}.", f"{weight}_"))) for other in keys)
