"""The library of a pruning run on disk.

    spec.json
    library/012/ffn-8704/       a finished variant: description.json, best.safetensors, latest.safetensors (`keep`)
    training/012/ffn-8704/      one that is trained: step-000150 with all that a step changes

Both are complete or absent (checkpoint/folder.py) and never changed. Each variant has a step of its own: after a kill,
each continues from its newest state, whatever the layer, round or group was.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outsize.base.errors import BadFile, OutsizeError
from outsize.base.records import dumps, from_json
from outsize.checkpoint.folder import StagedDir, read_manifest, recover_partial_saves
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec

DESCRIPTION = "description.json"
BEST, LATEST, STATE = "best.safetensors", "latest.safetensors", "state.safetensors"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What is known of a variant, beside its tensors."""

    layer: int
    layer_name: str
    variant: str
    learn: str
    """The sub-block, or `block`."""
    changes: tuple[dict[str, str | int | None], ...]
    """The fields of each `Change`."""
    spec: str
    """The fingerprint of the run's spec."""
    steps: int = 0
    tokens: int = 0
    numel: int = 0
    """Elements of its tensors."""
    losses: tuple[tuple[int, float], ...] = ()
    """(steps, training loss)."""
    validation: tuple[tuple[int, float], ...] = ()
    """(steps, validation loss)."""
    best_step: int | None = None
    skipped: int = 0
    stopped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A state or an entry on disk."""

    folder: Path
    description: Description

    def tensors(self, name: str) -> dict[str, Tensor]:
        path = self.folder / name
        try:
            with TensorFile(path) as file:
                return {key: file.read(key) for key in file.entries}
        except BadFile as error:
            raise _damaged(self.folder, str(error)) from None

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


class Library:
    def __init__(self, folder: Path):
        self.folder = folder

    def entry(self, layer: int, variant: str) -> Stored | None:
        """A finished variant."""
        parent = self.folder / "library" / _number(layer)
        if parent.exists():
            recover_partial_saves(parent)
        return _stored(parent / variant)

    def state(self, layer: int, variant: str) -> Stored | None:
        """The state with the most steps of a variant that is trained."""
        parent = self._training(layer, variant)
        if not parent.exists():
            return None
        recover_partial_saves(parent)
        found = [(int(match[1]), path) for path in parent.iterdir() if (match := _STEP.fullmatch(path.name))]
        for _, path in sorted(found, reverse=True):
            if (stored := _stored(path)) is not None:
                return stored
        return None

    def save_state(
        self, description: Description, state: Mapping[str, Tensor], best: Mapping[str, Tensor] | None = None
    ) -> None:
        """Replaces earlier states of the variant."""
        parent = self._training(description.layer, description.variant)
        place = parent / f"step-{description.steps:06d}"
        if _stored(place) is not None:  # saved before a kill, with the same content
            return
        _publish(place, description, {STATE: state, **({BEST: best} if best else {})}, replace=True)
        for path in parent.iterdir():
            if path != place and not path.name.startswith("."):
                _remove(path)

    def finish(self, description: Description, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Publish a finished variant and remove its states."""
        place = self.folder / "library" / _number(description.layer) / description.variant
        _publish(place, description, files, replace=True)
        self.drop_states(description.layer, description.variant)

    def drop_states(self, layer: int, variant: str) -> None:
        """Remove the states of a finished variant."""
        _remove(self._training(layer, variant))

    def _training(self, layer: int, variant: str) -> Path:
        return self.folder / "training" / _number(layer) / variant


def _number(layer: int) -> str:
    return f"{layer:03d}"


def _publish(
    place: Path, description: Description, files: Mapping[str, Mapping[str, Tensor]], *, replace: bool
) -> None:
    staged = StagedDir.of(place, replace=replace)
    try:
        staged.require_space(sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()))
        for name, tensors in files.items():
            specs = {key: TensorSpec.of(tensor) for key, tensor in tensors.items()}
            with TensorFile.create(staged.path / name, specs, {"format": "pt"}) as file:
                for key, tensor in tensors.items():
                    file.write(key, tensor)
        (staged.path / DESCRIPTION).write_text(dumps(description), encoding="utf-8")
        staged.publish({"kind": "variant"})
    except BaseException:
        staged.discard()
        raise


def _remove(folder: Path) -> None:
    """Rename first: an interrupted removal leaves nothing that looks like a state."""
    removed = folder.with_name(f".removed-{folder.name}")
    shutil.rmtree(removed, ignore_errors=True)
    if folder.exists():
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def _stored(folder: Path) -> Stored | None:
    """Raises BadFile if the folder is there and damaged."""
    if not folder.exists():
        return None
    try:
        read_manifest(folder)
        data = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return Stored(folder=folder, description=from_json(Description, data, where=str(folder / DESCRIPTION)))
    except (OSError, ValueError, OutsizeError) as error:
        raise _damaged(folder, str(error)) from None


def _damaged(folder: Path, why: str) -> BadFile:
    return BadFile(f"{folder} is damaged: {why.rstrip('.')}. Remove this folder; the same command makes it again.")
