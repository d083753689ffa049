"""Reads weights from files directly into their final memory.

A model whose weights are still in files is *unmaterialized*: its parameters have shape and dtype on the CPU but no
memory. (Meta tensors would do the same, but torch does not let a meta parameter get real data later.)
The tracer fills in the layers it runs; the engine fills every chunk's home, one parameter at a time. Nothing else may
read an unmaterialized parameter.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, OutsizeError
from outsize.base.log import log
from outsize.checkpoint.model_files import INDEX, SINGLE
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.model.parts import named_parts
from outsize.model.quantized import refuse_quantized_folder, refuse_quantized_tensors

_CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes that aminmax supports, without those of 8 bits."""


class Weights(Protocol):
    """A source of values for unmaterialized parameters."""

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a CPU tensor with the parameter of this name."""

    def close(self) -> None:
        """Close the files, after all values are read."""


def unmaterialize(model: nn.Module) -> nn.Module:
    """Replace every meta parameter of a model by an unmaterialized one. Tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(
                        unmaterialized_like(param, param.dtype), requires_grad=param.requires_grad
                    )
                module._parameters[key] = made[id(param)]
    return model


def unmaterialized(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    data = torch.empty(tuple(shape), dtype=dtype)  # its pages are never touched, so they use no memory
    data.untyped_storage().resize_(0)
    return data


def unmaterialized_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return unmaterialized(param.shape, dtype)


def is_unmaterialized(param: Tensor) -> bool:
    return param.numel() > 0 and param.device.type == "cpu" and param.untyped_storage().nbytes() == 0


def convert(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert parameters to another dtype, one at a time. Unmaterialized ones stay so."""
    for name, param in model.named_parameters():
        if name in dtypes and param.dtype != dtypes[name]:
            param.data = (
                unmaterialized_like(param, dtypes[name]) if is_unmaterialized(param) else param.data.to(dtypes[name])
            )


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass (16 GB/s of bf16 on one CPU core): aminmax propagates NaN and
    allocates nothing.
    """
    if tensor.dtype not in _CHECKED or tensor.numel() == 0:
        return True
    return all(map(math.isfinite, torch.stack(tensor.detach().aminmax()).tolist()))


def require_finite(name: str, tensor: Tensor, error: type[OutsizeError]) -> None:
    """Refuse a weight with NaN or infinity by its name: training would spread it over all weights in one step."""
    if not is_finite(tensor):
        count = int((~torch.isfinite(tensor)).sum())
        do = "Get its file again; if the model means these values, replace them before training (torch.nan_to_num)"
        raise error(f"{name}: {count} of its {tensor.numel()} values are NaN or infinite. {do}.")


class FileWeights:
    """The safetensors files of a Hugging Face folder, matched to a model's parameters and buffers. They stay open until
    `close`.
    """

    def __init__(self, folder: Path, model: nn.Module):
        self.folder = folder
        self._refuse_quantized_folder()
        self._files: list[TensorFile] = []
        try:
            for path in weight_files(folder):
                self._files.append(TensorFile(path))
            self._match(model)
        except BaseException:
            self.close()
            raise

    # What is different in a folder with quantized weights (quant/stored.py).

    def _refuse_quantized_folder(self) -> None:
        refuse_quantized_folder(self.folder)

    def _read_apart(self) -> Set[str]:
        """Tensors of the files, and parts of the model, that are not read as tensors of one name."""
        return frozenset()

    def _require_fit(self, name: str, tensor: Tensor, spec: TensorSpec, path: Path) -> None:
        if spec.shape != tuple(tensor.shape):
            raise BadFile(
                f"{path}: {name} has the shape {spec.shape}, but {tuple(tensor.shape)} in the model. Use the files of "
                "this model."
            )

    def _match(self, model: nn.Module) -> None:
        apart = self._read_apart()
        where = {key: file for file in self._files for key in file.entries if key not in apart}
        params = {name: part for name, part in named_parts(model, remove_duplicate=False) if name not in apart}
        # A model computes the buffers that it does not save, even if old files have them.
        buffers = saved_buffers(model)
        refuse_quantized_tensors(
            {key: (file.path, file.entries[key].spec) for key, file in where.items()},
            params,
            params.keys() | buffers.keys(),
        )
        aliases: dict[int, list[str]] = {}
        for name, tensor in (*params.items(), *buffers.items()):
            aliases.setdefault(id(tensor), []).append(name)
        self._places: dict[str, tuple[TensorFile, str]] = {}
        """Parameter or buffer, by its first name, to its file and key there."""
        self.missing: list[str] = []
        """Parameters that no file has, under any of their names."""
        self._absent: list[str] = []
        """Buffers that no file has: they keep their initial values."""
        self._doubled: dict[str, str] = {}
        """Names of tied weights that the files have more than once, with the first name."""
        for names in aliases.values():
            found = [name for name in names if name in where]
            if not found:
                (self.missing if names[0] in params else self._absent).append(names[0])
                continue
            self._doubled.update({name: found[0] for name in found[1:]})
            file = where[found[0]]
            self._require_fit(names[0], (params | buffers)[names[0]], file.entries[found[0]].spec, file.path)
            self._places[names[0]] = (file, found[0])
        self._where = where
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        self.unexpected = sorted(
            key for key in where.keys() - params.keys() - buffers.keys() if not any(p.search(key) for p in ignored)
        )
        """Tensors in the files that the model has no place for."""

    def untied(self) -> list[str]:
        """Weights that the model ties but that have different values in the files. Reads them."""
        return [
            name
            for name, tied in self._doubled.items()
            if not torch.equal(*(self._where[key].read(key) for key in (name, tied)))
        ]

    def rounded(self, model: nn.Module) -> list[str]:
        """Parameters whose dtype cannot represent the values in the files: fp16 or fp32 files for a bf16 model."""
        dtypes = {name: param.dtype for name, param in model.named_parameters() if param.dtype in _CHECKED}
        stored = {name: file.entries[key].spec.dtype for name, (file, key) in self._places.items() if name in dtypes}
        return [name for name, dtype in stored.items() if torch.promote_types(dtype, dtypes[name]) != dtypes[name]]

    def require_whole(self) -> None:
        """Raise if a parameter has no tensor in the files. Log tensors that the model does not use."""
        if self.missing:
            raise BadFile(
                f"{self.folder} lacks {_some(self.missing)}. Use the folder that the model was saved to; tie weights "
                "before (model.tie_weights())."
            )
        if untied := self.untied():
            raise BadFile(
                f"{self.folder} has different values for weights that the model ties: {_some(untied)}. Build the model "
                "with tie_word_embeddings=False, or use the folder that it was saved to."
            )
        for what, names in (
            ("has tensors that the model has no place for", self.unexpected),
            ("lacks buffers, which stay as they were made", self._absent),
        ):
            if names:
                log.warning("%s %s: %s", self.folder, what, _some(names))

    def read_into(self, name: str, tensor: Tensor) -> None:
        file, key = self._places[name]
        file.read_into(key, tensor)

    def fill_buffers(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name in self._places:
                self.read_into(name, buffer)

    def close(self) -> None:
        for file in self._files:
            file.close()


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a model saves, under all their names."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def weight_files(folder: Path) -> Sequence[Path]:
    """The weight files of a folder: the single file if there is one, as in transformers, else those of its index."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        try:
            named = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in named.values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadFile(f"{folder / INDEX} cannot be read ({error}). Get the folder again.") from None
        lost = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if lost:
            raise BadFile(f"{folder} lacks files that {INDEX} names: {_some(lost)}. Get the folder again.")
        return [folder / name for name in names]
    held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing" if folder.is_dir() else "no such folder"
    raise BadFile(
        f"{folder} has neither {SINGLE} nor {INDEX} (found: {held}). Save the model with save_pretrained (safetensors)."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def bytes_of(param: Tensor) -> torch.UntypedStorage:
    """The part of the storage that a parameter spans: one storage may hold many. Copying a storage runs no operator
    that a meter would count.
    """
    storage, size = param.untyped_storage(), param.element_size()
    last = sum((n - 1) * stride for n, stride in zip(param.shape, param.stride(), strict=True)) if param.numel() else -1
    part = storage[param.storage_offset() * size : (param.storage_offset() + last + 1) * size]
    assert isinstance(part, torch.UntypedStorage)
    return part
