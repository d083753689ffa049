"""Batches and models as other libraries hand them over: mappings that are no dicts, checkpointing that a model does itself."""

import logging
from typing import Any

import foreign_plans
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

import outsize


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


@pytest.mark.parametrize(("make", "batch", "where"), [(Wrapped, zoo.batch("llama"), " in inner"), (Timm, {"x": torch.ones(2, 8)}, "")], ids=["wrapped", "timm"])
def test_checkpointing_of_the_models_own_is_turned_off_with_a_note(make: Any, batch: Any, where: str, caplog: pytest.LogCaptureFixture) -> None:
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
