"""Which tensor of a model goes into which file under which key: the Hugging Face layout, decided without touching a weight.

transformers' own rules (tied weights, keys that are not saved, names that differ on disk, shards) are run on tensors without memory; what
comes out untouched is one parameter under one key and can be streamed. What is stored in another form than it is run in (experts
one by one) is converted when it is written.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.model.tensorfile import Spec
from outsize.model.weights import INDEX, SINGLE

Read = Callable[[str], Tensor]
"""A tensor of the model's state dict by name: a view of where it lives."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    files: Mapping[str, Mapping[str, Spec]]
    """File name to its keys."""
    source: Mapping[str, str]
    """Key to the name in the model's state dict, where it is that tensor as it is."""
    inputs: tuple[str, ...]
    """Names whose tensors are converted into the other keys."""
    index: Mapping[str, Any] | None
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]

    def converted(self, read: Read) -> dict[str, Tensor]:
        """The keys without a source."""
        return self.convert({name: read(name) for name in self.inputs}) if self.inputs else {}

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for keys in self.files.values() for spec in keys.values())


def model_files(model: nn.Module) -> ModelFiles:
    from transformers import PreTrainedModel

    stand_ins: dict[str, Tensor] = {}
    of_param: dict[int, str] = {}
    owner = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name in model.state_dict():
        tensor = owner[name]
        stand_ins[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    if not isinstance(model, PreTrainedModel):
        for name in list(stand_ins):
            if of_param.setdefault(id(owner[name]), name) != name:
                del stand_ins[name]
        keys = {name: Spec(t.dtype, tuple(t.shape)) for name, t in stand_ins.items()}
        return ModelFiles({SINGLE: keys}, {name: name for name in keys}, (), None, lambda tensors: {})

    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    for ignored in model._keys_to_ignore_on_save or ():
        stand_ins.pop(ignored, None)
    kept = remove_tied_weights_from_state_dict(stand_ins, model)
    stored = revert_weight_conversion(model, dict(kept))
    largest = inspect.signature(model.save_pretrained).parameters["max_shard_size"].default
    split = split_torch_state_dict_into_shards(stored, filename_pattern="model{suffix}.safetensors", max_shard_size=largest)
    files = {file: {key: Spec(stored[key].dtype, tuple(stored[key].shape)) for key in keys} for file, keys in split.filename_to_tensors.items()}
    source = {key: names[id(tensor)] for key, tensor in stored.items() if id(tensor) in names}
    inputs = tuple(name for name in kept if name not in set(source.values()))
    index = {"metadata": {"total_parameters": model.num_parameters(), **split.metadata}, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return ModelFiles(files, source, inputs, index, lambda tensors: revert_weight_conversion(model, tensors))


def write_configs(model: nn.Module, folder: Path, files: ModelFiles) -> None:
    """What lies beside the weights: index, config, generation config."""
    if files.index is not None:
        (folder / INDEX).write_text(json.dumps(files.index, indent=2, sort_keys=True) + "\n")
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if getattr(model, "can_generate", bool)():
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]
