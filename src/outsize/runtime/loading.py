"""Loading a checkpoint into a prepared model, whatever its plan: by parameter name, straight to where each tensor
lives.

Everything is compared before the first byte is changed: a checkpoint of another model, or one that is not whole,
changes nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile, tell
from outsize.checkpoint.folder import MANIFEST, read_manifest
from outsize.model.tensorfile import Spec, TensorFile
from outsize.runtime.contents import STATE, state_key
from outsize.runtime.plan_runtime import PlanRuntime


class Checkpoint:
    """A complete checkpoint, open for reading."""

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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = f"it lacks {error}"
            raise BadFile(
                tell(
                    f"{folder / MANIFEST} describes weights and optimizer",
                    found,
                    "It is another kind of folder: name a checkpoint",
                )
            ) from None

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            if name not in self._names:
                raise BadFile(
                    tell(
                        f"{self.folder / MANIFEST} lists every file that it speaks of",
                        f"{name} is not listed",
                        "Name another checkpoint",
                    )
                )
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def require_values(self, needed: Collection[str], tensors: Mapping[str, Tensor]) -> None:
        """That it has the values of this model: the same names, shapes and dtypes. `tensors`: parameters and buffers,
        as there is place for them.
        """
        wrong = [f"it has no {name}" for name in sorted(set(needed) - self.values.keys())]
        wrong += [f"it has {name}, which the model has not" for name in sorted(self.values.keys() - tensors.keys())]
        for name in sorted(self.values.keys() & tensors.keys()):
            wrong += self._differences(name, *self.values[name], tensors[name])
        self._require(wrong)

    def require_state(self, now: PlanRuntime, groups: Sequence[dict[str, Any]]) -> None:
        """That it has the optimizer's state: of the same parameters, in the same groups."""
        if self.only_model:
            do = "Go on from a checkpoint with it, or load this one with only_model=True"
            raise BadFile(tell(f"{self.folder} has the optimizer's state", "it was saved without", do))
        trainable = now.updates.steps.keys()
        wrong = [f"{name} was frozen there and is trained here" for name in sorted(trainable - self.steps.keys())]
        wrong += [f"{name} was trained there and is frozen here" for name in sorted(self.steps.keys() - trainable)]
        for name in sorted(trainable & self.steps.keys()):
            for part, view in now.store.state_views(name).items():
                wrong += self._differences(f"{part} of {name}", STATE, state_key(part, name), view)
        theirs, mine = [sorted(g["names"]) for g in self.groups], [sorted(g["param_names"]) for g in groups]
        if not wrong and theirs != mine:
            wrong.append(
                f"its optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, this one "
                f"{[len(g) for g in mine]}, or others"
            )
        self._require(wrong)

    def _differences(self, what: str, file: str, key: str, tensor: Tensor) -> list[str]:
        entry, here = self._file(file).entries.get(key), Spec.of(tensor)
        if entry is None:
            return [f"{file} has no {key}"]
        return (
            []
            if entry.spec == here
            else [f"{what} is {entry.spec.dtype} {entry.spec.shape} there and {here.dtype} {here.shape} here"]
        )

    def _require(self, wrong: list[str]) -> None:
        if wrong:
            found = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            raise BadFile(
                tell(
                    f"{self.folder} is a checkpoint of this model",
                    found,
                    "Name a checkpoint of this model, built and grouped as it was",
                )
            )

    def fill_values(self, now: PlanRuntime, buffers: Mapping[str, Tensor]) -> None:
        """Where weights change and the optimizer's state does not, the lower halves of split masters are cleared: the
        new weight is the master.
        """
        store = now.store
        with torch.no_grad(), now.device.on_host():
            for name, (file, key) in self.values.items():
                if name in buffers:
                    store.fill([buffers[name]], self._reader(file, key))
                    continue
                store.fill(store.copies(name), self._reader(file, key))
                store.invalidate(now.place.layout.place[name][0])
                if name in now.updates.steps and (lo := store.state_views(name).get("lo")) is not None:
                    lo.zero_()

    def fill_state(self, now: PlanRuntime, groups: Sequence[dict[str, Any]]) -> None:
        store = now.store
        with torch.no_grad(), now.device.on_host():
            for name in now.updates.steps:
                for part, view in store.state_views(name).items():
                    store.fill([view], self._reader(STATE, state_key(part, name)))
                now.updates.steps[name] = self.steps[name]
        for group, saved in zip(groups, self.groups, strict=True):
            group.update(
                {key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "names"}
            )

    def _reader(self, file: str, key: str) -> Callable[[Tensor], None]:
        return lambda tensor: self._file(file).read_into(key, tensor)
