"""What loops do beyond the covering arrays: autocast, parameter groups with a scheduled rate, parameters without a
gradient, slots full of NaN.
"""

import dataclasses
import math
from collections.abc import Callable

import cells
import pytest
import torch
import zoo
from cells import Cell
from torch import nn
from turns import by_turns

HOMES = [("gpu", "gpu"), ("host", "gpu"), ("gpu", "host"), ("host", "host")]
STRATEGIES = ("keep", "recompute", "offload", "swap")
FEW = 3
"""Steps, where the hazard is there in every one of them."""


@pytest.mark.parametrize(("kind", "strategy"), by_turns(["llama", "gpt2", "t5", "bert"], STRATEGIES, every=4))
def test_autocast_over_fp32_weights(kind: str, strategy: str, parity_cell: Callable[[object], None]) -> None:
    """Weights are cast anew in every block: a cast that outlives its slot would be another block's (dropout in gpt2, t5
    and bert is repeated as well).
    """
    i = STRATEGIES.index(strategy)
    cell = Cell(
        kind=kind,
        autocast=True,
        strategy=strategy,
        weights="host",
        optimizer=("gpu", "host")[i % 2],
        clip=i < 2,
        accumulate=1 + i % 2,
        depth=i % 3,
    )
    expected = cells.expected(cell, steps=FEW)
    assert expected.losses != cells.expected(dataclasses.replace(cell, autocast=False), steps=FEW).losses, (
        "autocast changes nothing here"
    )
    cells.assert_same(cells.run(cell, steps=FEW), expected)
    parity_cell(cell)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast_of_a_block_that_runs_several_times_a16(strategy: str, parity_cell: Callable[[object], None]) -> None:
    """Equal to a plain loop without autocast's cache of cast weights, which the engine must turn off: with it, the
    gradients of a weight's several uses are summed in bf16 before they reach the weight, without it in fp32 after.
    Every weight used once has the same bits either way."""
    cell = Cell(kind="looped", autocast=True, strategy=strategy, weights="host", optimizer="host", accumulate=2)
    expected = cells.plain(
        cell.model(), cells.batches(cell.kind, 3), spec=cell.spec, accumulate=2, autocast=True, autocast_cache=False
    )
    assert expected.losses != cells.expected(cell).losses, "then this test needs no case of its own"
    cells.assert_same(cells.run(cell), expected)
    parity_cell(cell)


def _cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step, 8) / 8))


@pytest.mark.parametrize(
    ("kind", "weights", "optimizer"),
    [
        pytest.param(kind, *homes, marks=[pytest.mark.full] if (i + j) % 4 else [])
        for i, kind in enumerate(("llama", "mixed", "bert"))
        for j, homes in enumerate(HOMES)
    ],
)
def test_groups_and_schedule_reach_every_chunk_d7_d8_d22(
    kind: str, weights: str, optimizer: str, parity_cell: Callable[[object], None]
) -> None:
    """Norms and biases do not decay and have another rate; both rates follow a cosine. One-dimensional and other
    parameters share chunks.
    """
    cell = Cell(
        kind=kind, dtype="bf16", strategy="recompute", weights=weights, optimizer=optimizer, clip=True, accumulate=2
    )
    small = [name for name, p in cell.model().named_parameters() if p.ndim == 1]
    spec = dataclasses.replace(cell.spec, groups=[{"params": small, "weight_decay": 0.0, "lr": 3e-2}])
    data = cells.batches(kind, 3)
    with cells.closing(cells.prepare(cell, spec=spec)) as engine:
        found = cells.train_cell(cell, engine, schedule=_cosine)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
    expected = cells.plain(cell.model(), data, spec=spec, accumulate=2, schedule=_cosine)
    cells.assert_same(found, expected)
    assert rates == pytest.approx([3e-2 * _cosine(cells.STEPS), 1e-2 * _cosine(cells.STEPS)])
    without = cells.plain(cell.model(), data, spec=cell.spec, accumulate=2)
    assert any(not torch.equal(without.weights[name], expected.weights[name]) for name in small), (
        "the groups change nothing here"
    )
    parity_cell(cell)


@pytest.mark.parametrize(("kind", "update"), by_turns(["gpt2", "mixtral"], ["declared", "after_step"]))
def test_groups_in_a_declared_backward_d7_d9(kind: str, update: str, parity_cell: Callable[[object], None]) -> None:
    """Updates inside backward read the rates of the step they belong to, and come after the last of several
    backwards.
    """
    cell = Cell(kind=kind, strategy="swap", weights="host", optimizer="gpu", accumulate=3, update=update)
    small = [name for name, p in cell.model().named_parameters() if p.ndim == 1]
    spec = dataclasses.replace(cell.spec, groups=[{"params": small, "weight_decay": 0.0}])
    with cells.closing(cells.prepare(cell, spec=spec)) as engine:
        found = cells.train_cell(cell, engine, schedule=_cosine)
    cells.assert_same(
        found, cells.plain(cell.model(), cells.batches(kind, 3), spec=spec, accumulate=3, schedule=_cosine)
    )
    parity_cell(cell)


class _WithTower(zoo.PlainModel):
    """Has trainable parameters that no forward reads."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3, loops=1, tied=True)
        self.tower = nn.Linear(zoo.HIDDEN, zoo.HIDDEN)


def _with_tower(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _WithTower().to(dtype).train()


@pytest.mark.parametrize(("weights", "optimizer"), HOMES)
@pytest.mark.parametrize("declare", [False, True])
def test_unused_parameters_keep_no_gradient_and_no_state_d20(
    weights: str, optimizer: str, declare: bool, parity_cell: Callable[[object], None]
) -> None:
    spec = cells.AdamW(lr=1e-2, weight_decay=0.1)
    data = cells.batches("plain", 3)
    model = _with_tower(torch.bfloat16)
    engine = cells.prepare_by_hand(
        model, data[0], spec=spec, accumulate=2, strategy="recompute", weights=weights, optimizer=optimizer
    )
    with cells.closing(engine):
        found = cells.train(
            model, engine.optimizer, data, steps=cells.STEPS, accumulate=2, engine=engine, declare=declare
        )
    cells.assert_same(found, cells.plain(_with_tower(torch.bfloat16), data, spec=spec, accumulate=2))
    assert not any(name.startswith("tower") for name in found.state)
    parity_cell(("tower", weights, optimizer, declare))


class _Headless(nn.Module):
    """What its last layer returns is what the model returns: there is no head, and the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, zoo.HIDDEN)
        self.layers = nn.ModuleList(zoo.PlainBlock() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _headless() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Headless()


def _train_headless(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for seed in range(5):
        loss = model(input_ids=zoo.batch("plain", seed=seed)["input_ids"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_without_a_head_whose_loss_is_computed_outside(
    strategy: str, parity_cell: Callable[[object], None]
) -> None:
    """One tensor is the last layer's output and the model's: the layer's backward opens with it, and there is no other
    before.
    """
    spec = cells.AdamW(lr=1e-2)
    plain, model = _headless(), _headless()
    expected = _train_headless(plain, cells.Reference(spec.param_groups(plain.named_parameters()), lr=1e-2))
    batch = {"input_ids": zoo.batch("plain")["input_ids"]}
    with cells.closing(
        cells.prepare_by_hand(model, batch, spec=spec, strategy=strategy, weights="host", optimizer="host")
    ) as engine:
        assert _train_headless(model, engine.optimizer) == expected
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    parity_cell(("headless", strategy))


@pytest.mark.parametrize(("kind", "strategy", "depth"), by_turns(["llama", "t5"], STRATEGIES, [0, 1, 2], every=3))
def test_slots_full_of_nan_between_forward_and_backward_do_not_matter_a1(
    kind: str, strategy: str, depth: int, parity_cell: Callable[[object], None]
) -> None:
    """What autograd saved of a weight is a view into its slot: backward must see the weight again, whatever the slot
    held in between.

    The hazard is forced: after each forward every slot is filled with NaN and owns nothing.
    """
    cell = Cell(kind=kind, strategy=strategy, weights="host", optimizer="host", depth=depth)
    with cells.closing(cells.prepare(cell, chunk_bytes=4096)) as engine:
        store = engine.runtime.store

        def spoil(what: str) -> None:
            if what == "forward":
                for (part, index), buffer in store.gpu.items():
                    if part == "slot":
                        buffer.fill_(0xFF)
                        store.slot_contents[index] = None

        found = cells.train_cell(cell, engine, steps=FEW, after=spoil)
    cells.assert_same(found, cells.expected(cell, steps=FEW))
    parity_cell(cell)
