"""Model kinds of transformers, diffusers and timm: each trains as a plain loop does, to the bit, buffers included, with
room and at its smallest budget.

One kind for each mechanism runs by default, and all kinds with `make test-all`.
"""

import random
from typing import Any

import cells
import foreign_plans
import numpy as np
import pytest
import timm_models
import torch
from kinds import pictures, signals, text, vision
from kinds.families import Family
from torch import Tensor, nn

import outsize
from outsize.base.errors import ModelUnsupported, PlanInfeasible
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.profile import cache
from outsize.setup import planner

FAMILIES: dict[str, Family] = {
    **text.TEXT,
    **signals.SIGNALS,
    **vision.VISION,
    **vision.MULTIMODAL,
    **pictures.DIFFUSERS,
    **pictures.TIMM,
}
DEFAULT = {
    "mamba2": "a state space in chunks",
    "funnel": "layers of two resolutions",
    "deformable-detr": "layers are given views of a weight; outputs of layers are written in place",
    "clip": "two towers",
    "idefics": "a config without attributes; layers of two lists in turn",
    "wav2vec2-bert": "the stem's output is written in place, masks come from numpy's generator",
    "dpt": "outputs of several layers, a loss outside of the model with a large gradient",
    "unet": "skip connections: the input of a layer is given to a later one too",
    "flux": "two streams, two kinds of layers",
    "timm-vit": "layers in nn.Sequential",
}
STEPS = 3


def run(model: nn.Module, optimizer: Any, loss: Any, data: list[Any]) -> list[float]:
    random.seed(1)  # masks of speech models come from numpy's generator
    np.random.seed(1)
    torch.manual_seed(1)
    losses = []
    for batch in data:
        found = loss(model, batch) if loss is not None else model(**batch).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.detach()))
    return losses


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def prepare(family: Family, model: nn.Module, gpu_memory: int | None = None) -> Any:
    """On a device of its own, where nothing of other tests is alive."""
    return outsize.prepare(
        model,
        family.data(1)[0],
        optimizer=foreign_plans.SPEC,
        device=SimDevice(lookup("1GiB")),
        gpu_memory=gpu_memory,
        chunk_bytes="4KiB",
        loss=family.loss,
    )


def assert_trains_as_plain_torch(family: Family) -> None:
    """With room, and in the least memory that a plan is found for."""
    data = family.data(STEPS)
    plain = family.make()
    losses = run(plain, foreign_plans.reference(plain), family.loss, data)
    expected = state(plain)
    profiled = family.make()
    with pytest.raises(PlanInfeasible) as too_small:
        prepare(family, profiled, 1)
    for model, gpu_memory in ((profiled, None), (family.make(), too_small.value.needed_bytes)):
        with cells.closing(prepare(family, model, gpu_memory)) as engine:
            assert run(engine.model, engine.optimizer, family.loss, data) == losses
            assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes
        torch.testing.assert_close(state(engine.model), expected, rtol=0, atol=0)


@pytest.fixture
def one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All budgets of a test have one trace: of a model of the same kind, which takes half of the time of a test."""
    kept: list[Any] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(cache.traced(*args, **kwargs))
        return kept[0]

    monkeypatch.setattr(planner, "traced", traced)


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_a_kind_trains_as_in_plain_torch(name: str, one_trace: None) -> None:
    family = FAMILIES[name]
    if family.needs_timm and not timm_models.HAS_TIMM:
        pytest.skip("timm is not installed. `make setup` installs it.")
    if name in pictures.DIFFUSERS:
        pytest.importorskip("diffusers")
    if family.refused:
        with pytest.raises(ModelUnsupported, match=family.refused):
            prepare(family, family.make())
    else:
        assert_trains_as_plain_torch(family)


def test_there_are_enough_kinds() -> None:
    assert len(FAMILIES) >= 75 and DEFAULT.keys() <= FAMILIES.keys()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.tanh(self.proj(x + positions))


class Positions(nn.Module):
    """Layers are given one half of a table, a view, which they read while the table's slot may hold other weights. The
    stem's output and those of layers are written in place: gradients reach them by another node than the one that made
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Linear(8, 8), nn.Embedding(6, 16)
        self.mask = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(Attending() for _ in range(5))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        positions, start = self.table.weight.split(8, dim=1)
        x = self.embed(x + start)
        x[:, 2] = self.mask
        for layer in self.layers:
            x = layer(x, positions)
        return {"loss": self.out(x).square().mean()}


def test_views_of_weights_and_writes_in_place(one_trace: None) -> None:
    assert_trains_as_plain_torch(
        Family(
            build=Positions,
            batch=lambda rng: {"x": torch.randn(4, 6, 8, generator=rng)},
            loss=lambda m, b: m(**b)["loss"],
        )
    )
