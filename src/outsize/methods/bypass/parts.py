"""LayerParts: what is known of one layer of the teacher: its sub-blocks, the sizes that variants can change, and how
its tensors are laid out.

What a class does with fused tensors is not guessed: each way of cutting them is tried on a part of a batch, and the one
is taken whose result is the teacher's (methods/bypass/layouts.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from outsize.methods.bypass.axes import Axis, AxisSearch
from outsize.methods.bypass.matrices import matrix
from outsize.methods.bypass.subblocks import Kind, SubBlock
from outsize.methods.bypass.tensors import FusedHeads, FusedWidth
from outsize.methods.bypass.variants import LayerShape


@dataclass(frozen=True, slots=True)
class Value:
    """Where attention's value projection is."""

    module: str
    """Path in the layer of the linear map that has it."""
    fused: FusedHeads
    heads: int
    """KV heads."""
    size: int
    """Rows of the value projection."""

    def rows(self, layer: nn.Module) -> Tensor:
        """(KV heads × head size, hidden)."""
        return self._of(matrix(layer.get_submodule(self.module)))

    def bias(self, layer: nn.Module) -> Tensor | None:
        bias = getattr(layer.get_submodule(self.module), "bias", None)
        return None if bias is None else self._of(bias)

    def _of(self, tensor: Tensor) -> Tensor:
        if self.fused == "grouped":
            head_size = self.size // self.heads
            return tensor.reshape(self.heads, -1, head_size, *tensor.shape[1:])[:, -1].flatten(0, 1)
        return tensor[len(tensor) - self.size :]


@dataclass(frozen=True, slots=True)
class LayerParts:
    name: str
    """The layer's path in the model."""
    layer: nn.Module
    config: Any
    """The config that it was built from."""
    subblocks: Mapping[Kind, SubBlock]
    axes: Mapping[str, Axis]
    """By kind of change: `intermediate_size`, `num_key_value_heads`, `experts`. Those that the layer has."""
    shape: LayerShape
    fused_width: FusedWidth = "halves"
    fused_heads: FusedHeads = "separate"
    output: str | None = None
    """Path of attention's output projection."""
    value: Value | None = None

    @property
    def index(self) -> int:
        """The layer's place in its list."""
        return index_of(self.name)

    def of_layer(self, name: str, layer: nn.Module) -> "LayerParts":
        """The same for another layer of the same structure."""
        index = index_of(name)
        axes = {kind: axis if axis.at is None else replace(axis, at=index) for kind, axis in self.axes.items()}
        return replace(self, name=name, layer=layer, axes=axes)


def find_parts(name: str, layer: nn.Module, config: Any, subblocks: Mapping[Kind, SubBlock]) -> LayerParts:
    """The sizes of a layer that variants can change. Reads no weights."""
    search = AxisSearch(layer, config, index_of(name))
    found: dict[str, Axis | None] = {}
    if (ffn := subblocks.get("ffn")) is not None:
        found["intermediate_size"], found["experts"] = search.width(ffn.module), search.experts(ffn.module)
    if (attention := subblocks.get("attention")) is not None:
        found["num_key_value_heads"] = search.kv_heads(attention.module)
    axes = {kind: axis for kind, axis in found.items() if axis is not None}
    sizes: dict[str, Any] = {kind: axis.size for kind, axis in axes.items()}
    shape = LayerShape(
        kinds=tuple(subblocks), **sizes, experts_per_token=_experts_per_token(config) if "experts" in axes else None
    )
    return LayerParts(name, layer, config, subblocks, axes, shape)


def _experts_per_token(config: Any) -> int | None:
    values = [value for key, value in vars(config).items() if "per_tok" in key and isinstance(value, int)]
    return min(values) if values else None


def index_of(name: str) -> int:
    """The place of a layer in its list."""
    return int(name.rpartition(".")[2])
