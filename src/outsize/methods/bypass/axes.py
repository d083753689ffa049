"""Axes: which setting of a model's config decides the width of a layer's feed-forward part, the number of its KV heads
or of its experts.

A layer is built again on the meta device with each setting changed. The one that changes the shapes of the sub-block's
tensors, and of nothing else, in the way that such a setting must, is the axis. No names of model families are needed.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outsize.methods.bypass.matrices import is_transposed

Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters and saved buffers of a layer, by name."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting of the config, and its value in the teacher's layer."""

    key: str
    at: int | None
    """The place in a list of values for single layers. None: the value is a number."""
    size: int

    def changed(self, config: Any, size: int) -> Any:
        """The value of `key` with another size."""
        if self.at is None:
            return size
        values = list(getattr(config, self.key))
        values[self.at] = size
        return values


def with_sizes(config: Any, sizes: Mapping[Axis, int]) -> Any:
    """A copy of the config. It shares the attention implementation with the original."""
    config = copy.deepcopy(config)
    for axis, size in sizes.items():
        setattr(config, axis.key, axis.changed(config, size))
    return config


def new_layer(layer: nn.Module, config: Any, index: int, *, on_meta: bool = True) -> nn.Module:
    """A layer of the same class from a config. `on_meta`: without memory; else its buffers are real."""
    from accelerate import init_empty_weights

    arguments = [_argument(layer, name, config, index) for name in _required(type(layer))]
    with torch.device("meta") if on_meta else nullcontext(), init_empty_weights(include_buffers=False):
        made: nn.Module = type(layer)(*arguments)
    return made.eval()


def _required(kind: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    is_index = ("idx", "index", "layer_id", "layer_number")
    return [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        and (one.default is one.empty or any(part in one.name for part in is_index))
    ]


def _argument(layer: nn.Module, name: str, config: Any, index: int) -> Any:
    if "config" in name:
        return config
    if any(part in name for part in ("idx", "index", "layer_id", "layer_number")) or name == "i":
        return index
    return getattr(layer, name)


def shapes_of(module: nn.Module, prefix: str = "") -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict(prefix=prefix).items()}


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a changed setting does to a layer."""

    axis: Axis
    size: int
    """The changed value."""
    resized: dict[str, tuple[int, int, int]]
    """By tensor: the dimension, its size before and now."""
    removed: tuple[str, ...]


class AxisSearch:
    """The axes of one layer. `index`: its place in the list of layers."""

    def __init__(self, layer: nn.Module, config: Any, index: int):
        self._layer, self._config, self._index = layer, config, index
        self._shapes = shapes_of(layer)
        try:
            self.can_build = config is not None and shapes_of(new_layer(layer, config, index)) == self._shapes
        except Exception:  # its class takes other arguments
            self.can_build = False
        """Whether the layer's class builds such a layer from the config."""

    def width(self, module: str) -> Axis | None:
        """Of a feed-forward part or of its experts: the width with the most elements."""
        best: tuple[int, Axis] | None = None
        for axis, smaller in self._settings(lambda size: size // 2, empty=("inner", "ffn", "intermediate")):
            effect = self._effect(axis, smaller, module)
            if effect is None or effect.removed or not self._is_width(effect):
                continue
            elements = sum(torch.Size(self._shapes[name]).numel() for name in effect.resized)
            if best is None or elements > best[0]:
                before = min(was for _, was, _ in effect.resized.values())
                best = elements, Axis(axis.key, axis.at, axis.size or before)
        return best[1] if best is not None else None

    def kv_heads(self, module: str) -> Axis | None:
        for axis, fewer in self._settings(_divided, named=("kv", "key_value", "group")):
            effect = self._effect(axis, fewer, module)
            if effect is not None and not effect.removed and self._is_output_only(effect):
                return axis
        return None

    def experts(self, module: str) -> Axis | None:
        for axis, fewer in self._settings(lambda size: size - 1, named=("expert",)):
            effect = self._effect(axis, fewer, module)
            if effect is None:
                continue
            leading = all((dim, was, now) == (0, axis.size, fewer) for dim, was, now in effect.resized.values())
            is_stacked = any(len(self._shapes[name]) > 2 for name in effect.resized)
            if leading and effect.resized and (is_stacked or effect.removed):
                return axis
        return None

    def _settings(
        self, smaller: Callable[[int], int], named: tuple[str, ...] = (), empty: tuple[str, ...] = ()
    ) -> Iterator[tuple[Axis, int]]:
        """Settings with a number, and a smaller one. `named`: a part of the name. `empty`: parts of names whose setting
        may be None, for a default that depends on others.
        """
        if not self.can_build:
            return
        for key, value in vars(self._config).items():
            if named and not any(part in key for part in named):
                continue
            if value is None and any(part in key for part in empty):
                yield Axis(key, None, 0), 8
            at = self._index if isinstance(value, list) and len(value) > self._index else None
            size = value if at is None else value[at]
            if isinstance(size, int) and not isinstance(size, bool) and size > 1 and (at is None or len(value) > 1):
                yield Axis(key, at, size), smaller(size)

    def _effect(self, axis: Axis, size: int, module: str) -> _Effect | None:
        """None if it changes nothing, or something outside of the module."""
        try:
            made = new_layer(self._layer, with_sizes(self._config, {axis: size}), self._index)
        except Exception:  # not every value can be built
            return None
        now = shapes_of(made)
        resized: dict[str, tuple[int, int, int]] = {}
        for name in self._shapes.keys() & now.keys():
            was, new = self._shapes[name], now[name]
            if was != new:
                dims = [dim for dim in range(len(was)) if len(was) == len(new) and was[dim] != new[dim]]
                if len(dims) != 1 or was[dims[0]] < new[dims[0]]:
                    return None
                resized[name] = dims[0], was[dims[0]], new[dims[0]]
        removed = tuple(self._shapes.keys() - now.keys())
        is_inside = all(name.startswith(f"{module}.") for name in (*resized, *removed))
        is_effect = resized and is_inside and now.keys() <= self._shapes.keys()
        return _Effect(axis, size, resized, removed) if is_effect else None

    def _is_width(self, effect: _Effect) -> bool:
        """Matrices shrink in proportion, among them one by its inputs, from the size that the setting has."""
        size = effect.axis.size or min(was for _, was, _ in effect.resized.values())
        if any(was * effect.size != now * size for _, was, now in effect.resized.values()):
            return False
        if any(dim == 0 and len(self._shapes[name]) > 2 for name, (dim, _, _) in effect.resized.items()):
            return False
        return any(
            was == size and is_input(self._layer, name, effect.resized) for name, (_, was, _) in effect.resized.items()
        )

    def _is_output_only(self, effect: _Effect) -> bool:
        """No matrix has fewer inputs, and each loses whole heads."""
        heads = effect.axis.size - effect.size
        matrices = [name for name in effect.resized if len(self._shapes[name]) == 2]
        return bool(matrices) and all(
            (was - now) % heads == 0 and len(self._shapes[name]) < 3 and not is_input(self._layer, name, effect.resized)
            for name, (_, was, now) in effect.resized.items()
        )


def is_input(layer: nn.Module, name: str, resized: Mapping[str, tuple[int, int, int]]) -> bool:
    """Whether the resized dimension of a tensor is that of its inputs: of an output projection."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    rank = owner._parameters[last].dim() if owner._parameters.get(last) is not None else 1  # type: ignore[union-attr]
    dim, was, _ = resized[name]
    if rank < 3:
        return rank == 2 and dim == (0 if is_transposed(owner) else 1)
    # Stacked experts: half the size of gate and up if these are fused, else by name.
    siblings = [size for other, (_, size, _) in resized.items() if unit_of(layer, other) == unit_of(layer, name)]
    return was < max(siblings) or any(part in name for part in ("down", "w2", "output"))


def unit_of(layer: nn.Module, name: str) -> str:
    """The path of the feed-forward network, or stack of experts, that a tensor belongs to."""
    owner, _, last = name.rpartition(".")
    return owner.rpartition(".")[0] if last in ("weight", "bias") else owner


def _divided(size: int) -> int:
    return size // next(factor for factor in range(2, size + 1) if size % factor == 0)
