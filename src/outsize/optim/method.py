"""MethodSpec and Method: the interface of methods that train some weights in coordinates (layout/coordinates.py).

`outsize.OSFT` is a MethodSpec. The engine keeps coordinates, constants and initial weights, and calls the method for
everything that depends on its mathematics.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from outsize.layout.coordinates import Coordinates


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one weight, as bytes."""

    contract: Tensor
    """Flat uint8 of `Coordinates.contract_bytes`."""
    merge: Tensor
    """Flat uint8 of `Coordinates.merge_bytes`. A contraction does not read it, and it may hold anything then."""


class MethodSpec(Protocol):
    """The settings of a method, as the user gives them beside the optimizer's."""

    def bind(self, model: nn.Module) -> "Method":
        """The method for a model. Freezes the parameters that it does not train."""


class Method(Protocol):
    @property
    def coordinates(self) -> dict[str, Coordinates]:
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
