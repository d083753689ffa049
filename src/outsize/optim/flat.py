"""FlatModule: trains a small module whose weights, gradients and optimizer state all stay on the device.

Weights lie in one buffer, with gradients, lower halves of masters and moments beside them. One step is one update per
dtype. The bits are those of `outsize.reference` and of the engine: norm, clipping and non-finite policy are shared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.device.device import Device
from outsize.optim.rule import Scratch
from outsize.optim.spec import OptimizerSpec


def flat_bytes(numels: Mapping[str, tuple[int, torch.dtype]], spec: OptimizerSpec) -> int:
    """Device bytes of a FlatModule with these parameters, without the shared scratch."""
    raise NotImplementedError


def new_scratch(device: Device, spec: OptimizerSpec) -> Scratch:
    """Workspace for the updates of any number of FlatModules, one at a time."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Stepped:
    norm: float
    """Of the gradients, before clipping."""
    is_applied: bool
    """False: the norm is not finite, and the step was skipped."""


class FlatModule:
    def __init__(self, module: nn.Module, spec: OptimizerSpec, device: Device, scratch: Scratch):
        """Moves the module's parameters and buffers to the device. Backwards accumulate gradients in the buffer;
        `param.grad` stays None.
        """
        raise NotImplementedError

    module: nn.Module
    num_skipped: int
    """Steps skipped because of a gradient that is not finite, with `nonfinite="skip"`."""

    def step(self, lr: float) -> Stepped:
        """Clip and apply the accumulated gradients, and clear them. Raises NonFiniteGradient with
        `nonfinite="raise"`; nothing is changed then. A parameter without gradient is not touched.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Clear the accumulated gradients."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Views of all that a step changes: `NAME` (the weight), `NAME/lo`, `NAME/exp_avg`, ..., and `NAME/step` (a
        copy). Between steps only: gradients are not part of it.
        """
        raise NotImplementedError

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state from `state()`. Raises BadFile if names, shapes or dtypes differ; nothing is changed then."""
        raise NotImplementedError
