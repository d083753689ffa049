"""LayerParts: what is known of one layer of the teacher, and which of its sizes variants can change."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from outsize.methods.bypass.subblocks import Kind, SubBlock
from outsize.methods.bypass.variants import LayerShape


@dataclass(frozen=True, slots=True)
class LayerParts:
    name: str
    """The layer's path in the model."""
    layer: nn.Module
    config: Any
    """The config that it was built from."""
    subblocks: dict[Kind, SubBlock]
    shape: LayerShape


def inspect_layer(name: str, layer: nn.Module, config: Any, subblocks: dict[Kind, SubBlock]) -> LayerParts:
    """The sizes of a layer that variants can change. Reads no weights: they may be unmaterialized."""
    raise NotImplementedError
