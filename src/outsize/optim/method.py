"""Method: trains some weights of a model in coordinates (layout/coordinates.py), beside the optimizer.

`outsize.OSFT` is one. The engine keeps coordinates, constants and initial weights, and calls a method for everything
that depends on its mathematics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from outsize.layout.coordinates import Coordinates


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one weight, as bytes."""

    contract: Tensor
    """Flat uint8 of `Coordinates.contract_bytes`."""
    merge: Tensor
    """Flat uint8 of `Coordinates.merge_bytes`. A contraction does not read it, and it may hold anything then."""


class Method(Protocol):
    def freeze(self, model: nn.Module) -> None:
        """Set which parameters train. Runs before the model is profiled."""

    def coordinates(self, model: nn.Module) -> dict[str, Coordinates]:
        """The weights that are trained in coordinates, by parameter name."""

    def compute(self, name: str, weight: Tensor, out: Constants) -> None:
        """Compute the constants of a weight from its initial value."""

    def contract(
        self, name: str, gradient: Tensor, constants: Constants, *, out: Tensor, scratch: Tensor, accumulate: bool
    ) -> None:
        """Write the gradient of the coordinates to `out`, in fp32, or add it. Allocates nothing on the GPU."""

    def merge(
        self, name: str, base: Tensor, coordinates: Tensor, constants: Constants, *, out: Tensor, scratch: Tensor
    ) -> None:
        """Write the weight to `out`: the initial weight `base`, changed by the coordinates. Allocates nothing on the
        GPU.
        """

    def describe(self) -> Mapping[str, Any]:
        """Settings that a checkpoint must share to be resumed."""
