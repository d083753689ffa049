"""timm's models without torchvision.

timm imports torchvision for its data transforms and for one norm. Not every torch that these tests run with has a build
of torchvision, and a build for another torch breaks `import transformers`. So a stand-in takes its place while timm is
imported, and is removed afterwards: transformers never sees it.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

HAS_TIMM = importlib.util.find_spec("timm") is not None
_MODULES = (
    "torchvision",
    *(
        f"torchvision.{name}"
        for name in (
            "ops",
            "ops.misc",
            "transforms",
            "transforms.functional",
            "datasets",
            "models",
            "models.feature_extraction",
            "utils",
        )
    ),
)


class FrozenBatchNorm2d(nn.Module):
    """timm asks whether a module is one. None of the tests' models has one."""


@contextmanager
def without_torchvision() -> Iterator[None]:
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    sys.modules.update({name: MagicMock(name=name, FrozenBatchNorm2d=FrozenBatchNorm2d) for name in _MODULES})
    try:
        yield
    finally:
        for name in _MODULES:
            del sys.modules[name]


def create(name: str, **settings: Any) -> nn.Module:
    """A timm model by its class or entry point, with random weights."""
    with without_torchvision():
        import timm

        return timm.create_model(name, pretrained=False, num_classes=3, **settings)


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["target"])


def batch(size: int) -> Any:
    def made(rng: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 3, size, size, generator=rng), "target": torch.randint(0, 3, (2,), generator=rng)}

    return made
