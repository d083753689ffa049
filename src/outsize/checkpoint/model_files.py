"""The Hugging Face layout of a model's files: which tensor is saved in which file under which key. Reads no weights.

The rules of transformers (tied weights, keys that are not saved, names that differ on disk, shards) run on meta
tensors. A tensor that they leave unchanged is one parameter under one key and is written directly. Weights that are
stored in another form (experts one by one) are converted when they are written.
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
from outsize.checkpoint.tensorfile import TensorSpec
from outsize.compat import storage_id
from outsize.model.parts import named_parts, quant_state_of, wrappers

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Tensors = dict[str, Tensor]
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Conversion:
    """Keys that are computed from tensors of the model, in one call."""

    inputs: tuple[str, ...]
    """Names in the model's state dict."""
    keys: tuple[str, ...]
    convert: Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    files: Mapping[str, Mapping[str, TensorSpec]]
    """File name to its keys."""
    source: Mapping[str, str]
    """Key to the name in the model's state dict, for tensors that are stored unconverted."""
    conversions: tuple[Conversion, ...]
    """They compute the other keys."""
    descriptions: Mapping[str, Tensor]
    """Tensors of the state dict that are no parameters or buffers, by name: the lookup tables and settings with which
    bitsandbytes describes 4-bit weights."""
    index: Mapping[str, object] | None


def is_weight_file(name: str) -> bool:
    """Whether this is a file of weights, or the index of one with shards, that an earlier save may have left."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def model_files(model: nn.Module, *, max_shard_size: int | str | None = None, fp32: bool = False) -> ModelFiles:
    """`max_shard_size`: as in `save_pretrained`; None: its default. `fp32`: bf16 tensors are stored as fp32."""
    from transformers import PreTrainedModel

    owner = {**dict(named_parts(model, remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    packed = tuple(f"{name}." for name, param in model.named_parameters() if quant_state_of(param) is not None)
    of_several_tensors = {name for name, _, _ in wrappers(model)}
    descriptions: Tensors = {}
    metas: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name in owner:
            dtype = torch.float32 if fp32 and owner[name].dtype == torch.bfloat16 else owner[name].dtype
            metas[name] = torch.empty(owner[name].shape, dtype=dtype, device="meta")
        elif name.startswith(packed):
            descriptions[name] = tensor
            metas[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        elif name not in of_several_tensors:  # a checkpoint has their parts
            log.warning("%s is not saved: it is in the state dict, but is neither a parameter nor a buffer", name)
    if not isinstance(model, PreTrainedModel):
        first: dict[int, str] = {}
        stored = owner | descriptions
        keys = {name: TensorSpec.of(t) for name, t in metas.items() if first.setdefault(id(stored[name]), name) == name}
        return ModelFiles({SINGLE: keys}, {name: name for name in keys}, (), descriptions, None)

    from huggingface_hub import split_state_dict_into_shards_factory

    private = compat.transformers()

    for ignored in model._keys_to_ignore_on_save or ():
        metas.pop(ignored, None)
    # Tied weights are parameters: transformers looks each name up as one.
    attached = {name: metas.pop(name) for name in [*metas] if name.startswith(packed)}
    kept = private.remove_tied_weights(metas, model) | attached
    names = {id(meta): name for name, meta in kept.items()}
    stored = private.revert_weight_conversion(model, dict(kept))
    largest = max_shard_size or inspect.signature(PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    split = split_state_dict_into_shards_factory(
        stored,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
        # As for tensors with memory: views of one tensor (its experts) are put into one file.
        get_storage_id=lambda tensor: storage_id(tensor.untyped_storage()),
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
    )
    files = {
        file: {key: TensorSpec.of(stored[key]) for key in keys} for file, keys in split.filename_to_tensors.items()
    }
    source = {key: names[id(tensor)] for key, tensor in stored.items() if id(tensor) in names}
    unconverted = set(source.values())
    conversions = _conversions(
        {name: tensor for name, tensor in kept.items() if name not in unconverted},
        {key: TensorSpec.of(tensor) for key, tensor in stored.items() if key not in source},
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
    return ModelFiles(files, source, conversions, descriptions, index)


def _conversions(
    inputs: Tensors, wanted: dict[str, TensorSpec], convert: Callable[[Tensors], Tensors]
) -> tuple[Conversion, ...]:
    """One conversion per input if each input alone gives its keys (the experts of a layer), so that only one input at a
    time exists in both forms. Otherwise one for all inputs.
    """
    alone: dict[str, Tensors] = {}
    try:
        alone = {name: convert({name: meta}) for name, meta in inputs.items()}
    except Exception as why:  # a conversion that needs several inputs may raise anything
        log.debug("weights are converted all at once: %s", why)
    made = [(key, TensorSpec.of(tensor)) for part in alone.values() for key, tensor in part.items()]
    if len(made) == len(wanted) and dict(made) == wanted:
        return tuple(Conversion((name,), tuple(part), convert) for name, part in alone.items())
    return (Conversion(tuple(inputs), tuple(wanted), convert),)


def write_configs(model: nn.Module, folder: Path, files: ModelFiles, *, dtype: torch.dtype | None = None) -> None:
    """Write the index, config and generation config. `dtype`: of the files; None: the model's."""
    from transformers import PreTrainedModel

    if files.index is not None:
        (folder / INDEX).write_text(json.dumps(files.index, indent=2, sort_keys=True) + "\n")
    if isinstance(model, PreTrainedModel):
        model.config.dtype = str(dtype or model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        for name, text in getattr(model, "code_files", dict)().items():
            (folder / name).write_text(text)
