"""Models whose forward changes something beside its outputs: statistics, counters, random numbers of other generators.
Each trains as a plain loop does, buffers included, under every strategy: what must not run twice is not recomputed."""

import logging
import random
from collections import Counter
from typing import Any

import cells
import foreign_plans
import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
from outsize.base.errors import ModelUnsupported

WIDTH = 8


class Normed(nn.Module):
    """Running statistics, which a second forward would update twice."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.proj(x)))


class Spectral(nn.Module):
    """Power iteration in every forward: a second one gives another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.proj(x))


class Counting(nn.Module):
    """Counts tokens in a buffer, calls in an attribute, and keeps a moving average of its output that the next forward
    uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.proj(x)) + 0.1 * self.mean
        with torch.no_grad():
            self.tokens += len(x)
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
        return x + out


class Drawing(nn.Module):
    """Dropout with numpy's and Python's generators and with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.proj(x) * torch.from_numpy((np.random.rand(WIDTH) > 0.3).astype(np.float32))
        out = out * (0.5 + random.random())
        return x + out * (torch.rand(WIDTH, generator=self.generator) > 0.2)


GLOBAL: dict[str, Any] = {"generator": np.random.default_rng(7), "calls": Counter()}


class Meter:
    def __init__(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def update(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.mean


class Holding(nn.Module):
    """State in containers, objects, arrays, generators of other libraries and globals."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.means, self.sums, self.counts = [torch.zeros(WIDTH)], np.zeros(WIDTH), {"by": Counter[str]()}
        self.meter, self.generators = Meter(), (np.random.default_rng(1), {"python": random.Random(2)})

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.proj(x)) + self.means[0] + self.meter.update(x)
        with torch.no_grad():
            self.means[0].mul_(0.9).add_(out.mean(0), alpha=0.1)
            self.sums += out.mean(0).numpy()
            self.counts["by"]["call"] += 1
            GLOBAL["calls"]["all"] += 1
        mask = self.generators[0].random(WIDTH) + GLOBAL["generator"].random()
        scale = self.generators[1]["python"].random() + self.sums.mean() + self.counts["by"]["call"]
        return x + 0.01 * out * torch.from_numpy(mask.astype(np.float32)) * scale


class Indexed(nn.Module):
    """Called with `index=` and `forward=`, which are names of arguments of our own wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, index: int = 0, forward: float = 1.0) -> Tensor:
        return x + torch.tanh(self.proj(x)) * forward / (index + 1)


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for i, layer in enumerate(self.layers):
            x = layer(x, index=i, forward=0.5) if isinstance(layer, Indexed) else layer(x)
        return {"loss": self.out(x).square().mean()}


BLOCKS = [Normed, Spectral, Counting, Drawing, Holding, Indexed]


class Distilled(Stack):
    """The first calls of the layers have no backward: what must not run twice shows in later calls."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        target = super().forward(2 * x)["loss"].detach()
        return {"loss": (super().forward(x)["loss"] - target).square()}


DATA = [{"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(3)]


def state(model: nn.Module) -> dict[str, Any]:
    attributes = {
        f"{n}.{k}": v
        for n, m in model.named_modules()
        for k, v in vars(m).items()
        if isinstance(v, Tensor) or k == "calls"
    }
    held = [part for part in model.modules() if isinstance(part, Holding)]
    return {
        **{n: v.clone() for n, v in model.state_dict().items()},
        **{k: v.clone() if isinstance(v, Tensor) else v for k, v in attributes.items()},
        **{f"{i}.means": part.means[0].clone() for i, part in enumerate(held)},
        **{f"{i}.sums": part.sums.copy() for i, part in enumerate(held)},
        **{f"{i}.meter": part.meter.mean.clone() for i, part in enumerate(held)},
    }


def generators_and_counters(model: nn.Module) -> list[str]:
    held = [part for part in model.modules() if isinstance(part, Holding)]
    own = [(part.generators[0].bit_generator.state, part.generators[1]["python"].getstate()) for part in held]
    return [
        repr(own),
        repr([part.counts for part in held]),
        repr(GLOBAL["generator"].bit_generator.state),
        repr(GLOBAL["calls"]),
    ]


def train(model: nn.Module, optimizer: Any) -> list[float]:
    GLOBAL["generator"] = np.random.default_rng(7)
    GLOBAL["calls"].clear()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    losses = []
    for batch in DATA:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("block", "strategy"),
    [  # two of the strategies by turns: one that runs layers twice, and one that does not
        pytest.param(
            block, strategy, marks=[pytest.mark.full] if (i + j // 2) % 2 else [], id=f"{block.__name__}-{strategy}"
        )
        for i, block in enumerate(BLOCKS)
        for j, strategy in enumerate(("keep", "recompute", "swap", "offload"))
    ],
)
def test_state_equals_that_of_plain_training_under_every_strategy(block: type[nn.Module], strategy: str) -> None:
    plain, model = Stack(block), Stack(block)
    expected = train(plain, foreign_plans.reference(plain))
    others = generators_and_counters(plain)
    how: dict[str, Any] = dict(weights="host", optimizer="host", depth=0, strategy=strategy, chunk_bytes=256)
    engine = cells.prepare_by_hand(model, DATA[0], spec=foreign_plans.SPEC, device="sim:16MiB", **how)
    recomputed = {s for s in engine.plan.decision.strategies if s in ("recompute", "offload")}
    assert bool(recomputed) == (block is Indexed and strategy in ("recompute", "offload"))
    assert train(model, engine.optimizer) == expected
    assert generators_and_counters(model) == others
    engine.detach()
    torch.testing.assert_close(state(model), state(plain), rtol=0, atol=0)


def test_layers_whose_first_calls_have_no_backward_are_not_run_twice_either() -> None:
    plain, model = Distilled(Normed), Distilled(Normed)
    expected = train(plain, foreign_plans.reference(plain))
    how: dict[str, Any] = dict(weights="host", optimizer="host", depth=0, strategy="recompute", chunk_bytes=256)
    engine = cells.prepare_by_hand(model, DATA[0], spec=foreign_plans.SPEC, device="sim:16MiB", **how)
    assert set(engine.plan.decision.strategies) == {"keep"}
    assert train(model, engine.optimizer) == expected
    engine.detach()
    torch.testing.assert_close(state(model), state(plain), rtol=0, atol=0)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)
def test_prepare_leaves_model_and_generators_as_they_were(
    block: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = Stack(block), Stack(block)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    others = generators_and_counters(model)
    with caplog.at_level(logging.WARNING, logger="outsize"):
        engine = outsize.prepare(model, DATA[0], device="cpu", chunk_bytes="1KiB")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    torch.testing.assert_close(state(model), state(twin), rtol=0, atol=0)
    assert generators_and_counters(model) == others
    noted = [text for text in caplog.messages if "not recomputed" in text]
    assert len(noted) == (0 if block is Indexed else 1) and all("layers.0 and 3 more" in text for text in noted)
    if block is Normed:
        assert "the forward writes norm.running_mean" in noted[0]
    engine.detach()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "mixtral", "qwen3-next", "modernbert"])
def test_ordinary_layers_are_recomputed(kind: str) -> None:
    _, trace = cells.Cell(kind=kind).traced("sim:64MiB")
    assert not trace.notes


@pytest.mark.parametrize("device", ["cpu", "sim:64MiB"])
def test_gradients_reach_the_models_inputs(device: str) -> None:
    """Soft prompts, GANs, embeddings made by hand: `sim` cut them off, CUDA did not."""

    def run(model: nn.Module, optimizer: Any) -> Tensor:
        prompt = torch.randn(2, 4, zoo.HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
        labels = torch.ones(2, 4, dtype=torch.long)
        model(inputs_embeds=prompt * 2, labels=labels).loss.backward()
        optimizer.step()
        assert prompt.grad is not None
        return prompt.grad

    plain, model = zoo.make("llama-untied"), zoo.make("llama-untied")
    for one in (plain, model):
        one.model.embed_tokens.weight.requires_grad_(False)
    batch = {"inputs_embeds": torch.randn(2, 4, zoo.HIDDEN), "labels": torch.ones(2, 4, dtype=torch.long)}
    expected = run(plain, foreign_plans.reference(plain))
    engine = cells.prepare_by_hand(model, batch, spec=foreign_plans.SPEC, device=device, **foreign_plans.STREAMED)
    assert torch.equal(run(model, engine.optimizer), expected)
    engine.detach()


class Codebook(nn.Module):
    """Moves a parameter in its forward, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + torch.tanh(self.proj(x)) + self.codes.mean(0)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(len(x)))


@pytest.mark.parametrize("device", ["cpu", "sim:16MiB"])
@pytest.mark.parametrize(
    ("block", "name"), [(Codebook, "layers.0.codes"), (Renormed, "layers.0.table.weight")], ids=["codebook", "max_norm"]
)
def test_a_parameter_that_the_forward_writes_is_refused_and_left_as_it_was(
    block: type[nn.Module], name: str, device: str
) -> None:
    model, twin = Stack(block), Stack(block)
    with pytest.raises(
        ModelUnsupported, match=rf"{name}: the model's forward writes this parameter.*Keep it as a buffer"
    ):
        outsize.prepare(model, DATA[0], device=device)
    torch.testing.assert_close(state(model), state(twin), rtol=0, atol=0)


class Watched(nn.Module):
    """Registers hooks in its first forward, as transformers does to collect hidden states, and notes in an attribute
    that it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "taken"):
            self.taken: list[int] = []
            self.proj.register_forward_hook(lambda module, args, out: out * 2)
        return x + torch.tanh(self.proj(x))


@pytest.mark.parametrize("device", ["cpu", "sim:16MiB"])
def test_hooks_that_the_profiling_run_registers_are_removed(device: str) -> None:
    plain, model = Stack(Watched), Stack(Watched)
    optimizer = foreign_plans.reference(plain)
    engine = outsize.prepare(model, DATA[0], device=device, optimizer=foreign_plans.SPEC)
    assert not any(layer.proj._forward_hooks for layer in model.layers)
    for batch in DATA:
        for one, step in ((plain, optimizer), (model, engine.optimizer)):
            one(**batch)["loss"].backward()
            step.step()
            step.zero_grad()
    torch.testing.assert_close(state(model), state(plain), rtol=0, atol=0)
    engine.detach()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)
def test_one_run_shows_what_must_not_run_twice(block: type[nn.Module]) -> None:
    """Where memory is too small to compare a second run of each layer."""
    model = Stack(block)
    tracer = cells.Tracer(model, DATA[0], cells.find_layers(model), cells.choose_device("sim:16MiB"))
    tracer.compares = False
    graph, trace = tracer.trace()
    layers = [call for call in range(len(graph.calls)) if graph.blocks[graph.calls[call]].kind == "layer"]
    assert all(("recompute" in trace.calls[call]) == (block is Indexed) for call in layers)
    assert len(trace.notes) == (0 if block is Indexed else 1)
