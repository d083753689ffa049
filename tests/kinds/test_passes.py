"""Passes that are no plain forward and backward: several forwards for one loss, passes without grad over layers
that also train, checkpointing that the model's own code does. Each trains as a plain loop does under every strategy,
tight and roomy, or is refused by name."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cells
import foreign_plans
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported, OrderMismatch, PlanInfeasible
from outsize.setup.prepare import preview

WIDTH = 16
DEVICE = "sim:16MiB"
DATA = [
    {name: torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * i + j)) for j, name in enumerate("xy")}
    for i in range(3)
]
STREAMED: dict[str, Any] = dict(weights="host", optimizer="host", depth=0, chunk_bytes=1024)


class Block(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        """`reentrant`: the block checkpoints its MLP in this way."""
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), reentrant

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.mlp(x) if self.reentrant is None else checkpoint(self.mlp, x, use_reentrant=self.reentrant))


class Encoder(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(reentrant) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, first: int = 0, last: int = 4) -> Tensor:
        x = self.stem(x) if first == 0 else x
        for layer in self.layers[first:last]:
            x = layer(x)
        return self.norm(x) if last == 4 else x


Forward = Callable[[Encoder, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """The forward is a function, so that each pattern is one function."""

    def __init__(self, forward: Forward, reentrant: bool | None = None) -> None:
        super().__init__()
        self.encoder = Encoder(reentrant)
        self.run = forward
        self.is_switched = False

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.run is switched:
            return {"loss": switched(self.encoder, x, y, is_switched=self.is_switched)}
        return {"loss": self.run(self.encoder, x, y)}


def plain_pass(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return (encoder(x) - y).square().mean()


# Passes without grad.


def teacher_first(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = encoder(x)
    return (target - encoder(y)).square().mean()


def teacher_last(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    out = encoder(y)
    with torch.no_grad():
        target = encoder(x)
    return (target - out).square().mean()


def teacher_in_inference_mode(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        target = encoder(x)
    return (target.clone() - encoder(y)).square().mean()


def teacher_of_some_layers(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    """The stem of the student's pass runs in the call of the teacher's last layer."""
    with torch.no_grad():
        target = encoder(x, last=2)
    return (target - encoder(y)).square().mean()


def prefix_without_grad(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        x = encoder(x, last=2)
    return (encoder(x, first=2) - y).square().mean()


def layer_without_grad(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    x = encoder(x, last=1)
    with torch.no_grad():
        step = encoder.layers[1](x)
    return (encoder(x + step, first=2) - y).square().mean()


def stop_gradient(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    x = encoder(x, last=2)
    return (encoder(x.detach(), first=2) - y).square().mean() + x.square().mean()


def detached_first(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    """A teacher's pass with grad, of which nothing has a backward."""
    target = encoder(x).detach()
    return (target - encoder(y)).square().mean()


def detached_last(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    out = encoder(y)
    return (encoder(x).detach() - out).square().mean()


def unused_pass(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    encoder(x)
    return (encoder(x) - y).square().mean()


def last_layer_left_out(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    """The forward ends in the call of a layer. What that layer sends to the host was subtracted twice from the plan's
    memory.
    """
    return (encoder.norm(encoder(x, last=3)) - y).square().mean()


# Several passes with grad in one forward.


def pair(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    return (encoder(x) - encoder(y)).square().mean()


def symmetric(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    a, b = encoder(x), encoder(y)
    return (a - b.detach()).square().mean() + (b.tanh() - a.detach()).square().mean()


def triplet(encoder: Encoder, x: Tensor, y: Tensor) -> Tensor:
    anchor, near, far = encoder(x), encoder(y), encoder(x.flip(0))
    return torch.relu((anchor - near).square().sum(-1) - (anchor - far).square().sum(-1) + 1).mean()


SEVERAL = [pair, pytest.param(symmetric, marks=pytest.mark.full), pytest.param(triplet, marks=pytest.mark.full)]


# Checkpointing around layers.


def each_layer(encoder: Encoder, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    x = encoder.stem(x)
    for layer in encoder.layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return (encoder.norm(x) - y).square().mean()


def two_layers(encoder: Encoder, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    x = encoder.stem(x)
    for i in (0, 2):
        x = checkpoint(lambda x, i=i: encoder.layers[i + 1](encoder.layers[i](x)), x, use_reentrant=reentrant)
    return (encoder.norm(x) - y).square().mean()


def sequential(encoder: Encoder, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    x = checkpoint_sequential(list(encoder.layers), 2, encoder.stem(x), use_reentrant=reentrant)
    return (encoder.norm(x) - y).square().mean()


def all_layers(encoder: Encoder, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    return (checkpoint(encoder, x.detach().requires_grad_(), use_reentrant=reentrant) - y).square().mean()


AROUND_LAYERS = [each_layer, two_layers, sequential, all_layers]


def around_regions(encoder: Encoder, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    x = checkpoint(encoder.stem, x.detach().requires_grad_(), use_reentrant=reentrant)
    for layer in encoder.layers:
        x = layer(x)
    return (checkpoint(encoder.norm, x, use_reentrant=reentrant) - y).square().mean()


def switched(encoder: Encoder, x: Tensor, y: Tensor, *, is_switched: bool = False) -> Tensor:
    """A prefix that trains in the profiling run of prepare, and later runs without grad."""
    with torch.set_grad_enabled(not is_switched):
        x = encoder(x, last=2)
    return (encoder(x, first=2) - y).square().mean()


# Comparing.


def train(model: nn.Module, optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for batch in DATA:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_trains_alike(model: nn.Module, engine: Any, plain: nn.Module) -> None:
    expected = train(plain, foreign_plans.reference(plain))
    with cells.closing(engine):
        assert train(model, engine.optimizer) == expected
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def assert_every_strategy_trains(
    make: Callable[[], nn.Module], *, budget: int | None = None, switch: bool = False
) -> None:
    """`budget` None: exactly what the plan promises."""
    model = make()
    traced = cells.Tracer(model, DATA[0], cells.find_layers(model), cells.choose_device(DEVICE)).trace()
    for strategy in ("keep", "recompute", "offload", "swap"):
        model, plain = make(), make()
        engine = cells.prepare_by_hand(
            model,
            DATA[0],
            spec=foreign_plans.SPEC,
            device=DEVICE,
            traced=traced,
            budget=budget,
            strategy=strategy,
            **STREAMED,
        )
        assert strategy in engine.plan.decision.strategies
        if switch:
            model.is_switched = plain.is_switched = True
        assert_trains_alike(model, engine, plain)


def assert_tight_and_roomy_train(make: Callable[[], nn.Module]) -> None:
    how: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device=DEVICE, chunk_bytes="1KiB")
    with pytest.raises(PlanInfeasible) as least:
        preview(make(), DATA[0], gpu_memory=1, **how)
    for gpu_memory in (least.value.needed_bytes, None):
        model = make()
        assert_trains_alike(model, outsize.prepare(model, DATA[0], gpu_memory=gpu_memory, **how), make())


WITHOUT_GRAD = [
    teacher_first,
    teacher_in_inference_mode,
    teacher_of_some_layers,
    detached_first,
    last_layer_left_out,
    *(
        pytest.param(forward, marks=pytest.mark.full)
        for forward in (
            teacher_last,
            prefix_without_grad,
            layer_without_grad,
            stop_gradient,
            detached_last,
            unused_pass,
        )
    ),
]


@pytest.mark.parametrize("forward", WITHOUT_GRAD, ids=lambda f: f.__name__)
def test_passes_without_grad(forward: Forward) -> None:
    make = functools.partial(Model, forward)
    assert_every_strategy_trains(make)
    assert_tight_and_roomy_train(make)


def test_layers_that_run_without_grad_after_prepare() -> None:
    assert_every_strategy_trains(functools.partial(Model, switched), switch=True)


@pytest.mark.parametrize("forward", SEVERAL, ids=lambda f: f.__name__)
def test_several_passes_in_one_module(forward: Forward) -> None:
    assert_every_strategy_trains(functools.partial(Model, forward))
    assert_tight_and_roomy_train(functools.partial(Model, forward))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_inside_layers_and_outside_of_them(reentrant: bool) -> None:
    for make in (
        functools.partial(Model, plain_pass, reentrant),
        functools.partial(Model, functools.partial(around_regions, reentrant=reentrant)),
    ):
        assert_every_strategy_trains(make)
        assert_tight_and_roomy_train(make)


def test_reentrant_checkpointing_in_a_layer_that_runs_twice_is_refused() -> None:
    with pytest.raises(
        ModelUnsupported, match=r"encoder\.layers\.\d\.up\.weight gets its gradient in 2 parts.*Use use_reentrant=False"
    ):
        outsize.prepare(Model(pair, reentrant=True), DATA[0], device=DEVICE)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("forward", AROUND_LAYERS, ids=lambda f: f.__name__)
def test_checkpointing_around_layers_is_refused_by_name(forward: Callable[..., Tensor], reentrant: bool) -> None:
    make = functools.partial(Model, functools.partial(forward, reentrant=reentrant))
    model, plain = make(), make()
    with pytest.raises(
        ModelUnsupported,
        match=r"encoder.layers.\d is called again in backward: it was called inside torch.utils.checkpoint.*directly",
    ):
        outsize.prepare(model, DATA[0], device=DEVICE)
    assert train(model, foreign_plans.reference(model)) == train(
        plain, foreign_plans.reference(plain)
    )  # prepare left it as it was


def test_checkpointing_that_is_turned_on_after_prepare_is_refused() -> None:
    model = zoo.make("llama")
    with cells.closing(foreign_plans.prepared(model, zoo.batch("llama"), "mixed")):
        model.gradient_checkpointing_enable()
        loss = model(**zoo.batch("llama")).loss
        with pytest.raises(
            EngineMisuse, match=r"model.layers.3 is called again in backward: .* Turn this checkpointing off"
        ):
            loss.backward()


def test_checkpointing_around_a_prepared_model_is_refused_if_it_is_not_reentrant() -> None:
    model = Encoder()
    with cells.closing(
        cells.prepare_by_hand(
            model, (DATA[0]["x"],), spec=foreign_plans.SPEC, device=DEVICE, strategy="keep", **STREAMED
        )
    ):
        out = checkpoint(model, DATA[0]["x"].clone().requires_grad_(), use_reentrant=False)
        with pytest.raises(
            EngineMisuse, match=r"The model is called again in backward: it was called inside torch.utils.checkpoint"
        ):
            out.sum().backward()


# Several forwards of a prepared model.


def test_a_second_training_forward_names_the_ways_out() -> None:
    model = Encoder()
    with cells.closing(outsize.prepare(model, (DATA[0]["x"],), device=DEVICE)) as engine:
        held = model(DATA[0]["x"])
        with pytest.raises(
            EngineMisuse,
            match=r"Training forward 2 begins before the backward of forward 1.*GradCache.*class Pair.*docs/loops.md",
        ):
            model(DATA[0]["y"])
        held.sum().backward()  # the first one is still good
        engine.optimizer.step()


def test_a_loss_of_two_forwards_names_the_ways_out() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) - model(batch["y"])).square().mean()

    with pytest.raises(
        ModelUnsupported,
        match=r"loss= calls the model a second time with grad.*concatenate.*GradCache.*class Pair.*docs/loops.md",
    ):
        outsize.prepare(Encoder(), DATA[0], loss=loss, device=DEVICE)


def with_penalty(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.square().mean() + 1e-3 * sum(param.square().sum() for param in model.parameters())


def with_weights_first(model: Any, batch: Any) -> Tensor:
    out: Tensor = model(batch["x"] * model.norm.weight)
    return out.square().mean()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (
            with_penalty,
            ModelUnsupported,
            r"norm\.bias: loss= reads this weight outside of the model's forward.*weight_decay",
        ),
        (with_weights_first, ModelUnsupported, r"norm\.weight: loss= reads this weight outside of the model's forward"),
        (lambda model, batch: model(batch["x"]), ConfigError, r"loss= returns a tensor of shape \(6, 16\)"),
        (lambda model, batch: float(model(batch["x"]).sum().detach()), ConfigError, "loss= returns float"),
        (
            lambda model, batch: batch["x"].clone().requires_grad_().sum(),
            ConfigError,
            "does not call the model with grad",
        ),
    ],
    ids=["penalty", "weights_first", "no_scalar", "float", "no_call"],
)
def test_a_loss_that_training_cannot_differentiate_is_refused(loss: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        outsize.prepare(Encoder(), DATA[0], loss=loss, device=DEVICE)


def test_a_loss_with_a_forward_without_grad() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = model(batch["x"])
        return (target - model(batch["y"])).square().mean()

    model, plain = Encoder(), Encoder()
    engine = outsize.prepare(model, DATA[0], loss=loss, device=DEVICE, optimizer=foreign_plans.SPEC, chunk_bytes="1KiB")
    with cells.closing(engine):
        for run, optimizer in ((model, engine.optimizer), (plain, foreign_plans.reference(plain))):
            loss(run, DATA[0]).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_outputs_of_an_earlier_engine_are_counted_beside_the_next_plan() -> None:
    """They were not, and the next engine ran out of memory under the budget that its plan asked for."""
    how: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device=DEVICE, chunk_bytes="1KiB")
    make = functools.partial(Model, plain_pass)

    def least() -> int:
        with pytest.raises(PlanInfeasible) as least:
            preview(make(), DATA[0], gpu_memory=1, **how)
        return least.value.needed_bytes

    alone, earlier = least(), Encoder()
    with cells.closing(outsize.prepare(earlier, (DATA[0]["x"],), **how)), torch.no_grad():
        held = [earlier(batch["x"]) for batch in DATA]
    needed = least()
    assert needed == alone + sum(out.nbytes for out in held)
    model = make()
    assert_trains_alike(model, outsize.prepare(model, DATA[0], gpu_memory=needed, **how), make())


class CallsItself(nn.Module):
    def __init__(self, with_grad: bool) -> None:
        super().__init__()
        self.encoder, self.with_grad = Encoder(), with_grad

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if y is None:
            return self.encoder(x)
        with torch.set_grad_enabled(self.with_grad):
            target = self(x)
        return {"loss": (target - self.encoder(y)).square().mean()}


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_model_that_calls_itself(with_grad: bool) -> None:
    assert_every_strategy_trains(functools.partial(CallsItself, with_grad))
    assert_tight_and_roomy_train(functools.partial(CallsItself, with_grad))


# The code of docs/loops.md, with a prepared model and with a plain one.

CODE = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "loops.md").read_text(), re.DOTALL)


def run_code(code: str, prepare: Callable[..., Any]) -> dict[str, Tensor]:
    model = Encoder()
    names = {
        "torch": torch,
        "outsize": SimpleNamespace(prepare=prepare),
        "model": model,
        "data": DATA,
        "settings": foreign_plans.SPEC,
        "device": DEVICE,
        "contrastive": lambda a, b: (a - b).square().mean(),
    }
    exec(code, names)
    names["engine"].detach()
    return dict(model.state_dict())


def plain_engine(model: nn.Module, *_: Any, **__: Any) -> Any:
    return SimpleNamespace(optimizer=foreign_plans.reference(model), detach=lambda: None)


@pytest.mark.parametrize("number", [0, 1, 2], ids=["concatenated", "gradcache", "module"])
def test_the_code_of_the_page_on_loops(number: int) -> None:
    expected, found = (
        run_code(CODE[number], plain_engine),
        run_code(CODE[number], functools.partial(outsize.prepare, chunk_bytes="1KiB")),
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if number == 0:  # equal to separate forwards up to rounding
        return
    plain = Encoder()
    optimizer = foreign_plans.reference(plain)
    for batch in DATA:
        pair(plain, **batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)


# Weights that some calls of a layer read.


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + torch.tanh(self.experts[expert](x))


class Looped(nn.Module):
    """`route`: which expert the layers use in each loop. `profiled_with` makes a trace of its own for each route."""

    def __init__(self, profiled_with: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.profiled_with = profiled_with
        self.stem, self.layers, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList(Experts() for _ in range(3)),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = self.stem(x)
        for expert in route.tolist():
            for layer in self.layers:
                x = layer(x, expert)
        return self.head(x).square().mean()


def train_by_routes(model: nn.Module, optimizer: Any, routes: list[list[int]], engine: Any = None) -> list[float]:
    losses = []
    for step in range(0, len(routes), 2):
        for i, route in enumerate(routes[step : step + 2]):
            with engine.last_backward() if engine is not None and i else contextlib.nullcontext():
                loss = model(DATA[0]["x"], torch.tensor(route)) / 2
                loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
@pytest.mark.parametrize(
    "profiled_with", [(0, 0, 1), (0, 1, 0), pytest.param((0, 0, 0), marks=pytest.mark.full)], ids=str
)
def test_experts_of_a_loop_are_used_in_other_loops_than_in_the_profiling_run(
    profiled_with: tuple[int, ...], update: str
) -> None:
    routes = [[0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]
    spec = dataclasses.replace(foreign_plans.SPEC, update=update)
    plain = Looped(profiled_with)
    expected = train_by_routes(plain, foreign_plans.reference(plain), routes)
    batch = (DATA[0]["x"], torch.tensor(profiled_with))
    how: dict[str, Any] = dict(optimizer=spec, device=DEVICE, chunk_bytes="1KiB", accumulate=2)
    with pytest.raises(PlanInfeasible) as least:
        preview(Looped(profiled_with), batch, gpu_memory=1, **how)
    for gpu_memory in (least.value.needed_bytes, None):
        model = Looped(profiled_with)
        with cells.closing(outsize.prepare(model, batch, gpu_memory=gpu_memory, **how)) as engine:
            assert (
                train_by_routes(model, engine.optimizer, routes, engine if update == "in_backward" else None)
                == expected
            )
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class SharesParts(nn.Module):
    """Layers that share a module with parts for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        for layer in self.layers:
            layer.experts = parts

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        for layer, part in zip(self.layers, route.tolist(), strict=True):
            x = layer(x, part)
        return x.square().mean()


def test_a_part_that_another_layer_uses_than_in_the_profiling_run_names_the_way_out() -> None:
    model = SharesParts()
    with cells.closing(outsize.prepare(model, (DATA[0]["x"], torch.tensor([0, 0, 1])), device=DEVICE)):
        loss = model(DATA[0]["x"], torch.tensor([0, 1, 0]))
        with pytest.raises(
            OrderMismatch,
            match=r"layers.0.experts.1.\w+ complete in the backward of layers.2, but it came in that of layers.1: .*blocks=\[\]",
        ):
            loss.backward()


# A loop that calls the model otherwise than loss= does.


class Widens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor, bias: Tensor | None = None, widen: bool = False) -> Tensor:
        x = x if bias is None else x + bias
        return self.encoder(torch.cat([x] * 3))[: len(x)] if widen else self.encoder(x)


def loss_of_x(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.mark.parametrize("more", [{"widen": True}, {"bias": DATA[1]["x"]}], ids=["flag", "input"])
def test_a_loop_that_calls_the_model_otherwise_than_its_loss_is_planned_for(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module, optimizer: Any) -> None:
        for batch in DATA:
            (model(batch["x"], **more) - batch["y"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    how: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device=DEVICE, chunk_bytes="1KiB", loss=loss_of_x)
    with pytest.raises(PlanInfeasible) as least:
        preview(Widens(), DATA[0], gpu_memory=1, **how)
    model = Widens()
    engine = outsize.prepare(model, DATA[0], gpu_memory=least.value.needed_bytes, **how)
    with cells.closing(engine), pytest.raises(PlanInfeasible) as larger:  # and not out of memory in the forward
        step(model, engine.optimizer)
    plain = Widens()
    step(plain, foreign_plans.reference(plain))
    for gpu_memory in (larger.value.needed_bytes, None):
        model = Widens()
        with cells.closing(outsize.prepare(model, DATA[0], gpu_memory=gpu_memory, **how)) as engine:
            step(model, engine.optimizer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert "the loop calls the model with other arguments than loss= does" in caplog.text


class Deepening(nn.Module):
    """Runs as many layers as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor, y: Tensor, depth: int) -> dict[str, Tensor]:
        x = self.encoder.stem(x)
        for layer in self.encoder.layers[:depth]:
            x = layer(x)
        return {"loss": (self.encoder.norm(x) - y).square().mean()}


def test_a_layer_that_the_profiling_run_did_not_run_is_refused_unless_everything_is_resident() -> None:
    how: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device=DEVICE, chunk_bytes="1KiB")
    with pytest.raises(PlanInfeasible) as least:
        preview(Deepening(), {**DATA[0], "depth": 2}, gpu_memory=1, **how)
    model = Deepening()
    engine = outsize.prepare(model, {**DATA[0], "depth": 2}, gpu_memory=least.value.needed_bytes, **how)
    with cells.closing(engine), pytest.raises(OrderMismatch, match=r"encoder\.layers\.2 runs, but .* runs all layers"):
        model(**DATA[1], depth=4)
