"""Contents: which tensors a saved folder holds, under which key of which file, and which chunk each one comes from.

Weights lie in Hugging Face's own files, the optimizer's state by parameter name beside them. A checkpoint knows nothing of chunks, plans or devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from outsize.checkpoint.model_files import ModelFiles
from outsize.model.tensorfile import Spec
from outsize.runtime.attached import Attached

STATE = "state.safetensors"
ANY_CHUNK = -1
"""What belongs to no chunk: buffers, converted weights."""


def state_key(part: str, name: str) -> str:
    """`part`: exp_avg, exp_avg_sq, lo (the lower half of a split master), or value (a weight that the model's files do not hold)."""
    return f"{part}/{name}"


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor to be written."""

    file: str
    key: str
    read: Callable[[], Tensor]


@dataclass(slots=True)
class Contents:
    """All that a folder will hold of the model, by file and by chunk."""

    specs: dict[str, dict[str, Spec]] = field(default_factory=dict)
    items: dict[int, list[Item]] = field(default_factory=dict)
    weights: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter to the file and key of its value."""

    def add(self, chunk: int, file: str, key: str, spec: Spec, read: Callable[[], Tensor]) -> None:
        self.specs.setdefault(file, {})[key] = spec
        self.items.setdefault(chunk, []).append(Item(file, key, read))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for keys in self.specs.values() for spec in keys.values())


def is_adapted(model: nn.Module) -> bool:
    """A PEFT model: saved as its adapter, in PEFT's own form."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def weights_of(model: nn.Module, now: Attached, files: ModelFiles) -> Contents:
    contents = Contents()
    store, place = now.store, now.place.layout.place
    canonical = {id(param): name for name, param in store.params.items()}
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    file_of = {key: (file, spec) for file, keys in files.files.items() for key, spec in keys.items()}

    def read(name: str) -> Tensor:
        return store.read(canonical[id(params[name])]) if name in params else buffers[name]

    for key, source in files.source.items():
        file, spec = file_of[key]
        if source in params:
            name = canonical[id(params[source])]
            contents.add(place[name][0], file, key, spec, lambda name=name: store.read(name))  # type: ignore[misc]
            contents.weights[name] = (file, key)
        else:
            contents.add(ANY_CHUNK, file, key, spec, lambda source=source: buffers[source])  # type: ignore[misc]
    made: dict[str, Tensor] = {}

    def converted(key: str) -> Tensor:
        if not made:
            made.update(files.converted(read))
        return made.pop(key)

    for key in file_of.keys() - files.source.keys():
        file, spec = file_of[key]
        contents.add(ANY_CHUNK, file, key, spec, lambda key=key: converted(key))  # type: ignore[misc]
    return contents


def add_state(contents: Contents, now: Attached, trainable: list[str], *, only_model: bool) -> None:
    """The optimizer's state, and the weights that are trained but not in the model's files (a PEFT adapter under its own names)."""
    store, place = now.store, now.place.layout.place
    for name in trainable:
        chunk = place[name][0]
        for part, view in () if only_model else store.state_views(name).items():
            contents.add(chunk, STATE, state_key(part, name), Spec(view.dtype, tuple(view.shape)), lambda view=view: view)  # type: ignore[misc]
        if name not in contents.weights:
            value = store.read(name)
            key = state_key("value", name)
            contents.add(chunk, STATE, key, Spec(value.dtype, tuple(value.shape)), lambda name=name: store.read(name))  # type: ignore[misc]
            contents.weights[name] = (STATE, key)


def chunks_on_host(now: Attached) -> set[int]:
    """Chunks whose weights and state are in host memory: a thread may write them while the device computes."""
    place = now.place
    return {c.index for c in place.layout.chunks if place.has_host_weights(c.index) and (not c.trainable or place.updates_on_host(c.index))}


def describe(now: Attached, groups: list[dict[str, Any]], contents: Contents, num_steps: int, *, only_model: bool) -> dict[str, Any]:
    """The manifest's part about the model."""
    kept = [{**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "names": group["param_names"]} for group in groups]
    return {"num_steps": num_steps, "steps": dict(now.updates.steps), "groups": kept, "weights": contents.weights, "only_model": only_model}

