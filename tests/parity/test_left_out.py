"""Blocks that a forward leaves out: images that a batch has not, layers that are dropped. Bits are those of a plain
loop under any plan.
"""

import itertools
from typing import Any

import cells
import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration
from turns import by_turns, in_turn

import outsize
from outsize.base.errors import ModelUnsupported, OrderMismatch, StaleParameter
from outsize.runtime.engine import Engine

SEES = ["qwen2.5-vl", "qwen3-vl", "llava"]  # not llava-next: a region that reads a weight by itself cannot be left out


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


@pytest.mark.parametrize(("kind", "update"), by_turns(SEES, ["after_step", "in_backward"]))
def test_batches_with_and_without_images_train_in_one_run(kind: str, update: Any) -> None:
    """On `sim`, which finds races; a plan that sends activations and streams weights of the vision tower too."""
    plain, model = zoo.make(kind), zoo.make(kind)
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update=update)
    engine = cells.prepare_by_hand(
        model,
        zoo.batch(kind),
        spec=spec,
        device="sim:64GiB",
        weights="host",
        optimizer="host",
        strategy="offload",
        depth=1,
        chunk_bytes=4096,
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        for seed in range(3):
            batch = text_only(kind, seed) if seed % 2 else zoo.batch(kind, seed=seed)
            torch.manual_seed(seed)
            expected = plain_step(plain, reference, [batch])
            torch.manual_seed(seed)
            assert step(engine, [batch], update) == expected
    assert same(plain, model)


@pytest.mark.parametrize("kind", in_turn(SEES, every=3))
def test_the_first_batch_with_images_after_a_plan_without_them_is_planned_for(kind: str) -> None:
    plain, model = zoo.make(kind), zoo.make(kind)
    engine = outsize.prepare(
        model,
        text_only(kind, 0),
        optimizer=outsize.AdamW(lr=1e-2, weight_decay=0.1),
        device="sim:64GiB",
        chunked_loss=False,
    )
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
    engine = outsize.prepare(
        model, text_only(kind, 0), optimizer=outsize.AdamW(), device="sim:64GiB", chunked_loss=False
    )
    plans = []
    with cells.closing(engine):
        for batch in (zoo.batch(kind), long, zoo.batch(kind), long):
            step(engine, [batch], "after_step")
            plans.append(engine.plan)
    assert plans[1] is plans[2] is plans[3] is not plans[0]
    assert plans[1].inputs["input_ids"] == (2, 48) and plans[1].inputs["pixel_values"] == tuple(
        zoo.batch(kind)["pixel_values"].shape
    )


def test_images_that_are_smaller_than_the_text_are_planned_for_when_they_first_come() -> None:
    kind = "qwen2.5-vl"
    plain, model = zoo.make(kind), zoo.make(kind)
    ids = torch.randint(3, 80, (40, 100), generator=torch.Generator().manual_seed(0))
    engine = outsize.prepare(
        model,
        {"input_ids": ids, "labels": ids},
        optimizer=outsize.AdamW(lr=1e-2),
        device="sim:64GiB",
        chunked_loss=False,
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2)
    with cells.closing(engine):
        assert step(engine, [zoo.batch(kind)], "after_step") == plain_step(plain, reference, [zoo.batch(kind)])
        plan = engine.plan
        step(engine, [{"input_ids": ids, "labels": ids}], "after_step")
        assert engine.plan is plan, "both are planned for"


@pytest.mark.parametrize("first", in_turn(["pixel_values", "input_ids"]))
def test_images_are_kept_in_mind_whatever_comes_first_in_a_batch(first: str) -> None:
    """And `pixel_values=None` is no image."""
    kind = "llava"
    images = zoo.batch(kind)
    images = {first: images.pop(first), **images}
    long = {name: torch.cat([value] * 3, 1) for name, value in text_only(kind, 0).items()} | {"pixel_values": None}
    engine = outsize.prepare(zoo.make(kind), images, optimizer=outsize.AdamW(), device="sim:64GiB", chunked_loss=False)
    with cells.closing(engine):
        for batch in (long, images, long):
            step(engine, [batch], "after_step")
            assert engine.plan.inputs["input_ids"] == (2, 48) and engine.plan.inputs["pixel_values"] == (2, 3, 8, 8)


def test_text_that_does_not_fit_in_one_batch_with_images_shares_their_plan() -> None:
    kind = "qwen2.5-vl"
    few, ids = (
        zoo.batch(kind, size=2, tokens=64),
        torch.randint(3, 80, (17, 8), generator=torch.Generator().manual_seed(0)),
    )
    many = {"input_ids": ids, "labels": ids}
    engine = outsize.prepare(
        zoo.make(kind),
        few,
        optimizer=outsize.AdamW(),
        device="sim:64GiB",
        chunked_loss=False,
        gpu_memory=700_000,
        chunk_bytes=8192,
    )
    with cells.closing(engine):
        plans = []
        for batch in (many, few, many):
            step(engine, [batch], "after_step")
            plans.append(engine.plan)
        assert plans[0] is plans[1] is plans[2]


class VisionFirst(nn.Module):
    """What sees begins: a batch without images leaves the stem without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.tower, self.into = (
            nn.Linear(8, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 8),
        )
        self.embed, self.layers, self.head = (
            nn.Linear(8, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor, image: Tensor | None = None) -> dict[str, Tensor]:
        seen = None
        if image is not None:
            seen = self.patches(image)
            for layer in self.tower:
                seen = torch.tanh(layer(seen))
            seen = self.into(seen)
        x = self.embed(x) if seen is None else self.embed(x) + seen
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": self.head(x).square().sum()}


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_blocks_that_no_gradient_reaches_are_passed_over(update: Any) -> None:
    plain, model = VisionFirst(), VisionFirst()
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update=update)
    both = {"x": torch.ones(2, 8), "image": torch.full((2, 8), 0.5)}
    engine = cells.prepare_by_hand(
        model,
        both,
        spec=spec,
        device="sim:64GiB",
        weights="host",
        optimizer="host",
        strategy="offload",
        chunk_bytes=512,
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        for batch in (both, {"x": both["x"]}, both, {"x": both["x"]}):
            assert step(engine, [batch], update) == plain_step(plain, reference, [batch])
    assert same(plain, model)


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        encoder_layerdrop=0.35,
        decoder_layerdrop=0.35,
    )
    return BartForConditionalGeneration(config).train()


@pytest.mark.parametrize(
    ("weights", "optimizer", "strategy", "update"),
    in_turn([("host", "host", "offload", "in_backward"), ("host", "gpu", "swap", "after_step")]),
)
def test_a_model_of_transformers_with_layerdrop_trains_to_the_same_bits(
    weights: Any, optimizer: Any, strategy: Any, update: Any
) -> None:
    """Trial passes drop nothing; training drops as it would, from the same random numbers."""
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    plain, model = bart(), bart()
    spec = outsize.AdamW(lr=1e-3, weight_decay=0.1, update=update)
    engine = cells.prepare_by_hand(
        model,
        batch,
        spec=spec,
        device="sim:64GiB",
        weights=weights,
        optimizer=optimizer,
        strategy=strategy,
        chunk_bytes=4096,
    )
    reference = cells.Reference(plain.named_parameters(), lr=1e-3, weight_decay=0.1)
    with cells.closing(engine):
        assert (
            model.model.encoder.layerdrop == 0.35 and sum(block.kind == "layer" for block in engine.graph.blocks) == 8
        )
        for seed in range(6):
            torch.manual_seed(seed)
            expected = plain_step(plain, reference, [batch])
            torch.manual_seed(seed)
            assert step(engine, [batch], update) == expected, seed
    assert same(plain, model)


def test_a_way_that_differs_from_pass_to_pass_of_the_trial_is_refused() -> None:
    class Random(Dropping):
        def forward(self, x: Tensor, order: str = "012/012") -> dict[str, Tensor]:
            return super().forward(x, "012/012" if torch.rand(1) < 0.5 else "01/2")

    torch.manual_seed(0)
    with pytest.raises(ModelUnsupported, match="runs its layers differently each time"):
        outsize.prepare(Random(), inputs(0), optimizer=outsize.AdamW(), device="cpu")


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


HOMES_AND_STRATEGIES = [
    ("host", "host", "offload"),
    ("host", "gpu", "swap"),
    ("gpu", "host", "recompute"),
    ("gpu", "gpu", "swap"),
    ("host", "host", "keep"),
]


@pytest.mark.parametrize(
    ("weights", "optimizer", "strategy", "update", "some"),
    [
        *(  # the updates and the pairs by turns
            pytest.param(*how, ("after_step", "in_backward")[i % 2], slice(i % 3, None, 3), id=f"third-{i}")
            for i, how in enumerate(HOMES_AND_STRATEGIES)
        ),
        *(
            pytest.param(*how, update, slice(None), marks=pytest.mark.full)
            for how in HOMES_AND_STRATEGIES
            for update in ("after_step", "in_backward")
        ),
    ],
)
def test_layers_that_are_dropped_are_passed_over(
    weights: Any, optimizer: Any, strategy: Any, update: Any, some: slice
) -> None:
    """Pairs of orders in one step of two micro-batches: what one leaves out has the gradient of the other alone. Every
    pair is in one of the thirds.
    """
    plain, model = Dropping(), Dropping()
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update=update)
    engine = cells.prepare_by_hand(
        model,
        inputs(0),
        spec=spec,
        device="sim:64GiB",
        accumulate=2,
        weights=weights,
        optimizer=optimizer,
        strategy=strategy,
        depth=1,
        chunk_bytes=512,
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        for seed, pair in enumerate(list(itertools.product(ORDERS, repeat=2))[some]):
            batches = [inputs(2 * seed + i, order) for i, order in enumerate(pair)]
            assert step(engine, batches, update) == plain_step(plain, reference, batches), pair
    assert same(plain, model)


class Frozen(Dropping):
    """What trains first is the first layer of the first list: without it, the second one's input needs no grad and it
    saves nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        for param in (*self.stem.parameters(), *self.first[1].parameters()):
            param.requires_grad_(False)


@pytest.mark.parametrize("strategy", ["swap", "offload", "recompute"])
def test_a_frozen_layer_behind_one_that_is_dropped_has_nothing_to_send(strategy: Any) -> None:
    plain, model = Frozen(), Frozen()
    spec = outsize.AdamW(lr=1e-2)
    engine = cells.prepare_by_hand(
        model,
        inputs(0),
        spec=spec,
        device="sim:64GiB",
        weights="host",
        optimizer="host",
        strategy=strategy,
        depth=1,
        chunk_bytes=256,
    )
    assert engine.plan.decision.strategies[2] == strategy
    reference = cells.Reference([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
    with cells.closing(engine):
        for seed, order in enumerate(["12/012", "012/012", "1/1", "12/", "012/12"]):
            batch = inputs(seed, order)
            assert step(engine, [batch], "after_step") == plain_step(plain, reference, [batch]), order
    assert same(plain, model)


def test_a_way_that_is_new_is_guarded_once() -> None:
    """As on a GPU, where the guard goes after the first step."""
    model = Dropping()
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine):
        for order, is_guarded in (
            ("012/012", False),
            ("01/012", True),
            ("01/012", False),
            ("/012", True),
            ("012/012", False),
        ):
            engine.runtime.drop_guard()
            engine.model(**inputs(1, order))["loss"].backward()
            assert engine.runtime._is_guarded == is_guarded, order
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def test_weights_of_a_block_that_is_left_out_are_not_there_to_be_read() -> None:
    class Reaching(Dropping):
        """Leaves out a layer, and reads its weight all the same."""

        def forward(self, x: Tensor, order: str = "012/012") -> dict[str, Tensor]:
            loss = super().forward(x, order)["loss"]
            return {"loss": loss if order == "012/012" else loss + self.first[0].weight.sum()}

    model = Reaching()
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine):
        engine.runtime.drop_guard()
        with pytest.raises(StaleParameter, match=r"first\.0"):
            engine.model(**inputs(1, "12/012"))


@pytest.mark.parametrize("evaluated", ["0/0", "012/012", "/"])
@pytest.mark.parametrize("trained", ["012/012", "012/01", "1/1"])
def test_what_an_evaluation_leaves_in_the_slots_is_not_updated_in_place_of_a_block_left_out(
    trained: str, evaluated: str
) -> None:
    """Weights that stream and are updated on the device, in backward: the update of a block that was passed over writes
    its slot back all the same.
    """
    plain, model = Dropping(), Dropping()
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, update="in_backward")
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=spec, device="sim:64GiB", accumulate=2, weights="host", optimizer="gpu", chunk_bytes=512
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with cells.closing(engine):
        plain_step(plain, reference, [inputs(1), inputs(2, trained)])
        engine.model(**inputs(1))["loss"].backward()
        loss = engine.model(**inputs(2, trained))["loss"]
        with torch.no_grad():
            engine.model(**inputs(3, evaluated))
        with engine.last_backward():
            loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert same(plain, model)


class Query(Dropping):
    """Reads a weight outside of its module, between the stacks or behind them."""

    def forward(self, x: Tensor, order: str = "012/012") -> dict[str, Tensor]:
        first, second = order.split("/")
        x = self.stem(x)
        for i in first:
            x = torch.tanh(self.first[int(i)](x))
        x = x + self.between.weight
        for i in second:
            x = torch.tanh(self.second[int(i)](x))
        return {"loss": (x @ self.head.weight + self.head(x)).square().sum()}


@pytest.mark.parametrize("order", ["01/012", "/012", "012/01", "012/"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_region_whose_beginning_is_unseen_cannot_be_entered_late(order: str, trains: bool) -> None:
    """Without the guard, as on a GPU after the first step: it would read whatever is in the slot."""
    model = Query()
    model.between.requires_grad_(trains)
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine):
        engine.runtime.drop_guard()
        with pytest.raises(OrderMismatch, match="the plan's next action in forward"):
            engine.model(**inputs(1, order))
        engine.runtime.drop_guard()
        step(engine, [inputs(1, "12/02")], "after_step")


@pytest.mark.parametrize("order", ["01/012", "/012", "012/01", "012/"])
def test_nor_in_a_forward_without_grad(order: str) -> None:
    plain, model = Query(), Query()
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine), torch.no_grad():
        for way in ("012/012", "2/2", "02/12"):
            engine.runtime.drop_guard()
            assert torch.equal(engine.model(**inputs(1, way))["loss"], plain(**inputs(1, way))["loss"])
        with pytest.raises(OrderMismatch, match=r"a forward without grad skipped it or"):
            engine.model(**inputs(1, order))


class Looped(nn.Module):
    """Its layers run twice, and its head is read outside of a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.head = (
            nn.Linear(8, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor, loops: int = 2) -> dict[str, Tensor]:
        x = self.stem(x)
        for _ in range(loops):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return {"loss": (x @ self.head.weight).square().sum()}


def test_an_evaluation_of_a_looped_model_has_the_weights_of_the_region_it_is_in() -> None:
    plain, model, x = Looped(), Looped(), torch.ones(2, 8)
    engine = cells.prepare_by_hand(
        model, {"x": x}, spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine):
        engine.runtime.drop_guard()
        with torch.no_grad():
            assert torch.equal(engine.model(x=x)["loss"], plain(x)["loss"])
            with pytest.raises(OrderMismatch):
                engine.model(x=x, loops=1)
        with pytest.raises(OrderMismatch, match="ended its forward without it"):
            engine.model(x=x, loops=1)
        step(engine, [{"x": x}], "after_step")


class Gated(nn.Module):
    """Reads a scale behind every layer, whether or not that ran, outside of a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.head = (
            nn.Linear(8, 8),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            nn.Linear(8, 8),
        )
        self.scales = nn.ParameterList(torch.rand(8) + i for i in range(4))

    def forward(self, x: Tensor, order: str = "0123") -> dict[str, Tensor]:
        x = self.stem(x)
        for i, (layer, scale) in enumerate(zip(self.layers, self.scales, strict=True)):
            x = (torch.tanh(layer(x)) if str(i) in order else x) * scale
        return {"loss": self.head(x).square().sum()}


@pytest.mark.parametrize("trains", [True, False])
def test_what_is_read_behind_a_layer_belongs_to_it_in_backward_too_and_it_cannot_be_left_out(trains: bool) -> None:
    plain, model, x = Gated(), Gated(), torch.linspace(-1, 1, 16).view(2, 8)
    for one in (plain, model):
        one.scales.requires_grad_(trains)
    engine = cells.prepare_by_hand(
        model, {"x": x}, spec=outsize.AdamW(lr=1e-2), weights="host", optimizer="host", depth=1, chunk_bytes=512
    )
    reference = cells.Reference([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    with cells.closing(engine):
        assert step(engine, [{"x": x}], "after_step") == plain_step(plain, reference, [{"x": x}])
        for grad in (True, False):
            engine.runtime.drop_guard()
            with torch.set_grad_enabled(grad), pytest.raises(OrderMismatch):
                engine.model(x=x, order="013")
        assert step(engine, [{"x": x}], "after_step") == plain_step(plain, reference, [{"x": x}])
    assert same(plain, model)


class Shared(Dropping):
    """The head's weight is that of a layer, its bias its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.second[1].weight


def test_a_module_is_in_the_region_that_reads_all_of_it() -> None:
    plain, model = Shared(), Shared()
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(lr=1e-2), weights="host", optimizer="host", chunk_bytes=512
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2)
    with cells.closing(engine):
        for seed, order in enumerate(["012/012", "012/01", "012/1"]):
            engine.runtime.drop_guard()
            assert step(engine, [inputs(seed, order)], "after_step") == plain_step(
                plain, reference, [inputs(seed, order)]
            )
    assert same(plain, model)


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_a_shared_weight_whose_gradient_is_planned_with_a_block_left_out_is_refused_before_the_backward(
    update: Any,
) -> None:
    plain, model = Shared(), Shared()
    spec = outsize.AdamW(lr=1e-2, update=update)
    engine = cells.prepare_by_hand(model, inputs(0), spec=spec, weights="host", optimizer="host", chunk_bytes=512)
    reference = cells.Reference(plain.parameters(), lr=1e-2)
    with cells.closing(engine):
        with pytest.raises(OrderMismatch, match=r"second\.1.*several blocks use.*skipped although it ran head"):
            engine.model(**inputs(1, "012/02"))
        assert step(engine, [inputs(2)], update) == plain_step(plain, reference, [inputs(2)])
    assert same(plain, model)


class Extra(Dropping):
    """May call its stem a second time, in the head."""

    def forward(self, x: Tensor, order: str = "012/012", again: bool = False) -> dict[str, Tensor]:
        first, second = order.split("/")
        x = self.stem(x)
        for layer in (*(self.first[int(i)] for i in first), self.between, *(self.second[int(i)] for i in second)):
            x = torch.tanh(layer(x))
        return {"loss": self.head(self.stem(x) if again else x).square().sum()}


def test_a_module_that_runs_where_the_trial_never_saw_it_is_guarded_every_time() -> None:
    engine = cells.prepare_by_hand(
        Extra(), inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with cells.closing(engine):
        for _ in range(2):
            engine.runtime.drop_guard()
            with pytest.raises(StaleParameter, match="stem"):
                engine.model(**inputs(1), again=True)
        step(engine, [inputs(1)], "after_step")


def test_a_refusal_at_the_end_of_a_forward_leaves_the_engine_free() -> None:
    engine = cells.prepare_by_hand(
        Shared(), inputs(0), spec=outsize.AdamW(), weights="host", optimizer="host", chunk_bytes=512
    )
    with pytest.raises(OrderMismatch):
        engine.model(**inputs(1, "012/02"))
    engine.detach()


def test_under_a_plain_plan_the_path_is_not_tracked() -> None:
    plain, model = Query(), Query()
    engine = cells.prepare_by_hand(
        model, inputs(0), spec=outsize.AdamW(lr=1e-2), weights="gpu", optimizer="gpu", chunk_bytes=512
    )
    reference = cells.Reference(plain.parameters(), lr=1e-2)
    with cells.closing(engine):
        assert not engine.runtime.executor.sees_calls
        for seed, order in enumerate(["012/012", "01/", "/"]):
            with torch.no_grad():
                assert torch.equal(engine.model(**inputs(seed, order))["loss"], plain(**inputs(seed, order))["loss"])
            assert step(engine, [inputs(seed, order)], "after_step") == plain_step(
                plain, reference, [inputs(seed, order)]
            )
    assert same(plain, model)
