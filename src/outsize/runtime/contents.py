"""Contents: which tensors a saved folder holds, under which key of which file, and which chunk each one comes from.

Weights lie in Hugging Face's own files, the optimizer's state by parameter name beside them. A checkpoint knows nothing
of chunks, plans or devices.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from outsize.checkpoint.model_files import ModelFiles, Recipe
from outsize.model.tensorfile import Spec
from outsize.runtime.plan_runtime import PlanRuntime

STATE = "state.safetensors"
ANY_CHUNK = -1
"""What belongs to no chunk: buffers, what is made of several weights."""


def state_key(part: str, name: str) -> str:
    """`part`: exp_avg, exp_avg_sq, lo (the lower half of a split master), or value (a weight that the model's files do
    not hold).
    """
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
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter or buffer to the file and key of its value."""

    def add(self, chunk: int, file: str, key: str, spec: Spec, read: Callable[[], Tensor]) -> None:
        self.specs.setdefault(file, {})[key] = spec
        self.items.setdefault(chunk, []).append(Item(file, key, read))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for keys in self.specs.values() for spec in keys.values())


def is_adapted(model: nn.Module) -> bool:
    """A PEFT model, or one of transformers with PEFT inside: saved as its adapter, in PEFT's own form."""
    return (hasattr(model, "peft_config") and hasattr(model, "get_base_model")) or getattr(
        model, "_hf_peft_config_loaded", False
    )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of a model's state, each by its first name. Of a PEFT model they belong to its base."""
    kept = () if is_adapted(model) else model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def weights_of(model: nn.Module, now: PlanRuntime, files: ModelFiles) -> Contents:
    contents = Contents()
    store, place = now.store, now.place.layout.place
    first = {id(tensor): name for name, tensor in (*store.params.items(), *model.named_buffers())}
    names = {
        name: first[id(t)]
        for pairs in (model.named_parameters, model.named_buffers)
        for name, t in pairs(remove_duplicate=False)
    }
    buffers = dict(model.named_buffers())
    where = {key: (file, key, spec) for file, keys in files.files.items() for key, spec in keys.items()}

    def read(name: str) -> Tensor:
        return store.read(names[name]) if names[name] in store.params else buffers[names[name]]

    def chunk_of(sources: Iterable[str]) -> int:
        chunks = {place[names[name]][0] if names[name] in store.params else ANY_CHUNK for name in sources}
        return chunks.pop() if len(chunks) == 1 else ANY_CHUNK

    for key, source in files.source.items():
        contents.add(chunk_of([source]), *where[key], partial(read, source))
        contents.values[names[source]] = where[key][:2]
    for recipe in files.recipes:
        made = _Made(recipe, read)
        for key in recipe.keys:
            contents.add(chunk_of(recipe.inputs), *where[key], partial(made.take, key))
    return contents


class _Made:
    """What a recipe gives, from when its first key is written to when its last is."""

    def __init__(self, recipe: Recipe, read: Callable[[str], Tensor]):
        self._recipe, self._read = recipe, read
        self._tensors: dict[str, Tensor] = {}

    def take(self, key: str) -> Tensor:
        if not self._tensors:
            self._tensors = self._recipe.convert({name: self._read(name) for name in self._recipe.inputs})
        return self._tensors.pop(key)


def add_state(contents: Contents, model: nn.Module, now: PlanRuntime, *, only_model: bool) -> None:
    """The optimizer's state, and values that the model's files do not hold as they are: converted ones, and what trains
    in a PEFT model.
    """
    store, place = now.store, now.place.layout.place
    for name in now.updates.steps if not only_model else ():
        for part, view in store.state_views(name).items():
            contents.add(place[name][0], STATE, state_key(part, name), Spec.of(view), view.detach)
    buffers = saved_buffers(model)
    for name in needed(model, now):
        if name not in contents.values:
            view = store.read(name) if name in store.params else buffers[name]
            contents.values[name] = (STATE, state_key("value", name))
            contents.add(
                place[name][0] if name in store.params else ANY_CHUNK,
                *contents.values[name],
                Spec.of(view),
                view.detach,
            )


def needed(model: nn.Module, now: PlanRuntime) -> set[str]:
    """Parameters and buffers that a checkpoint must hold. What is frozen in a PEFT model is its base's."""
    return set(now.updates.steps) if is_adapted(model) else now.store.params.keys() | saved_buffers(model).keys()


def chunks_on_host(now: PlanRuntime) -> set[int]:
    """Chunks whose weights and state are in host memory: a thread may write them while the device computes."""
    place = now.place
    return {
        c.index
        for c in place.layout.chunks
        if place.has_host_weights(c.index) and (not c.trainable or place.updates_on_host(c.index))
    }


def describe(
    now: PlanRuntime, groups: list[dict[str, Any]], contents: Contents, num_steps: int, *, only_model: bool
) -> dict[str, Any]:
    """The manifest's part about the model."""
    kept = [
        {
            **{k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")},
            "names": group["param_names"],
        }
        for group in groups
    ]
    return {
        "num_steps": num_steps,
        "steps": dict(now.updates.steps),
        "groups": kept,
        "values": contents.values,
        "only_model": only_model,
        "loss_chunk": now.plan.loss_chunk,
    }


def _plain(value: Any) -> Any:
    """Settings may be scalars of torch or numpy."""
    return value.item() if hasattr(value, "item") else value
