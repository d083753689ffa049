"""Plans in which layers have different strategies, of models whose layers free what other layers made: the promise of
device memory holds, and is close.
"""

import functools
import random
from collections.abc import Callable
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

WIDTH, WORDS, NUM_PLANS = 16, 31, 2


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


class Plus(Layer):
    """Does not save its input, which the layer before saves."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(torch.tanh(self.up(x + 1))) + x)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.down(torch.tanh(self.up(x))))


class Dropping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(super().forward(x), 0.1, train=True)


class TwoStreams(Layer):
    """Both end in ReLU."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.relu(x + self.down(torch.tanh(self.up(y)))), torch.relu(y + x)


class Aside(Layer):
    """A second output with a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.beside(x).mean(-1)


class Second(Layer):
    """The hidden state is the second output, and the first looks like it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = self.down(torch.tanh(self.up(x)))
        return y, x + y


class Masked(Layer):
    """With a mask that its graph saves, or does not."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        y = self.down(torch.tanh(self.up(x)))
        return torch.relu(x + y * mask) if self.saves_output else x + y.masked_fill(mask < 0, 0.0)


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


class Streams(Model):
    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        y = x.cos()
        for layer in self.layers:
            x, y = layer(x, y)
        return self.loss(x + y, ids)


class States(Model):
    """The head uses the outputs of all layers, from a list."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x)
        return self.loss(x + sum(states), ids)


class Outputs(Model):
    """As States, without the stem's output."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.loss(sum(states)[:1, :2], ids[:1, :2])


class Weighted(Model):
    """As States, and the head's graph saves them."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.loss((torch.stack(states).softmax(0) * torch.stack(states)).sum(0), ids)


class Ignoring(Model):
    """Nothing uses the second outputs: the graph of each dies in the forward of the next layer."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.loss(x, ids)


class TakesSecond(Model):
    """The last layer is smaller than the others: its backward is not the peak."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers)
        layers[-1].up, layers[-1].down = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in self.layers:
            _, x = layer(x)
        return self.loss(x[:1, :2], ids[:1, :2])


class Summing(Model):
    def forward(self, ids: Tensor) -> SimpleNamespace:
        x, total = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, beside = layer(x)
            total = total + beside.square().mean()
        answer = self.loss(x, ids)
        answer.loss = answer.loss + total
        return answer


class WithMask(Model):
    """Only the frame of this forward holds the mask: it dies as it returns."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x, mask = self.embed(ids), torch.ones(*ids.shape, WIDTH)
        for layer in self.layers:
            x = layer(x, mask)
        return self.loss(x, ids)


class WithMasks(Model):
    """One for every layer."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, torch.ones(*ids.shape, WIDTH))
        return self.loss(x, ids)


class Skips(Model):
    """The layers of the second half take the outputs of those of the first, as in a U-Net."""

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x, states = self.embed(ids), []
        for i, layer in enumerate(self.layers):
            x = layer(x, x if 2 * i < len(self.layers) else states.pop())
            if 2 * i < len(self.layers):
                states.append(x)
        return self.loss(x, ids)


class Frozen(Model):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(layers)
        for module in (self.embed, *layers[:2]):
            module.requires_grad_(False)


def many(kind: Callable[..., Layer], count: int = 6, **options: bool) -> list[Layer]:
    return [kind(**options) for _ in range(count)]


MODELS: dict[str, Callable[[], Model]] = {
    "relu": lambda: Model(many(Layer)),
    "some end in relu": lambda: Model([Layer(saves_output=i in (0, 1, 4, 5, 7)) for i in range(9)]),
    "code between layers": lambda: Between(many(Layer, 5)),
    "an output without use": lambda: Unused(many(TwoOutputs, 5)),
    "mixed kinds": lambda: Model([(Layer, Plus, InPlace, Dropping)[i]() for i in (0, 0, 1, 1, 0, 2, 3, 3, 1, 2, 2, 0)]),
    "inputs that are not saved": lambda: Model(many(Plus)),
    "in place": lambda: Model(many(InPlace)),
    "dropout": lambda: Model(many(Dropping)),
    "two streams": lambda: Streams(many(TwoStreams)),
    "all states": lambda: States(many(Layer)),
    "all states, none saved": lambda: States(many(Layer, saves_output=False)),
    "all states of three layers": lambda: States(many(Layer, 3)),
    "all states, saved by the head": lambda: Weighted(many(Layer)),
    "outputs without use": lambda: Ignoring(many(Aside)),
    "outputs that are summed": lambda: Summing(many(Aside)),
    "a mask": lambda: WithMask(many(Masked)),
    "a mask, not saved": lambda: WithMask(many(Masked, saves_output=False)),
    "a mask for each layer": lambda: WithMasks(many(Masked)),
    "a mask for each layer, not saved": lambda: WithMasks(many(Masked, saves_output=False)),
    "skip connections": lambda: Skips(many(Masked)),
    "frozen layers": lambda: Frozen(many(Layer)),
}
MANY_PLANS = [pytest.param(range(NUM_PLANS, 16), marks=pytest.mark.full, id="more")]


@pytest.mark.parametrize("seeds", [pytest.param(range(NUM_PLANS), id="few"), *MANY_PLANS])
@pytest.mark.parametrize("kind", MODELS)
def test_mixed_strategies_stay_below_the_prediction(kind: str, seeds: range) -> None:
    data = [{"ids": torch.randint(0, WORDS, (4, 20), generator=torch.Generator().manual_seed(i))} for i in range(2)]
    model = MODELS[kind]()
    traced = Tracer(model, data[0], find_layers(model), SimDevice(lookup("1GiB"))).trace()
    for seed in seeds:
        prepared = cells.prepare_by_hand(
            MODELS[kind](),
            data[0],
            spec=outsize.AdamW(),
            device=SimDevice(lookup("1GiB")),
            chunk_bytes=1024,
            traced=traced,
            decision=functools.partial(random_decision, rng=random.Random(seed)),
        )
        with cells.closing(prepared) as engine:
            cells.train(engine.model, engine.optimizer, data, steps=1, accumulate=1, engine=engine)
            promised, peak = engine.plan.estimate.gpu_bytes, engine.report().gpu_peak_bytes
            assert 0.999 * promised <= peak <= promised, engine.plan.decision.strategies


class Caching(Layer):
    """Makes a table in its first forward, which takes more memory than the table."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.table, self.tables = where, None, dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * cached(self)[: x.shape[1], :1]


class CachingModel(Model):
    def __init__(self, layers: list[Layer], where: str) -> None:
        super().__init__(layers)
        self.where, self.table, self.tables = where, None, dict[str, Tensor]()

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids) * cached(self)[: ids.shape[1], :1]
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, ids)


def cached(module: Caching | CachingModel) -> Tensor:
    if module.where == "buffer":
        if not hasattr(module, "mask"):
            module.register_buffer("mask", torch.tril(torch.ones(60, 60)), persistent=False)
        return module.mask  # type: ignore[return-value]
    if module.where == "dict":
        if "mask" not in module.tables:
            module.tables["mask"] = torch.tril(torch.ones(60, 60))
        return module.tables["mask"]
    module.table = torch.tril(torch.ones(60, 60)) if module.table is None else module.table
    return module.table


@pytest.mark.parametrize("where", ["attribute", "buffer", "dict"])
@pytest.mark.parametrize("owner", ["layers", "model"])
def test_what_the_first_forward_makes_and_keeps_is_counted(owner: str, where: str) -> None:
    def make() -> Model:
        layers = many(Layer) if owner == "model" else [Caching(where) for _ in range(4)]
        return CachingModel(layers, where) if owner == "model" else Model(layers)

    data = [{"ids": torch.randint(0, WORDS, (4, 20), generator=torch.Generator().manual_seed(i))} for i in range(3)]
    prepared = cells.prepare_by_hand(
        make(), data[0], spec=outsize.AdamW(), device=SimDevice(lookup("1GiB")), chunk_bytes=1024, budget=None
    )
    with cells.closing(prepared) as engine:
        cells.train(engine.model, engine.optimizer, data, steps=3, accumulate=1, engine=engine)
        promised, peak = engine.plan.estimate.gpu_bytes, engine.report().gpu_peak_bytes
        assert 0.8 * promised <= peak <= promised


UNIFORM = {
    # Behind skipped layers no gradient came to the layers that were measured for them.
    "the hidden state is the second output": lambda: TakesSecond(many(Second)),
    # The second layer is the last one whose gradient is summed, in place, and stood for all others.
    "all outputs": lambda: Outputs(many(Layer, 4)),
}


@pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "swap"])
@pytest.mark.parametrize("kind", UNIFORM)
def test_one_strategy_stays_below_the_prediction(kind: str, strategy: str) -> None:
    data = [{"ids": torch.randint(0, WORDS, (4, 20), generator=torch.Generator().manual_seed(0))}]
    prepared = cells.prepare_by_hand(
        UNIFORM[kind](),
        data[0],
        spec=outsize.AdamW(),
        device=SimDevice(lookup("1GiB")),
        chunk_bytes=1024,
        budget=None,
        strategy=strategy,
    )
    with cells.closing(prepared) as engine:
        cells.train(engine.model, engine.optimizer, data, steps=1, accumulate=1, engine=engine)
        promised, peak = engine.plan.estimate.gpu_bytes, engine.report().gpu_peak_bytes
        assert 0.999 * promised <= peak <= promised
