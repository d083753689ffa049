"""Weights in files, read straight to where they are to live.

A model whose weights are still in files is *hollow*: its parameters have their shape and dtype on the CPU and no memory behind them. (Meta tensors
would say the same, but torch does not let a meta parameter take real data later.) The tracer fills in the layers it runs; the engine
fills every chunk's home, one parameter at a time. Nothing else may read a hollow parameter.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.base.errors import BadFile, tell
from outsize.base.log import log
from outsize.model.tensorfile import TensorFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights(Protocol):
    """Where the values of hollow parameters come from."""

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a CPU tensor with the parameter of this name."""


def hollow(model: nn.Module) -> nn.Module:
    """Give every meta parameter of a model a hollow one in its place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(hollow_like(param, param.dtype), requires_grad=param.requires_grad)
                module._parameters[key] = made[id(param)]
    return model


def hollow_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    data = torch.empty(param.shape, dtype=dtype)  # untouched pages take nothing, and go before anyone touches them
    data.untyped_storage().resize_(0)
    return data


def is_hollow(param: Tensor) -> bool:
    return param.numel() > 0 and param.device.type == "cpu" and param.untyped_storage().nbytes() == 0


class FileWeights:
    """The safetensors files of a Hugging Face folder, matched to a model's parameters."""

    def __init__(self, folder: Path, model: nn.Module):
        self.folder = folder
        self._files = [TensorFile(path) for path in weight_files(folder)]
        where = {key: file for file in self._files for key in file.entries}
        self._places: dict[str, tuple[TensorFile, str]] = {}
        self.missing: list[str] = []
        """Parameters that no file has, under any of their names."""
        aliases: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(param), []).append(name)
        used: set[str] = set()
        for name, param in model.named_parameters():
            key = next((alias for alias in aliases[id(param)] if alias in where), None)
            used.update(aliases[id(param)])
            if key is None:
                self.missing.append(name)
                continue
            if (found := where[key].entries[key].spec.shape) != tuple(param.shape):
                raise BadFile(tell(f"{name} has the shape {tuple(param.shape)}", f"{where[key].path} has {found}", "Use the files of this model"))
            self._places[name] = (where[key], key)
        self.buffers = [name for name, _ in model.named_buffers() if name in where]
        self._where = where
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        self.unexpected = sorted(key for key in where.keys() - used - set(self.buffers) if not any(p.search(key) for p in ignored))
        """Tensors in the files that the model has no place for."""

    def require_whole(self) -> None:
        """Every parameter has its tensor. What is there beyond that is named, and left where it is."""
        if self.missing:
            names = _some(self.missing)
            raise BadFile(tell(f"{self.folder} has every weight of the model", f"it lacks {names}", "Use the folder that the model was saved to"))
        if self.unexpected:
            log.warning("%s has tensors that the model has no place for: %s", self.folder, _some(self.unexpected))

    def read_into(self, name: str, tensor: Tensor) -> None:
        file, key = self._places[name]
        file.read_into(key, tensor)

    def fill_buffers(self, model: nn.Module) -> None:
        buffers = dict(model.named_buffers())
        for name in self.buffers:
            self._where[name].read_into(name, buffers[name])


def weight_files(folder: Path, *, index: str = INDEX, single: str = SINGLE) -> Sequence[Path]:
    """The files of a folder, as its index names them; each must be there."""
    if (folder / index).exists():
        try:
            named = json.loads((folder / index).read_text())["weight_map"]
            names = sorted(set(named.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadFile(tell(f"{folder / index} names the weight files", f"it cannot be read ({error})", "Get the folder again")) from None
        lost = [name for name in names if Path(name).name != name or not (folder / name).exists()]
        if lost:
            raise BadFile(tell(f"{folder} has the files that {index} names", f"{_some(lost)} is not there", "Get the folder again"))
        return [folder / name for name in names]
    if (folder / single).exists():
        return [folder / single]
    held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise BadFile(tell(f"{folder} holds {single} or {index}", f"there is {held}", "Save the model with save_pretrained (safetensors)"))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
