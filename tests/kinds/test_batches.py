"""Batches and models as other libraries hand them over: mappings that are no dicts, containers that a forward writes
into, outputs in objects, checkpointing that a model does itself."""

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cells
import foreign_plans
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

import outsize
from outsize.base.errors import EngineMisuse, PlanInfeasible
from outsize.setup.prepare import preview


def test_a_batch_encoding_is_a_batch() -> None:
    model, plain = zoo.make("llama"), zoo.make("llama")
    batch = BatchEncoding(zoo.batch("llama"))
    engine = outsize.prepare(model, batch, optimizer=foreign_plans.SPEC, device="cpu", max_shape=(3, 20))
    assert engine.plan.inputs["input_ids"] == (3, 20)
    reference = foreign_plans.reference(plain)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        run(**batch).loss.backward()
        optimizer.step()
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Wrapped(nn.Module):
    """A transformers model inside a wrapper, with its own checkpointing on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.make("llama")
        self.inner.gradient_checkpointing_enable()

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        return {"loss": self.inner(**batch).loss}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.proj(x))


class Timm(nn.Module):
    """As timm's models: a flag, and a call of torch's checkpoint for every block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.grad_checkpointing = True

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.grad_checkpointing else block(x)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize(
    ("make", "batch", "where"),
    [(Wrapped, zoo.batch("llama"), " in inner.model"), (Timm, {"x": torch.ones(2, 8)}, "")],
    ids=["wrapped", "timm"],
)
def test_checkpointing_of_the_models_own_is_turned_off_with_a_note(
    make: Any, batch: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = make(), make()
    with caplog.at_level(logging.WARNING, logger="outsize"):
        engine = outsize.prepare(model, batch, optimizer=foreign_plans.SPEC, device="cpu")
    assert f"gradient checkpointing is turned off{where}:" in caplog.text
    reference = foreign_plans.reference(plain)
    losses = []
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        loss = run(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1]
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# What a forward writes into its arguments, and objects that it returns its outputs in.


@dataclasses.dataclass
class Record:
    x: Tensor
    scale: float = 1.0
    hidden: Any = None


class Base:
    pass


class Outputs(Base):
    """As torch.distributions': a class with bases, and attributes that no field declares."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


class Slots:
    __slots__ = ("hidden", "out")

    def __init__(self, out: Tensor, hidden: Any):
        self.out, self.hidden = out, hidden


class Writes(nn.Module):
    """`how` runs the layers of the model and returns what its forward returns."""

    def __init__(self, how: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.stem, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 8)

    def layers(self, x: Tensor) -> list[Tensor]:
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self, *args, **kwargs)


def into_a_list(model: Writes, x: Tensor, out: list[Tensor]) -> Tensor:
    x = model.stem(x)
    for block in model.blocks:
        x = block(x)
        out.append(x)
    return model.head(x)


def into_an_empty_dict(model: Writes, x: Tensor, aux: dict[str, Any]) -> Tensor:
    states = model.layers(x)
    aux["loss"], aux["states"] = states[2].square().mean(), states
    aux.setdefault("calls", []).append(len(states))
    return model.head(states[-1])


def into_its_inputs(model: Writes, features: dict[str, Any]) -> dict[str, Any]:
    """As the modules of sentence-transformers."""
    states = model.layers(features["x"])
    features["out"] = model.head(states[-1])
    features["extra"]["states"] = states[1:3]
    del features["unused"]
    return features


def into_a_dataclass(model: Writes, record: Record) -> Tensor:
    states = model.layers(record.x * record.scale)
    record.hidden, record.scale = states[2], 0.5
    record.new = states[3]  # type: ignore[attr-defined]
    return model.head(states[-1])


def into_a_namespace(model: Writes, record: SimpleNamespace) -> Tensor:
    states = model.layers(record.inputs[0])
    record.hidden = states[2]
    record.inputs.append(states[1])
    return model.head(states[-1])


def returned_in_a_namespace(model: Writes, x: Tensor) -> SimpleNamespace:
    states = model.layers(x)
    return SimpleNamespace(hidden=tuple(states), out=model.head(states[-1]), more=SimpleNamespace(states=states[1:2]))


def returned_in_an_object(model: Writes, x: Tensor) -> Outputs:
    states = model.layers(x)
    return Outputs(hidden=Outputs(states=states), out=model.head(states[-1]))


def returned_in_slots(model: Writes, x: Tensor) -> Slots:
    states = model.layers(x)
    return Slots(model.head(states[-1]), Outputs(states=states))


def plain_list(model: nn.Module, x: Tensor) -> Tensor:
    states: list[Tensor] = []
    return model(x, states).square().mean() + sum(state.square().mean() for state in states)


def plain_dict(model: nn.Module, x: Tensor) -> Tensor:
    aux: dict[str, Any] = {}
    loss = model(x, aux=aux).square().mean() + aux["loss"] + aux["states"][1].mean()
    assert aux["calls"] == [5]
    return loss


def features(model: nn.Module, x: Tensor) -> Tensor:
    given = {"x": x, "unused": x, "extra": {"y": x}}
    returned = model(given)
    assert given["x"] is x and "unused" not in given and returned.keys() == given.keys()
    return given["out"].square().mean() + given["extra"]["states"][1].square().mean()


def dataclass(model: nn.Module, x: Tensor) -> Tensor:
    record = Record(x)
    loss = model(record).square().mean() + record.hidden.square().mean() + record.new.mean()  # type: ignore[attr-defined]
    assert record.x is x and record.scale == 0.5
    return loss


def namespace(model: nn.Module, x: Tensor) -> Tensor:
    record = SimpleNamespace(inputs=[x])
    loss = model(record).square().mean() + record.hidden.square().mean() + record.inputs[1].mean()
    assert record.inputs[0] is x and len(record.inputs) == 2
    return loss


def from_a_namespace(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    return outputs.out.square().mean() + outputs.hidden[2].square().mean() + outputs.more.states[0].mean()


def from_an_object(model: nn.Module, x: Tensor) -> Tensor:
    outputs = model(x)
    return outputs.out.square().mean() + outputs.hidden.states[2].square().mean()


WRITES = [
    (into_a_list, plain_list),
    (into_an_empty_dict, plain_dict),
    (into_its_inputs, features),
    (into_a_dataclass, dataclass),
    (into_a_namespace, namespace),
    (returned_in_a_namespace, from_a_namespace),
    (returned_in_an_object, from_an_object),
    (returned_in_slots, from_an_object),
]
INPUTS = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def steps(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> list[float]:
    losses = []
    for x in INPUTS:
        made = loss(model, x)
        made.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [made.item(), loss(model, x).item()]
    return losses


@pytest.mark.parametrize(("how", "loss"), WRITES, ids=lambda f: f.__name__)
def test_what_a_forward_writes_into_its_arguments_or_returns_in_an_object(how: Any, loss: Any) -> None:
    plain = Writes(how)
    expected = steps(plain, foreign_plans.reference(plain), loss)
    options: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device="sim:16MiB", chunk_bytes="1KiB", loss=loss)
    with pytest.raises(PlanInfeasible) as least:
        preview(Writes(how), INPUTS[0], gpu_memory=1, **options)
    for gpu_memory, device in ((least.value.needed_bytes, "sim:16MiB"), (None, "sim:16MiB"), (None, "cpu")):
        model = Writes(how)
        engine = outsize.prepare(model, INPUTS[0], gpu_memory=gpu_memory, **{**options, "device": device})
        with cells.closing(engine):
            assert steps(model, engine.optimizer, loss) == expected
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_prepare_does_not_write_into_the_batch() -> None:
    aux: dict[str, Any] = {}
    with cells.closing(
        outsize.prepare(Writes(into_an_empty_dict), {"x": INPUTS[0], "aux": aux}, device="sim:16MiB")
    ) as engine:
        assert not aux
        engine.model(INPUTS[0], aux).sum().backward()
        assert aux["calls"] == [5]


class Handed(nn.Module):
    """A layer that hands the hidden state on in an object, which it writes into or makes anew."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj = how, nn.Linear(8, 8)

    def forward(self, state: Any) -> Any:
        x = state.x + torch.tanh(self.proj(state.x))
        aux = state.aux + x.square().mean()
        if self.how == "anew":
            return type(state)(x=x, aux=aux)
        state.x, state.aux = x, aux
        return state if self.how == "returned" else None


@dataclasses.dataclass
class State:
    x: Tensor
    aux: Any


class HandsOn(nn.Module):
    def __init__(self, kind: type, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.kind_name = kind, kind.__name__
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList(Handed(how) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        state = self.kind(x=self.stem(x), aux=0.0)
        for block in self.blocks:
            state = block(state) or state
        loss: Tensor = state.x.square().mean() + state.aux
        return loss


@pytest.mark.parametrize("how", ["anew", "returned", "written"])
@pytest.mark.parametrize("kind", [State, SimpleNamespace, Outputs], ids=lambda kind: kind.__name__)
def test_layers_hand_the_hidden_state_on_in_an_object(kind: type, how: str) -> None:
    plain = HandsOn(kind, how)
    expected = steps(plain, foreign_plans.reference(plain), lambda model, x: model(x))
    options: dict[str, Any] = dict(optimizer=foreign_plans.SPEC, device="sim:16MiB", chunk_bytes="1KiB")
    with pytest.raises(PlanInfeasible) as least:
        preview(HandsOn(kind, how), INPUTS[0], gpu_memory=1, **options)
    for gpu_memory in (least.value.needed_bytes, None):
        model = HandsOn(kind, how)
        with cells.closing(outsize.prepare(model, INPUTS[0], gpu_memory=gpu_memory, **options)) as engine:
            assert steps(model, engine.optimizer, lambda model, x: model(x)) == expected
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_backward_from_what_was_not_returned_says_what_to_do() -> None:
    def hides(model: Writes, x: Tensor) -> Callable[[], Tensor]:
        out = model.head(model.layers(x)[-1])
        return lambda: out

    model = Writes(hides)
    with cells.closing(outsize.prepare(model, INPUTS[0], loss=lambda model, x: model(x)().sum(), device="sim:16MiB")):
        loss = model(INPUTS[0])().sum()
        with pytest.raises(
            EngineMisuse,
            match=r"forward returned no tensor with grad that outsize found.*Return the tensors that a loss is made of",
        ):
            loss.backward()
