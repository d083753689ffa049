"""Loading a checkpoint into a prepared model, whatever its plan: by parameter name, straight to where each tensor lives.

Everything is compared before the first byte is changed: a checkpoint of another model, or one that is not whole, changes nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile, tell
from outsize.checkpoint.folder import MANIFEST, read_manifest
from outsize.model.tensorfile import TensorFile
from outsize.runtime.attached import Attached
from outsize.runtime.contents import STATE, state_key


class Checkpoint:
    """A complete checkpoint, open for reading."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = read_manifest(folder)
        self._files: dict[str, TensorFile] = {}
        try:
            self.weights: dict[str, tuple[str, str]] = {name: (file, key) for name, (file, key) in facts["weights"].items()}
            self.steps: dict[str, int] = {name: int(step) for name, step in facts["steps"].items()}
            self.groups: list[dict[str, Any]] = facts["groups"]
            self.num_steps = int(facts["num_steps"])
            self.only_model = bool(facts["only_model"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = f"it lacks {error}"
            raise BadFile(tell(f"{folder / MANIFEST} describes weights and optimizer", found, "It is another kind of folder: name a checkpoint")) from None

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def require_fits(self, now: Attached, groups: Sequence[dict[str, Any]]) -> None:
        """That it is of this model: the same parameters, shapes and dtypes, the same groups."""
        params, trainable = now.store.params, now.updates.steps.keys()
        wrong = [f"it has no {name}" for name in sorted(trainable - self.steps.keys() | (trainable - self.weights.keys()))]
        wrong += [f"it has {name}, which the model has not" for name in sorted(self.weights.keys() - params.keys())]
        wrong += [f"{name} was trained there and is frozen here" for name in sorted((self.steps.keys() & params.keys()) - trainable)]
        for name in self.weights.keys() & params.keys():
            file, key = self.weights[name]
            spec = self.file(file).entries[key].spec
            if spec.shape != tuple(params[name].shape) or spec.dtype != params[name].dtype:
                wrong.append(f"{name} is {spec.dtype} {spec.shape} there and {params[name].dtype} {tuple(params[name].shape)} here")
        theirs, mine = [sorted(g["names"]) for g in self.groups], [sorted(g["param_names"]) for g in groups]
        if not wrong and theirs != mine:
            wrong.append(f"its optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, this one {[len(g) for g in mine]}, or others")
        if wrong:
            found = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            raise BadFile(tell(f"{self.folder} is a checkpoint of this model", found, "Name a checkpoint of this model, built and grouped as it was"))

    def require_optimizer(self) -> None:
        if self.only_model:
            do = "Go on from a checkpoint with it, or load this one with only_model=True"
            raise BadFile(tell(f"{self.folder} has the optimizer's state", "it was saved without", do))

    def fill_weights(self, now: Attached) -> None:
        """Where weights change and the optimizer's state does not, the lower halves of split masters are cleared: the new weight is the master."""
        store = now.store
        with torch.no_grad(), now.device.on_host():
            for name, (file, key) in self.weights.items():
                store.fill(store.places(name), self._reader(file, key))
                store.invalidate(now.place.layout.place[name][0])
                if name in now.updates.steps and (lo := store.state_views(name).get("lo")) is not None:
                    lo.zero_()

    def fill_state(self, now: Attached, groups: Sequence[dict[str, Any]]) -> None:
        store = now.store
        with torch.no_grad(), now.device.on_host():
            for name in now.updates.steps:
                for part, view in store.state_views(name).items():
                    store.fill([view], self._reader(STATE, state_key(part, name)))
                now.updates.steps[name] = self.steps[name]
        for group, saved in zip(groups, self.groups, strict=True):
            group.update({key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "names"})

    def _reader(self, file: str, key: str) -> Callable[[Tensor], None]:
        return lambda tensor: self.file(file).read_into(key, tensor)
