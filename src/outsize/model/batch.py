"""A batch as a call of a model, and the properties that its cost depends on: which inputs it has, their shapes, and
whether a mask masks something.

[Note: When a batch fits] A plan holds for the profiled batches, and for every batch that needs no more than one of
them: the same inputs, no larger dimension, no wider dtype, no gradient into an input that had none, no mask that masks
something where the profiled one masked nothing. A row that was cut into tiles does not stand for one that
is too short for tiles. The number of elements does not decide: attention scores of 2 x 60 tokens are larger than those
of 8 x 16.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.model.tensors import named_tensors


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    instead_because: str = ""
    """Why a batch is passed as one argument, not as `model(**batch)` or `model(*batch)`."""


def as_call(model: nn.Module, batch: Any) -> ModelCall:
    """The call of a model with a batch: `model(**batch)` for a mapping and `model(*batch)` for a sequence if its
    forward accepts that, else `model(batch)`. Raises ConfigError if it accepts neither."""
    if isinstance(batch, ModelCall):
        return batch
    ways = [ModelCall(args=(batch,))]
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        ways.insert(0, ModelCall(kwargs=dict(batch)))
    elif isinstance(batch, (tuple, list)):
        ways.insert(0, ModelCall(args=tuple(batch)))
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not written in Python
        return ways[0]
    wrong = ""
    for way in ways:
        try:
            signature.bind(*way.args, **way.kwargs)
            return replace(way, instead_because=wrong)
        except TypeError as error:
            wrong = wrong or str(error)
    raise cannot_be_called(model, batch, wrong)


def cannot_be_called(model: nn.Module, batch: Any, why: str) -> ConfigError:
    return ConfigError(
        f"batch: {type(model).__name__}.forward cannot be called with this {type(batch).__name__}: {why.rstrip('.')}. "
        "Pass a dict for model(**batch), a tuple for model(*batch), or (batch,) for model(batch)."
    )


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward that may be passed by keyword, in order."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    names = []
    for parameter in found:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    return tuple(names)


def arguments_of(call: ModelCall, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments by name, positional ones without a name by number. `names`: from `positional_names`."""
    return {**{names[i] if i < len(names) else str(i): value for i, value in enumerate(call.args)}, **call.kwargs}


def by_name(call: ModelCall, names: tuple[str, ...]) -> "ModelCall | dict[str, Any]":
    """The arguments as a dict for `model(**batch)`, or the call itself if some have no names."""
    return arguments_of(call, names) if len(call.args) <= len(names) else call


@dataclass(frozen=True, slots=True)
class Input:
    """The properties of an input that decide its cost."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element."""
    requires_grad: bool
    is_offsets: bool
    """Offsets of the documents in a packed row (cu_seqlens). It costs only its own bytes."""
    is_irregular: bool
    """A mask that masks something, or positions that restart within a row. Models then build a mask of tokens x
    tokens.
    """
    is_of_unknown_kind: bool = False
    """Only its shape is known: not whether a batch must have it, nor which flags were set with it."""
    whole_up_to: int = 0
    """A larger dimension of this input was cut into tiles (activation/tiles.py). One of up to so many is not, and may
    cost more. 0: there are no tiles."""

    def covers(self, other: "Input") -> bool:
        """Whether `other` costs no more. Does not look at `is_irregular`."""
        if (
            other.requires_grad > self.requires_grad
            or other.itemsize > self.itemsize
            or len(other.shape) != len(self.shape)
        ):
            return False
        sizes = zip(other.shape, self.shape, strict=True)
        return all(size <= most and not self.crosses(size, most) for size, most in sizes)

    def crosses(self, size: int, most: int) -> bool:
        """Whether a dimension of this size is not cut into tiles, and one of `most` is."""
        return 0 < self.whole_up_to < most and size <= self.whole_up_to


Signature = Mapping[str, Input]
"""The inputs of a call or a batch by path. Flags that are set count as inputs without a shape."""


def signature(arguments: Any, *, is_irregular: Callable[[str, Tensor], bool] | None = None) -> dict[str, Input]:
    """`is_irregular`: decides it for an input. The default reads its values, which syncs the host on a GPU."""
    look = is_irregular or looks_irregular
    found = {name: _input(tensor, look(name, tensor)) for name, tensor in named_tensors(arguments) if tensor.dim()}
    flags = arguments.items() if isinstance(arguments, Mapping) else ()
    return found | {name: Input((), 0, False, False, False) for name, value in flags if value is True}


def _input(tensor: Tensor, is_irregular: bool) -> Input:
    is_list = (
        tensor.dim() == 1 and tensor.dtype == torch.int32
    )  # kernels take int32 offsets; inputs of models are int64
    itemsize = tensor.element_size() if tensor.is_floating_point() else 0
    return Input(tuple(tensor.shape), itemsize, tensor.requires_grad, is_list, is_irregular)


def with_longer_offsets(inputs: Signature) -> tuple[Signature, int]:
    """The inputs with lists of offsets several times as long, so that such a batch does not count as larger, and the
    bytes to reserve for that. Their lengths vary from batch to batch, and a profiling run cannot make them longer."""
    longer = {name: replace(one, shape=(4 * one.shape[0] + 256,)) for name, one in inputs.items() if one.is_offsets}
    # A copy on the device, the lengths computed from it, and both as int64.
    return {**inputs, **longer}, sum(16 * (one.shape[0] - inputs[name].shape[0]) for name, one in longer.items())


def is_mask(name: str) -> bool:
    return "mask" in name.rpartition(".")[2]


def looks_irregular(name: str, tensor: Tensor) -> bool:
    """A mask whose elements are all equal masks nothing, whichever value means that."""
    if not tensor.numel() or tensor.is_meta:
        return False
    with torch.no_grad():
        if is_mask(name):
            return not bool((tensor == tensor.flatten()[0]).all())
        if name.rpartition(".")[2] == "position_ids":
            return bool((tensor.diff(dim=-1) != 1).any())
    return False


@dataclass(frozen=True, slots=True)
class Measured:
    """The signatures of a profiled batch and of the model calls that its loss made."""

    batch: Signature
    signatures: tuple[Signature, ...]

    def covers(self, other: "Measured") -> bool:
        return covers([self.batch], other.batch) and all(covers(self.signatures, call) for call in other.signatures)


def covers(measured: Iterable[Signature], given: Signature) -> bool:
    """Whether one of the profiled calls needs as much as the given one. See [Note: When a batch fits]."""
    return any(_covers(one, given, lambda name: given[name].is_irregular) for one in measured)


def fits(measured: Iterable[Signature], arguments: Any) -> bool:
    """`covers` for the arguments of a call. Reads their values only if the result depends on them."""
    given = signature(arguments, is_irregular=lambda name, tensor: False)
    tensors = dict(named_tensors(arguments))
    known: dict[str, bool] = {}

    def is_irregular(name: str) -> bool:
        if name not in known:
            known[name] = name in tensors and looks_irregular(name, tensors[name])
        return known[name]

    return any(_covers(one, given, is_irregular) for one in measured)


def _covers(one: Signature, given: Signature, is_irregular: Callable[[str], bool]) -> bool:
    missing = {name for name in one.keys() - given.keys() if not one[name].is_of_unknown_kind}
    knows_flags = not any(item.is_of_unknown_kind for item in one.values())
    new = {name for name in given.keys() - one.keys() if knows_flags or given[name].shape}
    # A batch without images also lacks the other inputs that describe images.
    if new or (missing and not any(is_image(name) for name in missing)):
        return False
    both = one.keys() & given.keys()
    if not all(one[name].covers(given[name]) for name in both):
        return False
    return all(one[name].is_irregular or not is_irregular(name) for name in both)


def cut_into_tiles(inputs: Signature, tile_tokens: int) -> Signature:
    """The inputs of a call that was measured with tiles of this length, or 0."""
    return {name: replace(one, whole_up_to=2 * tile_tokens) for name, one in inputs.items()}


def is_image(name: str) -> bool:
    return name.startswith("pixel_values")


def of_unknown_kind(shapes: Mapping[str, tuple[int, ...]], names: tuple[str, ...]) -> Signature:
    """Inputs with known shapes only, as in a plan that was written by hand. They count as the most expensive of their
    shape.
    """
    named = {
        names[int(name)] if name.isdigit() and int(name) < len(names) else name: shape for name, shape in shapes.items()
    }
    return {name: Input(shape, 8, True, False, True, is_of_unknown_kind=True) for name, shape in named.items() if shape}
