"""Reads folders whose weights are quantized already: bitsandbytes (4 and 8 bits), and fp8 with scales per block."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.model.weights import FileWeights, weight_files
from outsize.quant.four_bit import NESTED_BLOCK
from outsize.quant.replace import features, linear_layers, mark_quantized, replace_layers
from outsize.quant.settings import QUANT_TYPES, Quantization
from outsize.quant.weight_only import Fp8Linear

_AGAIN = "Get the folder again"
_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MARKS = (".absmax", ".SCB", ".weight_scale_inv")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(slots=True)
class _Found:
    """What the files say beside the tensors that are parts of the model."""

    layers: dict[str, nn.Module] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    """Tensors that were read: lookup tables, and the state in JSON."""
    offsets: dict[str, float] = field(default_factory=dict)
    """Parts whose values are in JSON, by name."""


class StoredWeights(FileWeights):
    """The files of a quantized folder. `folder`: see FileWeights. `model`: with the layers of the files."""

    def __init__(self, folder: Path, model: nn.Module, found: _Found):
        self._found = found
        super().__init__(folder, model)

    def _refuse_quantized_folder(self) -> None:
        pass

    def _read_apart(self) -> set[str]:
        return self._found.keys | self._found.offsets.keys()

    def _require_fit(self, name: str, tensor: Tensor, spec: TensorSpec, path: Path) -> None:
        """The bytes of 4-bit weights may be stored as numbers of any dtype (`bnb_4bit_quant_storage`)."""
        if hasattr(tensor, "quant_state"):
            _require(spec.nbytes == tensor.nbytes, path, f"{name} has {spec.nbytes} bytes instead of {tensor.nbytes}")
            return
        super()._require_fit(name, tensor, spec, path)
        if tensor.dtype.itemsize == 1 or not isinstance(tensor, nn.Parameter):
            _require(spec.dtype == tensor.dtype, path, f"{name} is stored as {spec.dtype} instead of {tensor.dtype}")

    def read_into(self, name: str, tensor: Tensor) -> None:
        if name in self._found.offsets:
            tensor.fill_(self._found.offsets[name])
            return
        file, key = self._places[name]
        spec = file.entries[key].spec
        if spec.dtype.itemsize > 1 and tensor.dtype == torch.uint8:
            data = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            file.read_range(key, data.view(-1).view(spec.dtype), 0)
            if data is not tensor:
                tensor.copy_(data)
        else:
            super().read_into(name, tensor)


def read_quantized(
    folder: Path, model: Any, section: Mapping[str, Any], quantization: Quantization | None
) -> StoredWeights | None:
    """Replace the linear layers of a model on meta by those of the files, whose weights are unmaterialized. None: the
    files have other names, which transformers converts. `section`: `quantization_config` of the folder.
    `quantization`: what the user wants.
    """
    is_fp8 = section.get("quant_method") == "fp8"
    _require_same(folder, section, quantization)
    compute_dtype = None if quantization is None else quantization.bnb_4bit_compute_dtype
    make = _fp8_layer(folder, model, section) if is_fp8 else _bitsandbytes_layer(model, compute_dtype)
    files: dict[str, TensorFile] = {}
    opened = []
    try:
        for path in weight_files(folder):
            opened.append(TensorFile(path))
            files.update(dict.fromkeys(opened[-1].entries, opened[-1]))
        found = _Found()
        for name, linear in linear_layers(model):
            if (layer := make(files, name, linear, found)) is not None:
                found.layers[name] = layer
    finally:
        for file in opened:
            file.close()
    if not found.layers:
        if any(key.endswith(_MARKS) for key in files):
            return None
        raise BadFile(
            f"{folder}: its config says that weights are quantized, but no linear layer of {type(model).__name__} is. "
            f"{_AGAIN}."
        )
    replace_layers(model, found.layers)
    mark_quantized(model, section)
    weights = StoredWeights(folder, model, found)
    if weights.missing and weights.unexpected:
        weights.close()
        return None
    return weights


def require_converted(folder: Path, section: Mapping[str, Any]) -> None:
    """Refuse a folder with other names if transformers would load it otherwise than it is trained here."""
    if not section.get("load_in_4bit"):
        raise ModelUnsupported(
            f"{folder}: the names of its weights are not those of the model, and outsize converts such folders with "
            "4-bit weights of bitsandbytes only. Use the unquantized model, with load_in_4bit or load_in_8bit."
        )


def adopt_layers(model: Any, quantization: Quantization | None) -> None:
    """Set up the 4-bit layers of a model that transformers has loaded as `read_quantized` does."""
    from outsize.quant.modules import bnb

    name = None if quantization is None else quantization.bnb_4bit_compute_dtype
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = model.dtype if name is None else getattr(torch, name)
            module.compute_type_is_set, module.support_avx512bf16_for_cpu = True, False


_Make = Callable[[Mapping[str, TensorFile], str, Any, _Found], nn.Module | None]
"""Takes the files by key, a layer's path and the layer. None: it is not quantized."""


def _bitsandbytes_layer(model: Any, compute_dtype: str | None) -> _Make:
    from outsize.quant.modules import Int8Linear, four_bit_linear, quant_state

    dtype = model.dtype if compute_dtype is None else getattr(torch, compute_dtype)

    def make(files: Mapping[str, TensorFile], path: str, linear: Any, found: _Found) -> nn.Module | None:
        weight, shape, bias = f"{path}.weight", features(linear), linear.bias
        if f"{path}.SCB" in files:
            found.keys |= {f"{path}.weight_format"}
            return Int8Linear(shape, bias, model.dtype)
        if f"{weight}.absmax" not in files and not any(f"{weight}.{key}" in files for key in _STATES):
            return None
        state = _read_state(files, weight, shape)
        is_nested = state.nested_offset is not None
        maps = [f"{weight}.quant_map", *([f"{weight}.nested_quant_map"] if is_nested else [])]
        found.keys |= {state.key, *maps}
        codes = [_read_table(files, key, size) for key, size in zip(maps, (16, 256), strict=False)]
        if state.nested_offset is not None:
            found.offsets[f"{weight}.nested_offset"] = state.nested_offset
        made = quant_state(
            shape,
            state.dtype,
            state.quant_type,
            nested=is_nested,
            blocksize=state.blocksize,
            code=codes[0],
            nested_code=codes[1] if is_nested else None,
        )
        layer: nn.Module = four_bit_linear(shape, bias, made, dtype)
        return layer

    return make


_STATES = {f"quant_state.bitsandbytes__{name}": name for name in QUANT_TYPES}


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON beside a 4-bit weight, a tensor of its characters."""

    key: str
    quant_type: str
    blocksize: int
    dtype: torch.dtype
    nested_offset: float | None
    """None: without double quantization."""


def _read_state(files: Mapping[str, TensorFile], weight: str, shape: tuple[int, int]) -> _State:
    last = next((last for last in _STATES if f"{weight}.{last}" in files), None)
    if last is None:
        file = files[f"{weight}.absmax"]
        raise BadFile(
            f"{file.path}: {weight} has scales, but lacks its quant_state.bitsandbytes__nf4 or __fp4. {_AGAIN}."
        )
    key = f"{weight}.{last}"
    path, text = files[key].path, bytes(files[key].read(key).to(torch.uint8).tolist())
    try:
        held = json.loads(text)
        nested = held.get("nested_blocksize")
        found = _State(
            key,
            str(held["quant_type"]),
            int(held["blocksize"]),
            getattr(torch, str(held["dtype"])),
            None if nested is None else float(held["nested_offset"]),
        )
        stored_shape = tuple(held["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path}: {key} cannot be read ({type(error).__name__}: {error}). {_AGAIN}.") from None
    _require(stored_shape == shape, path, f"{weight} has the shape {stored_shape}, but {shape} in the model")
    _require(found.quant_type == _STATES[last], path, f"{key} says {found.quant_type}")
    _require(found.blocksize in _BLOCKSIZES, path, f"{key} has the block size {found.blocksize}")
    _require(nested in (None, NESTED_BLOCK), path, f"{key} has the nested block size {nested}, which is not supported")
    _require(found.dtype in (torch.bfloat16, torch.float16, torch.float32), path, f"{key} has the dtype {found.dtype}")
    return found


def _read_table(files: Mapping[str, TensorFile], key: str, size: int) -> Tensor:
    if key not in files:
        path = next(iter(files.values())).path.parent
        raise BadFile(f"{path} lacks {key}. {_AGAIN}.")
    values = files[key].read(key)
    _require(
        tuple(values.shape) == (size,) and values.dtype == torch.float32,
        files[key].path,
        f"{key} has {values.numel()} values of {values.dtype} instead of {size} of float32",
    )
    return values


def _fp8_layer(folder: Path, model: Any, section: Mapping[str, Any]) -> _Make:
    block, scheme = section.get("weight_block_size", (128, 128)), section.get("activation_scheme", "dynamic")
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not is_pair or scheme != "dynamic":
        what = f"activation_scheme {scheme}" if is_pair else f"weight_block_size {block}"
        raise ModelUnsupported(
            f"{folder}: its fp8 weights have {what}, which outsize does not read: it reads weights with scales per "
            "block, and activations without. Use the unquantized model."
        )
    height, width = block

    def make(files: Mapping[str, TensorFile], path: str, linear: Any, found: _Found) -> nn.Module | None:
        key = f"{path}.weight_scale_inv"
        if key not in files:
            return None
        dtype = files[key].entries[key].spec.dtype
        _require(dtype in _SCALE_DTYPES, files[key].path, f"{key} is stored as {dtype}, which is no dtype of scales")
        rows, columns = features(linear)
        return Fp8Linear(
            columns, rows, bias=linear.bias, block=(height, width), scale_dtype=dtype, compute_dtype=model.dtype
        )

    return make


def _require_same(folder: Path, section: Mapping[str, Any], quantization: Quantization | None) -> None:
    """The files decide how weights are quantized."""
    if quantization is None:
        return
    wanted = "load_in_4bit" if quantization.load_in_4bit else "load_in_8bit"
    if not section.get(wanted):
        has = (
            "fp8"
            if section.get("quant_method") == "fp8"
            else "bitsandbytes, " + ("8 bits" if section.get("load_in_8bit") else "4 bits")
        )
        raise ConfigError(f"{wanted}: the weights of {folder} are quantized already ({has}). Remove {wanted}.")


def _require(holds: bool, path: Path, problem: str) -> None:
    if not holds:
        raise BadFile(f"{path}: {problem.replace('torch.', '')}. {_AGAIN}.")
