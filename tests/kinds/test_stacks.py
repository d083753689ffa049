"""Layers wherever a model holds and however it calls them: in nn.Sequential, in stages, in lists of lists, by
`.forward`; values that they leave on `self`.

Each trains as a plain loop does, at the least memory of the device `sim` and with plenty, or is refused by name.
"""

import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import foreign_plans
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import outsize
from outsize.base.errors import ModelUnsupported, PlanInfeasible
from outsize.device.choose import choose_device
from outsize.device.sim import SimDevice
from outsize.model.discover import find_layers

WIDTH = 8
DATA = [{"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(3)]
ROOMY = "16MiB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks(count: int) -> list[Block]:
    return [Block() for _ in range(count)]


class Model(nn.Module):
    """A body, whatever it is, and a head."""

    def __init__(self, body: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = body, head or nn.Linear(WIDTH, 1)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.body if isinstance(self.body, nn.ModuleList) else (self.body,):
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.features(x)).square().mean()}


class Root(nn.Sequential):
    """A model that is a Sequential itself."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x).square().mean()}


class Stage(nn.Module):
    def __init__(self, count: int, container: type[nn.Module] = nn.Sequential) -> None:
        super().__init__()
        self.downsample = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.Sequential(*blocks(count)) if container is nn.Sequential else nn.ModuleList(blocks(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    """Most of its weights are in a list of modules of one class, which do not feed one another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(blocks(3))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        return x + sum(expert(x * 0.5) * gates[:, i : i + 1] for i, expert in enumerate(self.experts))


class Pairs(Model):
    """Lists in a list, or dicts in a list, which nobody calls."""

    def features(self, x: Tensor) -> Tensor:
        for pair in self.body:  # type: ignore[attr-defined]
            first, second = pair.values() if isinstance(pair, nn.ModuleDict) else pair
            x = x + second(first(x))
        return x


class Beside(nn.Module):
    """A Sequential over the layers of a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(3))
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *self.layers, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


def chain() -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))])


STACKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "sequential": (lambda: Model(nn.Sequential(*blocks(4))), [f"body.{i}" for i in range(4)]),
    "small-head": (
        lambda: Model(
            nn.Sequential(*blocks(4)), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        ),
        [f"body.{i}" for i in range(4)],
    ),
    "root": (
        lambda: Root(nn.Linear(WIDTH, WIDTH), *blocks(3), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
        ["1", "2", "3"],
    ),
    "named": (
        lambda: Model(nn.Sequential(OrderedDict((f"layer_{i}", Block()) for i in range(3)))),
        [f"body.layer_{i}" for i in range(3)],
    ),
    "nested": (
        lambda: Model(nn.Sequential(*(nn.Sequential(*blocks(n)) for n in (1, 3)))),
        ["body.0.0", "body.1.0", "body.1.1", "body.1.2"],
    ),
    "stages": (
        lambda: Model(nn.Sequential(Stage(1), Stage(3))),
        ["body.0.blocks.0", "body.1.blocks.0", "body.1.blocks.1", "body.1.blocks.2"],
    ),
    "list-of-stages": (
        lambda: Model(nn.ModuleList([Stage(1, nn.ModuleList), Stage(3, nn.ModuleList)])),
        ["body.0.blocks.0", "body.1.blocks.0", "body.1.blocks.1", "body.1.blocks.2"],
    ),
    "experts": (lambda: Model(nn.ModuleList([Experts(), Experts()])), ["body.0", "body.1"]),
    "experts-in-sequential": (lambda: Model(nn.Sequential(Experts(), Experts())), ["body.0", "body.1"]),
    "chain": (lambda: Model(chain()), ["body.0", "body.3", "body.6", "body.9"]),
    "list-of-lists": (
        lambda: Pairs(nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(2))),
        ["body.0.0", "body.0.1", "body.1.0", "body.1.1"],
    ),
    "list-of-dicts": (
        lambda: Pairs(nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2))),
        ["body.0.a", "body.0.b", "body.1.a", "body.1.b"],
    ),
    "beside-a-list": (Beside, ["layers.0", "layers.1", "layers.2"]),
}
EVERY_RUN = ["sequential", "nested", "list-of-stages", "experts", "chain", "list-of-dicts"]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def train(model: nn.Module, optimizer: Any, data: list[Any]) -> list[float]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    losses = []
    for batch in data:
        out = model(**batch)
        loss = out["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def prepared(model: nn.Module, batch: Any, gpu_memory: str | int) -> Any:
    device = SimDevice(choose_device("sim:64MiB").spec)
    return outsize.prepare(
        model, batch, optimizer=foreign_plans.SPEC, device=device, gpu_memory=gpu_memory, chunk_bytes="1KiB"
    )


def layers_of(engine: Any) -> list[str]:
    return [block.name for block in engine.runtime.planned.graph.blocks if block.kind == "layer"]


def trains_as_plain(
    build: Callable[[], nn.Module], data: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """At the least memory and with plenty. Returns the layers."""
    monkeypatch.setenv("OUTSIZE_CACHE", str(folder))  # one trace for all three
    plain = made(build)
    expected = train(plain, foreign_plans.reference(plain), data)
    with pytest.raises(PlanInfeasible) as no:
        prepared(made(build), data[0], 1)
    layers = []
    for memory in (no.value.needed_bytes, ROOMY):
        model = made(build)
        with cells.closing(prepared(model, data[0], memory)) as engine:
            assert any(home.weights == "host" for home in engine.plan.decision.homes) == (memory != ROOMY)
            assert train(model, engine.optimizer, data) == expected
            layers = layers_of(engine)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    return layers


@pytest.mark.parametrize(
    "kind", [kind if kind in EVERY_RUN else pytest.param(kind, marks=pytest.mark.full) for kind in STACKS]
)
def test_stacks_are_found_and_streamed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, layers = STACKS[kind]
    assert trains_as_plain(build, DATA, tmp_path, monkeypatch) == layers


# --- the tree alone


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in find_layers(model)]


def test_small_sequentials_are_no_stacks() -> None:
    body = nn.ModuleList(blocks(4))
    for small in (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)),
        nn.Sequential(Block(), nn.Linear(WIDTH, 1)),
    ):
        assert names(Model(body, small)) == [f"body.{i}" for i in range(4)]
    assert names(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))) == []


def test_layers_of_equal_size_are_no_stages() -> None:
    """The lists in a layer belong to it: T5's sub-layers, experts."""
    assert names(Model(nn.ModuleList(Experts() for _ in range(5)))) == [f"body.{i}" for i in range(5)]
    config = transformers.T5Config(vocab_size=9, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    assert names(transformers.T5ForConditionalGeneration(config)) == ["encoder.block.0", "decoder.block.0"]


def test_a_list_with_weights_of_its_own_is_no_stack() -> None:
    """The parametrizations of a weight are in a ModuleList that has the weight itself."""
    model = Model(nn.ModuleList(blocks(2)), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 1)))
    assert names(model) == ["body.0", "body.1"]


def test_a_module_under_two_names_is_found_once() -> None:
    model = Model(nn.ModuleList(blocks(2)))
    model.alias = model.body
    assert names(model) == ["body.0", "body.1"]
    shared = Block()
    assert names(Model(nn.Sequential(Block(), shared, Block(), shared))) == ["body.0", "body.1", "body.2"]


def test_an_infeasible_plan_names_a_block_with_most_of_the_weights() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    with pytest.raises(
        PlanInfeasible,
        match=r"stem is one block with .* of the model's .* name that list \(blocks=\['path.to.list'\]\)",
    ):
        prepared(Model(Tower()), DATA[0], 1)
    with pytest.raises(PlanInfeasible) as no:
        prepared(Model(nn.Sequential(*blocks(4))), DATA[0], 1)
    assert "blocks=" not in str(no.value)


# --- values that layers leave on self


class Auxiliary(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = self.up(x).square().mean() + out.abs().mean()
        return out


class Appending(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(self.down(torch.tanh(self.up(x))).square().mean())
        return super().forward(x)


class Pairing(Block):
    """Leaves a tuple, and a number."""

    def forward(self, x: Tensor) -> Tensor:
        self.pair, self.rows = (self.up(x).square().mean(), x.detach()), len(x)
        return super().forward(x)


class Summing(Model):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__(nn.ModuleList(block() for _ in range(5)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.body:  # type: ignore[attr-defined]
            if hasattr(layer, "losses"):
                layer.losses.clear()
        loss = super().forward(x)["loss"]
        for layer in self.body:  # type: ignore[attr-defined]
            kind = type(layer)
            loss = loss + (
                layer.aux
                if kind is Auxiliary
                else sum(layer.losses)
                if kind is Appending
                else layer.pair[0] / layer.rows
            )
        return {"loss": loss}


class AddingUp(Model):
    """Adds each layer's value as it comes."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Auxiliary() for _ in range(5)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(())
        for layer in self.body:  # type: ignore[attr-defined]
            x = layer(x)
            total = total + layer.aux
        return {"loss": self.head(x).square().mean() + total}


@pytest.mark.parametrize(
    "kind",
    ["on-self", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("in-a-list", "in-a-tuple", "added-up"))],
)
def test_values_left_on_self_train_as_in_plain_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {"on-self": Auxiliary, "in-a-list": Appending, "in-a-tuple": Pairing}.get(kind)
    build = AddingUp if block is None else lambda: Summing(block)
    assert len(trains_as_plain(build, DATA, tmp_path, monkeypatch)) == 5


class Recording(Block):
    """Leaves a value in a list that it is given."""

    def forward(self, x: Tensor, record: list[Tensor]) -> Tensor:
        out = super().forward(x)
        record.append(self.up(out).square().mean())
        return out


class Recorded(Model):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Recording() for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        record: list[Tensor] = []
        for layer in self.body:  # type: ignore[attr-defined]
            x = layer(x, record)
        return {"loss": self.head(x).square().mean() + sum(record)}


class Hooked(Model):
    """Takes values out of layers with hooks, as transformers does with the logits of routers."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(blocks(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        taken: list[Tensor] = []
        hooks = [
            layer.up.register_forward_hook(lambda module, args, output: taken.append(output)) for layer in self.body
        ]  # type: ignore[attr-defined]
        x = self.features(x)
        for hook in hooks:
            hook.remove()
        return {"loss": self.head(x).square().mean() + sum(value.square().mean() for value in taken)}


@pytest.mark.parametrize(
    ("build", "strategy"),
    [  # two of the strategies by turns
        pytest.param(
            build, strategy, marks=[pytest.mark.full] if (i + j // 2) % 2 else [], id=f"{build.__name__}-{strategy}"
        )
        for i, build in enumerate((Recorded, AddingUp, Hooked))
        for j, strategy in enumerate(("keep", "recompute", "swap", "offload"))
    ],
)
def test_values_around_outputs_have_their_gradient_under_every_strategy(build: type[Model], strategy: str) -> None:
    plain, model = made(build), made(build)
    expected = train(plain, foreign_plans.reference(plain), DATA)
    how: dict[str, Any] = dict(weights="host", optimizer="host", depth=0, strategy=strategy, chunk_bytes=256)
    with cells.closing(
        cells.prepare_by_hand(model, DATA[0], spec=foreign_plans.SPEC, device="sim:16MiB", **how)
    ) as engine:
        if build is AddingUp:
            assert set(engine.plan.decision.strategies) <= {"keep", "swap"}, "a second run would add its value again"
        else:
            assert strategy in engine.plan.decision.strategies
        assert train(model, engine.optimizer, DATA) == expected
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Remembering(Model):
    """Keeps its loss on itself, and with it the graph."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(blocks(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.last = super().forward(x)["loss"]
        return {"loss": self.last * 1.0}


@pytest.mark.parametrize("ends", ["detached", "dropped"])
@pytest.mark.parametrize("build", [AddingUp, Remembering])
def test_a_model_that_keeps_values_with_a_graph_is_freed_with_its_engine(build: type[Model], ends: str) -> None:
    device = SimDevice(choose_device("sim:16MiB").spec)
    model = made(build)
    engine = cells.prepare_by_hand(model, DATA[0], spec=foreign_plans.SPEC, device=device, **foreign_plans.STREAMED)
    train(model, engine.optimizer, DATA)
    if ends == "detached":
        engine.detach()
    freed = weakref.ref(model)
    del model, engine
    gc.collect()
    assert freed() is None and device.observer.live_bytes == 0 and not device.budgets


def test_prepare_leaves_no_values_behind() -> None:
    for block in (Auxiliary, Appending, Pairing):
        model = Summing(block)
        before = [set(vars(layer)) for layer in model.body]  # type: ignore[attr-defined]
        prepared(model, DATA[0], ROOMY).detach()
        assert [set(vars(layer)) for layer in model.body] == before  # type: ignore[attr-defined]
        assert not any(getattr(layer, "losses", []) for layer in model.body)  # type: ignore[attr-defined]


# --- how layers are called


class Direct(Model):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.body:  # type: ignore[attr-defined]
            x = layer.forward(x)
        return x


class Recursive(Model):
    def forward(self, x: Tensor, again: bool = True) -> dict[str, Tensor]:
        if again:
            return {"loss": self(x, again=False)["loss"] + self(0.5 * x, again=False)["loss"]}
        return super().forward(x)


class Repeating(Block):
    """Calls itself, hooks included."""

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self(super().forward(x), again=False) if again else super().forward(x)


class Chained(Block):
    """Calls the next layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.following[0](x) if self.following else x


def chained() -> nn.Module:
    layers = [Chained() for _ in range(4)]
    for i, layer in enumerate(layers):
        layer.following = layers[i + 1 : i + 2]
    return First(nn.ModuleList(layers))


class First(Model):
    def features(self, x: Tensor) -> Tensor:
        return self.body[0](x)  # type: ignore[index, no-any-return]


def test_layers_that_call_themselves_train_as_in_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trains_as_plain(
        lambda: Model(nn.ModuleList(Repeating() for _ in range(3))), DATA, tmp_path, monkeypatch
    ) == [f"body.{i}" for i in range(3)]


@pytest.mark.parametrize("device", ["cpu", "sim:16MiB"])
def test_a_layer_that_calls_the_next_one_trains_in_one_block(device: str) -> None:
    plain, model = made(chained), made(chained)
    expected = train(plain, foreign_plans.reference(plain), DATA)
    engine = outsize.prepare(model, DATA[0], optimizer=foreign_plans.SPEC, device=device, blocks=[])
    with cells.closing(engine):
        assert train(model, engine.optimizer, DATA) == expected


class Skipping(Block):
    """Returns its input at random."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < self.chance else super().forward(x)


@pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "swap"])
def test_layers_may_return_their_input_at_random_after_prepare(strategy: str) -> None:
    plain, model = (made(lambda: Model(nn.ModuleList(Skipping() for _ in range(6)))) for _ in range(2))
    data = [{"x": torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(i))} for i in range(6)]
    how: dict[str, Any] = dict(foreign_plans.STREAMED, strategy=strategy, chunk_bytes=256)
    engine = cells.prepare_by_hand(model, data[0], spec=foreign_plans.SPEC, device="sim:16MiB", budget=None, **how)
    for layer in [*plain.body, *model.body]:  # type: ignore[misc]
        layer.chance = 0.5
    expected = train(plain, foreign_plans.reference(plain), data)
    with cells.closing(engine):
        assert train(model, engine.optimizer, data) == expected
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_return_their_input_at_random_in_prepare_are_refused(seed: int) -> None:
    model = made(lambda: Model(nn.ModuleList(Skipping(0.5) for _ in range(6))))
    torch.manual_seed(seed)
    with pytest.raises(
        ModelUnsupported, match=r"A gradient reaches body\.\d in one pass.*Turn off what skips it at random"
    ):
        prepared(model, DATA[0], ROOMY)


def test_layers_called_by_forward_train_as_in_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trains_as_plain(lambda: Direct(nn.ModuleList(blocks(4))), DATA, tmp_path, monkeypatch) == [
        f"body.{i}" for i in range(4)
    ]


@pytest.mark.parametrize("plan", ["streamed", "resident"])
def test_a_root_that_calls_itself_trains_as_in_plain_torch(plan: str) -> None:
    plain, model = (made(lambda: Recursive(nn.ModuleList(blocks(3)))) for _ in range(2))
    expected = train(plain, foreign_plans.reference(plain), DATA)
    with cells.closing(
        cells.prepare_by_hand(model, DATA[0], spec=foreign_plans.SPEC, device="sim:16MiB", **foreign_plans.PLANS[plan])
    ) as engine:
        assert train(model, engine.optimizer, DATA) == expected
        with torch.no_grad():
            assert model(**DATA[0])["loss"] == plain(**DATA[0])["loss"]
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Mapped(Model):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.body:  # type: ignore[attr-defined]
            x = torch.vmap(layer)(x)
        return x


class Scaled(Model):
    """Computes with a layer's weights before it calls the layer."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.body:  # type: ignore[attr-defined]
            x = torch.func.functional_call(layer, {name: 0.5 * param for name, param in layer.named_parameters()}, (x,))
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Mapped(nn.ModuleList(blocks(3))), r"body\.0 is called inside a transform of torch\.func"),
        (
            lambda: Scaled(nn.ModuleList(blocks(3))),
            r"body\.\d\.norm\.weight: its gradient is complete in the backward of body\.\d",
        ),
        (
            lambda: Model(nn.ModuleList(torch.jit.script(block) for block in blocks(3))),
            r"body\.0 is a scripted or traced module",
        ),
        (chained, r"body\.1 is called in the forward of body\.0, .*blocks=\[\]"),
    ],
    ids=["vmap", "functional_call", "script", "next"],
)
def test_what_cannot_be_followed_is_refused_by_name(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ModelUnsupported, match=words):
        prepared(model(), DATA[0], ROOMY)


# --- models of transformers


SPEECH: dict[str, Any] = dict(
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    conv_dim=(8, 8),
    conv_stride=(5, 4),
    conv_kernel=(10, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    vocab_size=12,
    classifier_proj_size=8,
    mask_time_length=2,
)


@pytest.mark.parametrize(
    "kind", ["WavLM", pytest.param("Wav2Vec2", marks=pytest.mark.full), pytest.param("Hubert", marks=pytest.mark.full)]
)
def test_speech_models_train_as_in_plain_torch(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of a convolution is parametrized, WavLM's layers are called with `index=`, and masks and dropped
    layers are drawn with numpy.
    """
    config, model = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForSequenceClassification")
    inputs = [torch.randn(2, 400, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    data = [{"input_values": x, "labels": torch.tensor([0, 1])} for x in inputs]
    name = kind.lower()
    layers = [f"{name}.feature_extractor.conv_layers.{i}" for i in range(2)] + [
        f"{name}.encoder.layers.{i}" for i in range(3)
    ]
    assert trains_as_plain(lambda: model(config(**SPEECH)), data, tmp_path, monkeypatch) == layers


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=16, patch_size=1, embed_dim=8, depths=[2, 3], num_heads=[2, 2], window_size=4, num_labels=2
    )
    return transformers.SwinForImageClassification(config)


def convnext() -> nn.Module:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 3], num_labels=2)
    )


@pytest.mark.parametrize(
    ("build", "path"),
    [
        pytest.param(swin, "swin.encoder.layers.{}.blocks.{}", marks=pytest.mark.full),
        (convnext, "convnext.encoder.stages.{}.layers.{}"),
    ],
)
def test_the_blocks_of_stages_are_layers(
    build: Callable[[], nn.Module], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths = (2, 3) if build is swin else (1, 3)
    images = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    data = [{"pixel_values": image, "labels": torch.tensor([0, 1])} for image in images]
    assert trains_as_plain(build, data, tmp_path, monkeypatch) == [
        path.format(s, i) for s, depth in enumerate(depths) for i in range(depth)
    ]


# --- Sequentials that are no stacks


class Net(nn.Module):
    """An MLP in a Sequential, used in a way that cannot be cut into blocks."""

    def __init__(self, use: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        self.use, self.loops = use, 4

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.use(self, x).square().mean()}


def with_derivative(model: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = model.net(x)
    return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def weights_first(model: Net, x: Tensor) -> Tensor:
    return sum(layer.weight.square().sum() for layer in model.net if isinstance(layer, nn.Linear)) + model.net(x)


def mapped(model: Net, x: Tensor) -> Tensor:
    return torch.vmap(model.net)(x)


def checkpointed(model: Net, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(model.net, x, use_reentrant=False)


def repeated(model: Net, x: Tensor) -> Tensor:
    for _ in range(model.loops):
        x = model.net(x)
    model.loops = {4: 6, 6: 2}.get(model.loops, 4)
    return x


@pytest.mark.parametrize(
    "use", [with_derivative, weights_first, mapped, checkpointed, repeated], ids=lambda f: f.__name__
)
def test_a_sequential_that_cannot_be_run_in_parts_stays_one_block(use: Any) -> None:
    data = [{"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(i))} for i in range(3)]
    plain, model = Net(use), Net(use)
    expected = train(plain, foreign_plans.reference(plain), data)
    with cells.closing(prepared(model, data[0], ROOMY)) as engine:
        assert not any(block.kind == "layer" for block in engine.graph.blocks)
        assert train(model, engine.optimizer, data) == expected
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_no_list_is_a_stack_if_the_user_says_so() -> None:
    engine = outsize.prepare(Model(nn.ModuleList(blocks(3))), DATA[0], device="sim:16MiB", blocks=[])
    assert [block.kind for block in engine.graph.blocks] == ["stem"]
    engine.detach()


def test_gradients_inside_the_forward_of_a_model_with_a_list_are_refused() -> None:
    class Penalized(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = x.detach().requires_grad_()
            return {"loss": torch.autograd.grad(self.features(x).sum(), x, create_graph=True)[0].square().mean()}

    with pytest.raises(
        ModelUnsupported, match=r"The model's forward computes gradients itself .* outsize\.prepare\(blocks=\[\]\)"
    ):
        outsize.prepare(Penalized(nn.ModuleList(blocks(3))), DATA[0], device="sim:16MiB")
