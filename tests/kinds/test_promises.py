"""Plans in which layers have different strategies, of models whose layers free what other layers made: the promise of device memory holds, and is close."""

import functools
import random
from types import SimpleNamespace

import cells
import pytest
import torch
from parity.test_mixed_plans import random_decision
from torch import Tensor, nn

import outsize
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.profile.tracer import Tracer

WIDTH, WORDS, NUM_PLANS = 16, 31, 10


class Layer(nn.Module):
    """Ends in an operator that saves its result, or in one that saves nothing."""

    def __init__(self, *, saves_output: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.saves_output = saves_output

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return torch.relu(y) if self.saves_output else y


class TwoOutputs(Layer):
    """As in Pegasus-X: the hidden state and states of global tokens."""

    def __init__(self) -> None:
        super().__init__(saves_output=False)
        self.beside = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x + beside), beside + self.beside(beside)


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, ids)

    def loss(self, x: Tensor, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()))


class Between(Model):
    """Other code, without weights, stands between layers."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.sin(layer(x))
        return self.loss(x, ids)


class Unused(Model):
    """Nothing uses the second output of the last layer: its graph dies in the head's forward, if there is one."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        beside = x.cos()
        for layer in self.layers:
            x, beside = layer(x, beside)
        del beside
        return self.loss(x, ids)


MODELS = {
    "relu": lambda: Model([Layer() for _ in range(6)]),
    "some end in relu": lambda: Model([Layer(saves_output=i in (0, 1, 4, 5, 7)) for i in range(9)]),
    "code between layers": lambda: Between([Layer() for _ in range(5)]),
    "an output without use": lambda: Unused([TwoOutputs() for _ in range(5)]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_strategies_stay_below_the_promise(kind: str) -> None:
    data = [{"ids": torch.randint(0, WORDS, (4, 20), generator=torch.Generator().manual_seed(i))} for i in range(2)]
    model = MODELS[kind]()
    traced = Tracer(model, data[0], find_layers(model), SimDevice(lookup("1GiB"))).trace()
    for seed in range(NUM_PLANS):
        prepared = cells.prepare_by_hand(
            MODELS[kind](), data[0], spec=outsize.AdamW(), device=SimDevice(lookup("1GiB")), chunk_bytes=1024, traced=traced,
            decision=functools.partial(random_decision, rng=random.Random(seed)),
        )  # fmt: skip
        with cells.closing(prepared) as engine:
            cells.train(engine.model, engine.optimizer, data, steps=1, accumulate=1, engine=engine)
            promised, peak = engine.plan.estimate.gpu_bytes, engine.report().gpu_peak_bytes
            assert 0.999 * promised <= peak <= promised, engine.plan.decision.strategies
