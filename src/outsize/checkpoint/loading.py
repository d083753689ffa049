"""CheckpointReader: reads a complete checkpoint by parameter name into the model's memory, under any plan.

Names, shapes and dtypes are compared first, so a checkpoint of another model changes nothing.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from outsize.base.errors import BadFile
from outsize.checkpoint.constants import load_constants, require_same_start
from outsize.checkpoint.contents import COORDINATES, STATE, state_key
from outsize.checkpoint.folder import MANIFEST, read_manifest
from outsize.checkpoint.parameter_store import TrainedModel
from outsize.checkpoint.ranges import Ranges
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec

_SHOWN = 4
"""The most differences that an error lists."""


class CheckpointReader:
    def __init__(self, folder: Path):
        self.folder = folder
        facts = read_manifest(folder)
        self._files: dict[str, TensorFile] = {}
        self._names: Collection[str] = facts["files"].keys()
        try:
            self.values: dict[str, tuple[str, str]] = {
                name: (file, key) for name, (file, key) in facts["values"].items()
            }
            self.steps: dict[str, int] = {name: int(step) for name, step in facts["steps"].items()}
            self.groups: list[dict[str, Any]] = [{**group, "names": list(group["names"])} for group in facts["groups"]]
            self.num_steps = int(facts["num_steps"])
            self.only_model = bool(facts["only_model"])
            self.loss_chunk = int(facts.get("loss_chunk", 0))
            self.constants: dict[str, Any] = dict(facts.get("constants", {}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(
                f"{folder / MANIFEST}: the entry {error} is missing or wrong, so this is not a checkpoint of weights "
                "and optimizer. Name another folder."
            ) from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if name not in self._names:
                raise BadFile(
                    f"{self.folder / MANIFEST}: it uses {name}, which is not in its list of files. "
                    "Name another checkpoint."
                )
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def require_values(self, trained: TrainedModel) -> None:
        """Refuse values of another model: other names, shapes or dtypes."""
        tensors = {**trained.store.params, **trained.buffers}
        wrong = [f"it has no {name}" for name in sorted(trained.saved_names - self.values.keys())]
        wrong += [f"it has {name}, which is not in the model" for name in sorted(self.values.keys() - tensors.keys())]
        for name in sorted(self.values.keys() & tensors.keys()):
            wrong += self._differences(name, *self.values[name], TensorSpec.of(tensors[name]))
        self._refuse(wrong)
        if trained.constants is not None:
            require_same_start(self.folder, self.constants, trained.constants)
            for name in trained.constants.names:
                spec = trained.store.state_ranges(name)[COORDINATES].spec
                wrong += self._differences(f"{COORDINATES} of {name}", STATE, state_key(COORDINATES, name), spec)
            self._refuse(wrong)

    def require_state(self, trained: TrainedModel) -> None:
        """Refuse optimizer state of other parameters or other groups."""
        if self.only_model:
            raise BadFile(
                f"{self.folder}: it was saved without optimizer state. Continue from a checkpoint with it, or load "
                "this one with only_model=True."
            )
        here, there = trained.steps.keys(), self.steps.keys()
        wrong = [f"{name} was frozen there and is trained here" for name in sorted(here - there)]
        wrong += [f"{name} was trained there and is frozen here" for name in sorted(there - here)]
        for name in sorted(here & there):
            for part, ranges in trained.store.state_ranges(name).items():
                wrong += self._differences(f"{part} of {name}", STATE, state_key(part, name), ranges.spec)
        theirs, mine = [sorted(g["names"]) for g in self.groups], [sorted(g["param_names"]) for g in trained.groups]
        if not wrong and theirs != mine:
            wrong.append(
                f"its optimizer has groups of {[len(g) for g in theirs]} parameters and this one of "
                f"{[len(g) for g in mine]}, or the groups have other members"
            )
        self._refuse(wrong)

    def _differences(self, what: str, file: str, key: str, here: TensorSpec) -> list[str]:
        entry = self._file(file).entries.get(key)
        if entry is None:
            return [f"{file} has no {key}"]
        if entry.spec != here:
            return [f"{what} is {entry.spec.dtype} {entry.spec.shape} there and {here.dtype} {here.shape} here"]
        return []

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            found = "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
            raise BadFile(
                f"{self.folder} is not a checkpoint of this model: {found}. Name a checkpoint of this model, built and "
                "grouped as it was."
            )

    def fill_values(self, trained: TrainedModel) -> None:
        store, buffers = trained.store, trained.buffers
        with torch.no_grad(), store.device.on_host():
            for name, (file, key) in self.values.items():
                if name in buffers:
                    buffers[name].copy_(self._file(file).read(key))
            store.load([name for name in self.values if name not in buffers], self._read_value)
            if trained.constants is not None:
                load_constants(self.folder, self.constants, trained.constants)
                for name in trained.constants.hashes():
                    store.state_ranges(name)[COORDINATES].read(self._file(STATE), state_key(COORDINATES, name))

    def fill_state(self, trained: TrainedModel) -> None:
        store = trained.store
        with torch.no_grad(), store.device.on_host():
            for name in trained.steps:
                for part, ranges in store.state_ranges(name).items():
                    ranges.read(self._file(STATE), state_key(part, name))
                trained.steps[name] = self.steps[name]
        for group, saved in zip(trained.groups, self.groups, strict=True):
            group.update(
                {key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "names"}
            )

    def _read_value(self, name: str, ranges: Ranges) -> None:
        file, key = self.values[name]
        ranges.read(self._file(file), key)
