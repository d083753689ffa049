"""LoRA over quantized bases: the bits of plain training under every plan, every part of a streamed weight in its slot."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import cells
import pytest
import quantized
import torch
from cells import Traced
from quantized import Quantized
from synthetic import make_homes
from torch import Tensor, nn

from outsize.compat import without_dispatch_modes, without_torch_function
from outsize.layout.chunks import ChunkLayout
from outsize.lora.fuse import is_fused
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.parts import named_parts
from outsize.model.strategies import Strategy
from outsize.profile import cache
from outsize.profile.trace import ModelTrace
from outsize.runtime.engine import Engine
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.plan import Decision

bnb = pytest.importorskip("bitsandbytes")

STEPS = 4
BASES: tuple[quantized.Quantization, ...] = ("nf4-double", "nf4", "fp4", "torchao-int8", "int8", "fp8")
FUSED = ("nf4-double", "nf4", "fp4", "int8", "fp8")
"""Bases whose LoRA layers can be fused."""
HOMES = ("resident", "mixed", "streamed")
STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "offload", "swap")
DEVICES = ("cpu", "sim")


@dataclasses.dataclass(frozen=True)
class Cell:
    base: quantized.Quantization
    homes: Literal["resident", "mixed", "streamed"]
    strategy: Strategy
    device: Literal["cpu", "sim"]
    is_fused: bool = False

    def __str__(self) -> str:
        form = "fused" if self.is_fused else "peft"
        return "-".join((self.base, self.homes, self.strategy, self.device, form))

    @property
    def case(self) -> Quantized:
        return Quantized(quantization=self.base, is_fused=self.is_fused)

    def decide(self, graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace) -> Decision:
        """`streamed`: all weights, with as few slots as possible. `mixed`: every second chunk of frozen weights."""
        if self.homes == "mixed":
            kinds = ["host" if chunk.index % 2 and not chunk.is_updated else "gpu" for chunk in layout.chunks]
        else:
            kinds = ["gpu" if self.homes == "resident" else "host"] * len(layout.chunks)
        return Decision(
            homes=tuple(make_homes(k, k, chunk.is_updated) for k, chunk in zip(kinds, layout.chunks, strict=True)),
            strategies=tuple(self.strategy if self.strategy in trace.strategies(v) else "keep" for v in range(6)),
            depth=1 if self.homes == "mixed" else 0,
        )

    def prepare(self, model: nn.Module | None = None, traced: Traced | None = None) -> Engine:
        return cells.prepare_by_hand(
            model or self.case.model(),
            quantized.batch(),
            spec=self.case.spec,
            device="cpu" if self.device == "cpu" else quantized.machine(),
            chunk_bytes=16 * 1024,
            budget=None,
            traced=traced or quantized.traced(self.case),
            decision=self.decide,
        )


CELLS = [
    Cell(base, HOMES[(i + j) % 3], strategy, DEVICES[(i + j) % 2], (i + j // 2) % 2 == 1 and base in FUSED)  # type: ignore[arg-type]
    for i, base in enumerate(BASES)
    for j, strategy in enumerate(STRATEGIES)
]


def test_cells_cover_every_pair() -> None:
    values = {"base": BASES, "homes": HOMES, "strategy": STRATEGIES, "device": DEVICES, "is_fused": (False, True)}
    for (one, of_one), (other, of_other) in itertools.combinations(values.items(), 2):
        for a, b in itertools.product(of_one, of_other):
            if other == "is_fused" and b and one == "base" and a not in FUSED:
                continue
            assert any(getattr(cell, one) == a and getattr(cell, other) == b for cell in CELLS), (one, a, other, b)


def poison(engine: Engine) -> None:
    """Fill all slots with NaN. They hold no chunk then."""
    store = engine.runtime.store
    with without_dispatch_modes():
        for (kind, index), buffer in store.gpu.items():
            if kind == B.SLOT:
                buffer.fill_(0xFF)
                store.slot_contents[index] = None


def assert_streamed_parts_are_in_slots(engine: Engine, cell: Cell) -> None:
    store, place = engine.runtime.store, engine.runtime.place
    names = set()
    for chunk in place.layout.chunks:
        buffer = store.gpu[place.weights_buffer(chunk.index)]
        first, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        for piece in chunk.pieces:
            with without_torch_function():
                tensor = store.params[piece.name]
                assert first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end, piece.name
            names |= {piece.name} if place.streams(chunk.index) else set()
    frozen = [chunk for chunk in place.layout.chunks if not chunk.is_updated]
    streamed = sum(place.streams(chunk.index) for chunk in frozen)
    assert streamed == {"resident": 0, "streamed": len(frozen)}.get(cell.homes, streamed)
    for end_of_name in quantized.PART_NAMES[cell.base]:
        found = sum(name.endswith(end_of_name) for name in names)
        wanted = 7 * quantized.CONFIG.num_hidden_layers
        assert found == wanted if cell.homes == "streamed" else (found > 0) == (cell.homes == "mixed"), end_of_name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_training_over_a_quantized_base_equals_the_plain_loop(
    cell: Cell, parity_cell: Callable[[object], None]
) -> None:
    evaluations = []
    with cells.closing(cell.prepare()) as engine:
        assert_streamed_parts_are_in_slots(engine, cell)

        def after(what: str) -> None:
            poison(engine)
            if what == "step":
                evaluations.append(quantized.evaluate(engine.model))
                poison(engine)

        found = cells.train(
            engine.model, engine.optimizer, cell.case.batches(), steps=STEPS, accumulate=1, engine=engine, after=after
        )
        assert_streamed_parts_are_in_slots(engine, cell)
        assert not engine.runtime.store.replaced_data()
    outcome, wanted = quantized.plain(cell.case, STEPS)
    cells.assert_same(quantized.of_plain_tensors(found), quantized.of_plain_tensors(outcome))
    assert evaluations == wanted
    given = dict(named_parts(cell.case.model()))
    after_detach = {name: part for name, part in named_parts(engine.model) if not part.requires_grad}
    assert len(after_detach) > 7 * 4 and all(torch.equal(part, given[name]) for name, part in after_detach.items())
    assert quantized.evaluate(engine.model) == wanted[-1], "after detach"
    parity_cell(cell)


@pytest.mark.parametrize("base", FUSED)
def test_fused_layers_compute_what_pefts_compute(base: quantized.Quantization) -> None:
    found = []
    for fused in (False, True):
        model = Quantized(quantization=base, is_fused=fused).model()
        assert any(is_fused(module) for module in model.modules()) == fused
        torch.manual_seed(3)
        loss = model(**quantized.batch()).loss
        loss.backward()
        grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), grads))
    (loss, grads), (fused_loss, fused_grads) = found
    assert fused_loss == pytest.approx(loss, rel=5e-3)
    assert len(grads) == 2 * 7 * quantized.CONFIG.num_hidden_layers == len(fused_grads)
    for name, grad in grads.items():
        assert (fused_grads[name] - grad).norm() < 0.05 * grad.norm(), name


class Stash(torch.autograd.Function):
    """A LoRA projection that keeps weight and quant state on `ctx`, as Axolotl's does, outside of saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.weight, ctx.state = weight, state
        ctx.save_for_backward(x, a, b)
        return x @ bnb.functional.dequantize_4bit(weight, state).t() + x @ a.t() @ b.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        rows, columns = grad.flatten(0, -2), x.flatten(0, -2)
        through_b = grad @ b
        of_x = grad @ bnb.functional.dequantize_4bit(ctx.weight, ctx.state) + through_b @ a
        return of_x, None, None, through_b.flatten(0, -2).t() @ columns, rows.t() @ (columns @ a.t())


def stash_weights(model: nn.Module) -> nn.Module:
    """Let all projections read their base's weight without calling it, in a Function that keeps it on `ctx`."""

    def run(module: Any, x: Tensor) -> Tensor:
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        weight = module.base_layer.weight
        return Stash.apply(x, weight, weight.quant_state, a, b)

    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = functools.partial(run, module)
    return model


@pytest.mark.parametrize(("homes", "strategy"), [("streamed", "keep"), ("streamed", "recompute"), ("mixed", "swap")])
def test_a_function_that_keeps_weights_on_ctx_equals_the_plain_loop(
    homes: Any, strategy: Strategy, parity_cell: Callable[[object], None]
) -> None:
    cell = Cell("nf4-double", homes, strategy, "sim")
    case = cell.case
    plain = cells.plain(stash_weights(case.model()), case.batches(), spec=case.spec, steps=STEPS)
    traced = stash_weights(case.model())
    found = cache.traced(traced, quantized.batch(), find_layers(traced), quantized.machine())
    with cells.closing(cell.prepare(stash_weights(case.model()), found)) as engine:
        outcome = cells.train(
            engine.model,
            engine.optimizer,
            case.batches(),
            steps=STEPS,
            accumulate=1,
            engine=engine,
            after=lambda what: poison(engine),
        )
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
    cells.assert_same(outcome, plain)
    parity_cell(("ctx", homes, strategy))
