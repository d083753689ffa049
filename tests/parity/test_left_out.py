"""Blocks that a forward leaves out: images that a batch has not, layers that are dropped. Bits are those of a plain loop under any plan."""

import itertools
from typing import Any

import cells
import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
from outsize.base.errors import StaleParameter
from outsize.runtime.engine import Engine

SEES = ["qwen2.5-vl", "qwen3-vl", "llava"]


def text_only(kind: str, seed: int) -> dict[str, Tensor]:
    ids = zoo.batch(kind, seed=seed)["input_ids"].clamp(max=80)  # tokens that stand for images are above
    return {"input_ids": ids, "labels": ids}


def step(engine: Engine, batches: list[dict[str, Any]], update: str) -> list[Tensor]:
    losses = []
    for i, batch in enumerate(batches):
        loss = engine.model(**batch)["loss"]
        if update == "in_backward" and i == len(batches) - 1:
            with engine.last_backward():
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach().cpu())
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return losses


def plain_step(model: nn.Module, optimizer: Any, batches: list[dict[str, Any]]) -> list[Tensor]:
    losses = [model(**batch)["loss"] for batch in batches]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
@pytest.mark.parametrize("kind", SEES)
def test_batches_with_and_without_images_train_in_one_run(kind: str, update: Any) -> None:
    """On `sim`, which finds races; a plan that sends activations and streams weights of the vision tower too."""
    plain, model = zoo.make(kind), zoo.make(kind)
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update=update)
    engine = cells.prepare_by_hand(
        model, zoo.batch(kind), spec=spec, device="sim:64GiB", weights="host", optimizer="host", strategy="offload", depth=1, chunk_bytes=4096
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        for seed in range(5):
            batch = text_only(kind, seed) if seed % 2 else zoo.batch(kind, seed=seed)
            torch.manual_seed(seed)
            expected = plain_step(plain, reference, [batch])
            torch.manual_seed(seed)
            assert step(engine, [batch], update) == expected
    assert same(plain, model)


@pytest.mark.parametrize("kind", SEES)
def test_the_first_batch_with_images_after_a_plan_without_them_is_planned_for(kind: str) -> None:
    plain, model = zoo.make(kind), zoo.make(kind)
    engine = outsize.prepare(model, text_only(kind, 0), optimizer=outsize.AdamW(lr=1e-2, weight_decay=0.1), device="sim:64GiB", chunked_loss=False)
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        blocks = len(engine.graph.blocks)
        for seed in range(4):
            batch = zoo.batch(kind, seed=seed) if seed % 2 else text_only(kind, seed)
            assert step(engine, [batch], "after_step") == plain_step(plain, reference, [batch])
        assert len(engine.graph.blocks) > blocks
    assert same(plain, model)


def test_text_and_images_that_are_each_larger_than_planned_for_are_planned_for_together() -> None:
    """A plan that forgot the images when it grew for the text would be made anew with every batch."""
    kind = "qwen2.5-vl"
    model = zoo.make(kind)
    long = {name: torch.cat([value] * 3, 1) for name, value in text_only(kind, 0).items()}
    engine = outsize.prepare(model, text_only(kind, 0), optimizer=outsize.AdamW(), device="sim:64GiB", chunked_loss=False)
    plans = []
    with cells.closing(engine):
        for batch in (zoo.batch(kind), long, zoo.batch(kind), long):
            step(engine, [batch], "after_step")
            plans.append(engine.plan)
    assert plans[1] is plans[2] is plans[3] is not plans[0]
    assert plans[1].inputs["input_ids"] == (2, 48) and plans[1].inputs["pixel_values"] == tuple(zoo.batch(kind)["pixel_values"].shape)


class Dropping(nn.Module):
    """Two stacks with weights between and behind them, which run the layers they are told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.between = nn.LayerNorm(8)
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, order: str = "012/012") -> dict[str, Tensor]:
        first, second = order.split("/")
        x = self.stem(x)
        for i in first:
            x = torch.tanh(self.first[int(i)](x))
        x = self.between(x)
        for i in second:
            x = torch.tanh(self.second[int(i)](x))
        return {"loss": self.head(x).square().sum()}


ORDERS = ["012/012", "12/02", "01/12", "0/01", "/012", "012/", "/", "2/2"]
"""The whole; the first, a middle one or the last of a list left out; whole lists."""


def inputs(seed: int, order: str = "012/012") -> dict[str, Any]:
    return {"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)), "order": order}


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
@pytest.mark.parametrize(
    ("weights", "optimizer", "strategy"),
    [("host", "host", "offload"), ("host", "gpu", "swap"), ("gpu", "host", "recompute"), ("gpu", "gpu", "swap"), ("host", "host", "keep")],
)
def test_layers_that_are_dropped_are_passed_over(weights: Any, optimizer: Any, strategy: Any, update: Any) -> None:
    """Every pair of orders in one step of two micro-batches: what one leaves out has the gradient of the other alone."""
    plain, model = Dropping(), Dropping()
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update=update)
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=spec, device="sim:64GiB", accumulate=2, weights=weights, optimizer=optimizer, strategy=strategy, depth=1, chunk_bytes=512
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        for seed, pair in enumerate(itertools.product(ORDERS, repeat=2)):
            batches = [inputs(2 * seed + i, order) for i, order in enumerate(pair)]
            assert step(engine, batches, update) == plain_step(plain, reference, batches), pair
    assert same(plain, model)


def test_a_way_that_nobody_has_seen_is_guarded_once() -> None:
    """As on a GPU, where the guard goes after the first step."""
    model = Dropping()
    engine = cells.prepare_by_hand(model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512)
    with cells.closing(engine):
        for order, is_guarded in (("012/012", False), ("01/012", True), ("01/012", False), ("/012", True), ("012/012", False)):
            engine.now.drop_guard()
            engine.model(**inputs(1, order))["loss"].backward()
            assert (engine.now._guard is not None) == is_guarded, order
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def test_weights_of_a_block_that_is_left_out_are_not_there_to_be_read() -> None:
    class Reaching(Dropping):
        """Leaves out a layer, and reads its weight all the same."""

        def forward(self, x: Tensor, order: str = "012/012") -> dict[str, Tensor]:
            loss = super().forward(x, order)["loss"]
            return {"loss": loss if order == "012/012" else loss + self.first[0].weight.sum()}

    model = Reaching()
    engine = cells.prepare_by_hand(model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512)
    with cells.closing(engine):
        engine.now.drop_guard()
        with pytest.raises(StaleParameter, match=r"first\.0"):
            engine.model(**inputs(1, "12/012"))
