"""Modules over tiles of tokens (activation/tiles.py): the same bits under every strategy, and next to those of the
untiled model.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import cells
import peft
import pytest
import torch
import transformers
import zoo
from cells import Cell, Outcome
from torch import Tensor, nn
from turns import in_turn

import outsize
from outsize.activation.tiles import Tiling
from outsize.activation.tokenwise import TileSearch
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.layout.chunks import ChunkLayout
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGIES
from outsize.profile.trace import ModelTrace
from outsize.runtime.engine import Engine
from outsize.schedule.plan import Decision

TILE = 6
"""A batch has 16 tokens, so the last tile is shorter. T5's decoder has 8 tokens, which are not cut."""
KINDS = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "t5", "lora"]


def make(kind: str, dtype: torch.dtype) -> nn.Module:
    if kind == "lora":
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False)
        return outsize.fuse_lora(peft.get_peft_model(zoo.make("llama", dtype), config, autocast_adapter_dtype=False))
    if kind != "gemma3":
        return zoo.make(kind, dtype)
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=zoo.VOCAB,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return transformers.Gemma3ForCausalLM(config).to(dtype).train()


def batch(kind: str, seed: int = 0) -> dict[str, Tensor]:
    return zoo.batch("llama" if kind in ("gemma3", "lora") else kind, seed=seed)


def tiled_modules(model: nn.Module, inputs: dict[str, Any], tile: int = TILE) -> tuple[str, ...]:
    search = TileSearch(model, find_layers(model), tile)
    search.attach()
    model(**inputs)
    search.detach()
    return search.names


@contextmanager
def tiled(model: nn.Module, names: tuple[str, ...], tile: int = TILE) -> Iterator[None]:
    tiling = Tiling(model, tile, names)
    tiling.attach()
    yield
    tiling.detach()


@functools.cache
def plain(kind: str, dtype: torch.dtype) -> tuple[Outcome, Tensor]:
    """The plain loop with the same modules over tiles, and the random state at its end."""
    model = make(kind, dtype)
    names = tiled_modules(make(kind, dtype), batch(kind))
    with tiled(model, names):
        return cells.plain(model, [batch(kind)], spec=Cell(kind=kind).spec, steps=2), torch.get_rng_state()


def prepare(kind: str, dtype: torch.dtype, **how: Any) -> Engine:
    return cells.prepare_by_hand(
        make(kind, dtype),
        batch(kind),
        spec=Cell(kind=kind).spec,
        device=SimDevice(lookup("1GiB")),
        budget=None,
        tile_tokens=TILE,
        **how,
    )


def train_and_compare(kind: str, dtype: torch.dtype, **how: Any) -> set[str]:
    """Bits and random numbers are those of the plain loop, memory is as predicted. Returns the plan's strategies."""
    with cells.closing(prepare(kind, dtype, **how)) as engine:
        assert engine.plan.tile_tokens == TILE and engine.plan.tiled
        found = cells.train(engine.model, engine.optimizer, [batch(kind)], steps=2, accumulate=1, engine=engine)
        rng = torch.get_rng_state()
        expected, rng_of_plain = plain(kind, dtype)
        cells.assert_same(found, expected)
        assert torch.equal(rng, rng_of_plain)
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
        return set(engine.plan.decision.strategies)


def one_after_the_other(graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace) -> Decision:
    """The layers have all strategies in turn, and their weights are streamed."""
    made = cells.uniform(graph, layout, trace, weights="host", optimizer="host")
    offered = [trace.strategies(call) for call in range(len(graph.calls))]
    turn = tuple(names[call % len(names)] if len(names) > 1 else "keep" for call, names in enumerate(offered))
    return replace(made, strategies=turn)


@pytest.mark.parametrize("number", in_turn(range(len(KINDS))), ids=KINDS.__getitem__)
def test_a_plan_of_all_strategies_gives_the_bits_of_the_tiled_plain_loop_and_its_predicted_memory(number: int) -> None:
    dtype = (torch.float32, torch.bfloat16)[number % 2]
    used = train_and_compare(KINDS[number], dtype, decision=one_after_the_other)
    assert len(used) >= 3


@pytest.mark.full
@pytest.mark.parametrize("weights", ["gpu", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_does(kind: str, dtype: torch.dtype, weights: str) -> None:
    for strategy in STRATEGIES:
        used = train_and_compare(kind, dtype, strategy=strategy.name, weights=weights)
        # Dropout in attention excludes the strategies that run it once.
        assert strategy.name in used or (strategy.saves_attention_of and kind in ("gpt2", "t5"))


LOOPS: dict[str, dict[str, Any]] = {
    "accumulated, in backward": {"accumulate": 2, "update": "declared"},
    "autocast": {"autocast": True},
    "osft": {"osft": 0.5, "clip": True},
    "frozen": {"frozen": "scattered"},
    "a frozen prefix": {"frozen": "prefix"},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_other_loops_give_the_bits_of_the_tiled_plain_loop(loop: str) -> None:
    cell = Cell(kind="llama", dtype="fp32" if "autocast" in loop else "bf16", **LOOPS[loop])
    data, how = cells.batches(cell.kind, 2), {"steps": 2, "accumulate": cell.accumulate, "autocast": cell.autocast}
    model = cell.model()
    with torch.autocast("cpu", torch.bfloat16, enabled=cell.autocast):
        names = tiled_modules(cell.model(), data[0])
        engine = cells.prepare_by_hand(
            cell.model(),
            data[0],
            spec=cell.spec,
            device=SimDevice(lookup("1GiB")),
            budget=None,
            accumulate=cell.accumulate,
            method=cell.method,
            tile_tokens=TILE,
            decision=one_after_the_other,
        )
    with tiled(model, names):
        expected = cells.plain(model, data, spec=cell.spec, method=cell.method, **how)
    with cells.closing(engine):
        assert set(engine.plan.tiled) == set(names)
        found = cells.train(
            engine.model, engine.optimizer, data, engine=engine, declare=cell.update == "declared", **how
        )
        cells.assert_same(found, expected)
        assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes
