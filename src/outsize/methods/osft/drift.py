"""DriftTraining: the drift of OSFT as a method of the engine (optim/method.py)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.layout.coordinates import Coordinates
from outsize.methods.osft.bases import Bases
from outsize.methods.osft.method import OSFT
from outsize.methods.osft.products import contract, merge
from outsize.methods.osft.shape import SplitShape, aligned_bytes
from outsize.methods.osft.stored_bases import bases_folder, load_or_split
from outsize.methods.osft.targets import choose_trainable, find_targets
from outsize.optim.method import Constants

FP32_COST = 12
"""Operations of bf16 products in the time of one of fp32 without TF32."""


class DriftTraining:
    def __init__(self, shapes: Mapping[str, SplitShape], dtypes: Mapping[str, torch.dtype], *, svd: bool = False):
        """`shapes`, `dtypes`: of the weights that are split, by parameter name."""
        self._shapes, self._svd, self._folder = dict(shapes), svd, bases_folder()
        self.coordinates = {name: _coordinates(shape, dtypes[name]) for name, shape in shapes.items()}

    @classmethod
    def of(cls, model: nn.Module, settings: OSFT) -> "DriftTraining":
        """Choose the weights that are split, and freeze what the settings do not train."""
        if settings.parametrization != "drift":
            raise ConfigError(
                f"OSFT: outsize.prepare trains drifts, not parametrization={settings.parametrization!r}. "
                "Leave it out, or train with outsize.osft.AdamW in a plain loop."
            )
        targets = find_targets(model, settings)
        choose_trainable(model, settings, targets)
        params = dict(model.named_parameters())
        shapes = {target.name: target.shape for target in targets if target.update == "split"}
        return cls(shapes, {name: params[name].dtype for name in shapes}, svd=settings.svd)

    def compute(self, name: str, weight: Tensor, out: Constants) -> None:
        ((bases, _),) = load_or_split([(name, self._shapes[name], weight)], svd=self._svd, folder=self._folder)
        kept = self._view(name, out, weight.dtype)
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

    def _view(self, name: str, constants: Constants, dtype: torch.dtype) -> Bases:
        """The bases of a weight in the memory of its constants: upper halves for contract, lower halves for merge."""
        shape = self._shapes[name]
        free, frozen = shape.free[0] * shape.free[1], shape.frozen[0] * shape.frozen[1]
        at = aligned_bytes(free * dtype.itemsize) // dtype.itemsize
        halves = (half.view(dtype) for half in (constants.contract, constants.merge) if half.numel())
        parts = [(half[:free].view(shape.free), half[at : at + frozen].view(shape.frozen)) for half in halves]
        (upper_free, upper_frozen), *rest = parts
        return Bases(shape, upper_free, upper_frozen, *(rest[0] if rest else ()))


def _coordinates(shape: SplitShape, dtype: torch.dtype) -> Coordinates:
    is_halved = dtype == torch.bfloat16
    constant_bytes = aligned_bytes(*(rows * columns * dtype.itemsize for rows, columns in (shape.free, shape.frozen)))
    return Coordinates(
        shape=shape.drift,
        contract_bytes=constant_bytes,
        merge_bytes=constant_bytes if is_halved else 0,
        contract_flops=shape.contract_flops * (1 if is_halved else FP32_COST),
        merge_flops=shape.merge_flops * (3 if is_halved else FP32_COST),
        scratch_bytes=max(
            shape.contract_scratch_bytes(dtype.itemsize, accumulate=True), shape.merge_scratch_bytes(dtype.itemsize)
        ),
    )
