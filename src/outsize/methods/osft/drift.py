"""DriftTraining: the drift parametrization of OSFT as a method of the engine (optim/method.py)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.layout.coordinates import Coordinates
from outsize.methods.osft.bases import Bases
from outsize.methods.osft.products import contract, merge
from outsize.methods.osft.shape import SplitShape
from outsize.optim.method import Constants

FP32_COST = 12
"""Operations of bf16 products in the time of one of fp32 without TF32."""


class DriftTraining:
    def __init__(
        self,
        shapes: Mapping[str, SplitShape],
        *,
        freeze: Callable[[nn.Module], None],
        bases: Callable[[str, Tensor], Bases],
        settings: Mapping[str, Any],
    ):
        """`shapes`: of the target weights, by parameter name. `bases` computes those of a weight, or reads them from a
        cache. `settings`: those that a resumed run must share.
        """
        self._shapes, self._bases, self._settings = dict(shapes), bases, dict(settings)
        self.freeze = freeze

    def coordinates(self, model: nn.Module) -> dict[str, Coordinates]:
        params = dict(model.named_parameters())
        return {name: _coordinates(shape, params[name].dtype) for name, shape in self._shapes.items()}

    def compute(self, name: str, weight: Tensor, out: Constants) -> None:
        bases, kept = self._bases(name, weight), self._view(name, out, weight.dtype)
        for key, tensor in bases.tensors().items():
            kept.tensors()[key].copy_(tensor)

    def contract(
        self, name: str, gradient: Tensor, constants: Constants, *, out: Tensor, scratch: Tensor, accumulate: bool
    ) -> None:
        bases = self._view(name, constants, gradient.dtype)
        contract(gradient, bases, out=out, scratch=scratch, accumulate=accumulate)

    def merge(
        self, name: str, base: Tensor, coordinates: Tensor, constants: Constants, *, out: Tensor, scratch: Tensor
    ) -> None:
        merge(base, coordinates, self._view(name, constants, base.dtype), out=out, scratch=scratch)

    def describe(self) -> Mapping[str, Any]:
        return self._settings

    def _view(self, name: str, constants: Constants, dtype: torch.dtype) -> Bases:
        """The bases of a weight in the memory of its constants: upper halves for contract, lower halves for merge."""
        shape = self._shapes[name]
        upper, lower = constants.contract.view(dtype), constants.merge.view(dtype)
        at = shape.free[0] * shape.free[1]
        parts = [(half[:at].view(shape.free), half[at:].view(shape.frozen)) for half in (upper, lower) if half.numel()]
        (free, frozen), *rest = parts
        return Bases(shape, free, frozen, *(rest[0] if rest else ()))


def _coordinates(shape: SplitShape, dtype: torch.dtype) -> Coordinates:
    itemsize = 2 if dtype == torch.bfloat16 else 4  # fp16 weights are trained in fp32
    is_halved = itemsize == 2
    half_bytes = itemsize * shape.bases_numel
    return Coordinates(
        shape=shape.drift,
        contract_bytes=half_bytes,
        merge_bytes=half_bytes if is_halved else 0,
        contract_flops=shape.contract_flops * (1 if is_halved else FP32_COST),
        merge_flops=shape.merge_flops * (3 if is_halved else FP32_COST),
        scratch_bytes=max(shape.contract_scratch_bytes(itemsize, accumulate=True), shape.merge_scratch_bytes(itemsize)),
    )
