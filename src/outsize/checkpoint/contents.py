"""Contents: the tensors of a saved folder, with the file, key and chunk of each.

Weights are in the files of Hugging Face's layout. The optimizer state is in a file beside them, by parameter name.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.checkpoint.constants import describe_constants
from outsize.checkpoint.model_files import Conversion, ModelFiles
from outsize.checkpoint.parameter_store import TrainedModel
from outsize.checkpoint.ranges import Ranges
from outsize.checkpoint.tensorfile import TensorSpec
from outsize.model.parts import named_parts

STATE = "state.safetensors"
COORDINATES = "coordinates"
"""The state tensor of coordinates (layout/coordinates.py). It belongs to the weights: a checkpoint without optimizer
state has it too."""
NO_CHUNK = -1
"""The chunk of buffers, and of tensors that are converted from weights of several chunks."""


def state_key(part: str, name: str) -> str:
    """`part`: a state tensor such as exp_avg, `lo` (the lower 16 bits of a master weight), or `value` (a weight that
    the model's files hold only in converted form).
    """
    return f"{part}/{name}"


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor to write."""

    file: str
    key: str
    ranges: Callable[[], Ranges]


@dataclass(slots=True)
class Contents:
    """All tensors of a folder, by file and by chunk."""

    specs: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    items: dict[int, list[Item]] = field(default_factory=dict)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter or buffer to the file and key of its value, unconverted."""

    def add(self, chunk: int, file: str, key: str, spec: TensorSpec, ranges: Callable[[], Ranges]) -> None:
        self.specs.setdefault(file, {})[key] = spec
        self.items.setdefault(chunk, []).append(Item(file, key, ranges))

    def add_ranges(self, chunk: int, file: str, key: str, ranges: Ranges) -> None:
        self.add(chunk, file, key, ranges.spec, lambda: ranges)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for keys in self.specs.values() for spec in keys.values())


def weights_of(trained: TrainedModel, files: ModelFiles, *, fp32: bool = False) -> Contents:
    """`fp32`: bf16 weights as their exact fp32 masters."""
    contents, model, store = Contents(), trained.model, trained.store
    buffers = dict(model.named_buffers())
    first = {id(tensor): name for name, tensor in (*store.params.items(), *buffers.items())}
    names = {
        name: first[id(t)]
        for pairs in (named_parts(model, remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, t in pairs
    }
    where = {key: (file, key, spec) for file, keys in files.files.items() for key, spec in keys.items()}

    def ranges(name: str) -> Ranges:
        if fp32:
            return Ranges.of(value(name))
        return store.ranges(names[name]) if names[name] in store.params else Ranges.of(buffers[names[name]])

    def value(name: str) -> Tensor:
        if fp32:
            return trained.master(names[name]) if names[name] in store.params else _as_fp32(buffers[names[name]])
        return store.value(names[name]) if names[name] in store.params else buffers[names[name]]

    def chunk_of(sources: Iterable[str]) -> int:
        chunks = {store.chunk_of(names[name]) if names[name] in store.params else NO_CHUNK for name in sources}
        return chunks.pop() if len(chunks) == 1 else NO_CHUNK

    for key, source in files.source.items():
        if source in files.descriptions:
            contents.add(NO_CHUNK, *where[key], partial(Ranges.of, files.descriptions[source]))
            continue
        contents.add(chunk_of([source]), *where[key], partial(ranges, source))
        contents.values[names[source]] = where[key][:2]
    for conversion in files.conversions:
        converted = _Converted(conversion, value)
        for key in conversion.keys:
            contents.add(chunk_of(conversion.inputs), *where[key], partial(converted.take, key))
    return contents


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class _Converted:
    """The tensors of one conversion. All are computed when the first is written; each is freed once it is written."""

    def __init__(self, conversion: Conversion, value: Callable[[str], Tensor]):
        self._conversion, self._value = conversion, value
        self._tensors: dict[str, Tensor] = {}

    def take(self, key: str) -> Ranges:
        if not self._tensors:
            self._tensors = self._conversion.convert({name: self._value(name) for name in self._conversion.inputs})
        return Ranges.of(self._tensors.pop(key))


def add_state(contents: Contents, trained: TrainedModel, *, only_model: bool) -> None:
    """Add the optimizer state, and the values that the model's files do not hold as they are: weights that are stored
    converted, and the trained parameters of a PEFT model.
    """
    store, buffers = trained.store, trained.buffers
    for name in trained.steps:
        for part, ranges in store.state_ranges(name).items():
            if only_model and part != COORDINATES:
                continue
            contents.add_ranges(store.chunk_of(name), STATE, state_key(part, name), ranges)
    for name in trained.saved_names - contents.values.keys():
        is_param = name in store.params
        ranges = store.ranges(name) if is_param else Ranges.of(buffers[name])
        contents.values[name] = (STATE, state_key("value", name))
        chunk = store.chunk_of(name) if is_param else NO_CHUNK
        contents.add_ranges(chunk, *contents.values[name], ranges)


def describe(trained: TrainedModel, contents: Contents, num_steps: int, *, only_model: bool) -> dict[str, Any]:
    """The entries of the manifest that describe the model and its training."""
    groups = [
        {
            **{k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")},
            "names": group["param_names"],
        }
        for group in trained.groups
    ]
    return {
        "num_steps": num_steps,
        "steps": dict(trained.steps),
        "groups": groups,
        "values": contents.values,
        "only_model": only_model,
        "loss_chunk": trained.loss_chunk,
        "constants": {} if trained.constants is None else describe_constants(trained.constants),
    }


def _plain(value: Any) -> Any:
    """Hyperparameters may be scalars of torch or numpy."""
    return value.item() if hasattr(value, "item") else value
