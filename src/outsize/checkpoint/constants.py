"""The constants of weights that are trained in coordinates: one file beside the checkpoints of a run.

They can be computed again from the initial weights, but other machines compute other bits. So the first save writes
them, a checkpoint names them by hash, and a resumed run takes them from the file if its own differ.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from outsize.base.errors import BadFile
from outsize.checkpoint.folder import StagedDir, sync
from outsize.checkpoint.ranges import Ranges
from outsize.checkpoint.tensorfile import TensorFile


class ConstantHashes(NamedTuple):
    """Of one weight."""

    initial: str
    """Of its initial value."""
    constants: str


class ConstantStore(Protocol):
    """The constants of a prepared model, by parameter name."""

    @property
    def names(self) -> Sequence[str]: ...

    def hashes(self) -> Mapping[str, ConstantHashes]: ...

    def master(self, name: str) -> Tensor:
        """The weight in fp32, before it is rounded to the model's dtype."""

    def constant_ranges(self, name: str) -> Mapping[str, Ranges]: ...

    def forget_hashes(self) -> None:
        """The constants were replaced."""


def describe_constants(store: ConstantStore) -> dict[str, Any]:
    """The entry of a checkpoint's manifest."""
    return {name: list(found) for name, found in store.hashes().items()}


def write_constants(folder: Path, store: ConstantStore) -> None:
    """Write the constants to a file in this folder, unless it is there."""
    target = folder / _file_name(store.hashes())
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    ranges = {f"{part}/{name}": one for name in store.hashes() for part, one in store.constant_ranges(name).items()}
    staged = StagedDir(target)  # the next save removes it if this process is killed
    try:
        temporary = staged.path / target.name
        with TensorFile.create(temporary, {key: one.spec for key, one in ranges.items()}, {}) as file:
            for key, one in ranges.items():
                one.write(file, key)
        sync(temporary)
        os.replace(temporary, target)
    finally:
        staged.discard()


def require_same_start(checkpoint: Path, saved: Mapping[str, Any], store: ConstantStore) -> None:
    """Refuse a checkpoint whose training began with other weights, or whose constants are missing."""
    for name, found in store.hashes().items():
        if name not in saved or saved[name][0] != found.initial:
            raise BadFile(
                f"{checkpoint}: {name} had another initial value there, or was not trained in coordinates. Prepare the "
                "model with the weights and the method that the run began with."
            )
    path = _other_constants(checkpoint, saved, store)
    if path is None:
        return
    if not path.exists():
        raise BadFile(
            f"{path} is missing. It holds the bases of {checkpoint.name}, and those that this machine computes differ. "
            "Copy it with the checkpoints."
        )
    with TensorFile(path):  # refuses a file that is cut short, before anything is loaded
        pass


def load_constants(checkpoint: Path, saved: Mapping[str, Any], store: ConstantStore) -> None:
    """Take the constants of a checkpoint where this machine's differ."""
    path = _other_constants(checkpoint, saved, store)
    if path is None:
        return
    with TensorFile(path) as file, torch.no_grad():
        for name in store.names:
            for part, one in store.constant_ranges(name).items():
                one.read(file, f"{part}/{name}")
    store.forget_hashes()
    if _other_constants(checkpoint, saved, store) is not None:
        raise BadFile(f"{path} is damaged: its content has another hash than its name. Get it again.")


def _other_constants(checkpoint: Path, saved: Mapping[str, Any], store: ConstantStore) -> Path | None:
    """The file with the constants of a checkpoint. None if the store has the same ones."""
    theirs = {name: ConstantHashes(*saved[name]) for name in store.hashes()}
    return None if theirs == dict(store.hashes()) else checkpoint.parent / _file_name(theirs)


def _file_name(hashes: Mapping[str, ConstantHashes]) -> str:
    text = "\n".join(f"{name} {found.constants}" for name, found in sorted(hashes.items()))
    return f"bases-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
