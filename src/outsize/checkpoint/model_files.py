"""Which tensor of a model goes into which file under which key: the Hugging Face layout, decided without touching a
weight.

transformers' own rules (tied weights, keys that are not saved, names that differ on disk, shards) are run on tensors
without memory; what comes out untouched is one parameter under one key and can be streamed. What is stored in another
form than it is run in (experts one by one) is converted when it is written.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outsize import compat
from outsize.base.log import log
from outsize.checkpoint.tensorfile import Spec
from outsize.compat import storage_id

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Tensors = dict[str, Tensor]
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Keys that are not tensors of the model but are made of some, all at once."""

    inputs: tuple[str, ...]
    """Names in the model's state dict."""
    keys: tuple[str, ...]
    convert: Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    files: Mapping[str, Mapping[str, Spec]]
    """File name to its keys."""
    source: Mapping[str, str]
    """Key to the name in the model's state dict, where it is that tensor as it is."""
    conversions: tuple[Conversion, ...]
    """Of the other keys."""
    index: Mapping[str, object] | None


def is_weight_file(name: str) -> bool:
    """A file that an earlier save of another shape may have left."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def model_files(model: nn.Module, *, max_shard_size: int | str | None = None) -> ModelFiles:
    """`max_shard_size`: of a file, as in `save_pretrained`, whose own default holds where it is None."""
    from transformers import PreTrainedModel

    owner = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    stand_ins: Tensors = {}
    for name in model.state_dict():
        if name in owner:
            stand_ins[name] = torch.empty(owner[name].shape, dtype=owner[name].dtype, device="meta")
        else:
            log.warning("%s is neither a parameter nor a buffer: it is not saved", name)
    if not isinstance(model, PreTrainedModel):
        first: dict[int, str] = {}
        keys = {name: Spec.of(t) for name, t in stand_ins.items() if first.setdefault(id(owner[name]), name) == name}
        return ModelFiles({SINGLE: keys}, {name: name for name in keys}, (), None)

    from huggingface_hub import split_state_dict_into_shards_factory

    private = compat.transformers()

    for ignored in model._keys_to_ignore_on_save or ():
        stand_ins.pop(ignored, None)
    kept = private.remove_tied_weights(stand_ins, model)
    names = {id(stand_in): name for name, stand_in in kept.items()}
    stored = private.revert_weight_conversion(model, dict(kept))
    largest = max_shard_size or inspect.signature(model.save_pretrained).parameters["max_shard_size"].default
    split = split_state_dict_into_shards_factory(
        stored,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
        # As for tensors with memory: views of one tensor (its experts) lie in one file.
        get_storage_id=lambda tensor: storage_id(tensor.untyped_storage()),
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
    )
    files = {file: {key: Spec.of(stored[key]) for key in keys} for file, keys in split.filename_to_tensors.items()}
    source = {key: names[id(tensor)] for key, tensor in stored.items() if id(tensor) in names}
    as_it_is = set(source.values())
    conversions = _conversions(
        {name: tensor for name, tensor in kept.items() if name not in as_it_is},
        {key: Spec.of(tensor) for key, tensor in stored.items() if key not in source},
        lambda tensors: private.revert_weight_conversion(model, tensors),
    )
    index = (
        {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        if split.is_sharded
        else None
    )
    return ModelFiles(files, source, conversions, index)


def _conversions(
    inputs: Tensors, wanted: dict[str, Spec], convert: Callable[[Tensors], Tensors]
) -> tuple[Conversion, ...]:
    """One for each input where it gives its keys by itself (experts of one layer), so that no more than that is ever
    held twice; else one for all.
    """
    alone: dict[str, Tensors] = {}
    try:
        alone = {name: convert({name: stand_in}) for name, stand_in in inputs.items()}
    except Exception as why:  # whatever a conversion raises that misses others of its inputs
        log.debug("weights are converted all at once: %s", why)
    made = [(key, Spec.of(tensor)) for part in alone.values() for key, tensor in part.items()]
    if len(made) == len(wanted) and dict(made) == wanted:
        return tuple(Conversion((name,), tuple(part), convert) for name, part in alone.items())
    return (Conversion(tuple(inputs), tuple(wanted), convert),)


def write_configs(model: nn.Module, folder: Path, files: ModelFiles) -> None:
    """What lies beside the weights: index, config, generation config."""
    from transformers import PreTrainedModel

    if files.index is not None:
        (folder / INDEX).write_text(json.dumps(files.index, indent=2, sort_keys=True) + "\n")
    if isinstance(model, PreTrainedModel):
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
