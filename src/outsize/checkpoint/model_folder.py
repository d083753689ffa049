"""Writes a model's folder from tensors that are made or read one at a time; the model itself needs no weights."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from outsize.checkpoint.folder import StagedDir, os_errors_as_save_failed
from outsize.checkpoint.model_files import model_files, write_configs
from outsize.checkpoint.tensorfile import TensorFile


def write_model_folder(
    place: Path,
    model: nn.Module,
    value: Callable[[str], Tensor],
    extra: Callable[[Path], None] = lambda folder: None,
    *,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a folder for `from_pretrained`, complete or not at all. A folder that exists is refused.

    Args:
        model: says what is saved under which names; its weights are not read.
        value: gives the tensor of a name in the model's state dict, in the dtype that is stored. Called once for each.
        extra: writes further files (the tokenizer) into a folder.
    """
    files = model_files(model, max_shard_size=max_shard_size)
    converted = {key: conversion for conversion in files.conversions for key in conversion.keys}
    made: dict[str, Tensor] = {}

    def tensor(key: str) -> Tensor:
        if key in files.source:
            return value(files.source[key])
        if key not in made:
            conversion = converted[key]
            made.update(conversion.convert({name: value(name) for name in conversion.inputs}))
        return made.pop(key)

    staged = StagedDir.of(place)
    try:
        with os_errors_as_save_failed(place):
            staged.require_space(sum(spec.nbytes for specs in files.files.values() for spec in specs.values()))
            for name, specs in files.files.items():
                with TensorFile.create(staged.path / name, specs, {"format": "pt"}) as file:
                    for key in specs:
                        file.write(key, tensor(key))
            write_configs(model, staged.path, files)
            extra(staged.path)
            staged.publish({"kind": "model"})
    except BaseException:
        staged.discard()
        raise
