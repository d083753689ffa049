"""Modules over tiles of tokens (activation/tiles.py): the same bits under every strategy, and next to those of the
untiled model.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import cells
import pytest
import torch
import transformers
import zoo
from cells import Cell, Outcome
from torch import Tensor, nn

from outsize.activation.tiles import Tiling
from outsize.activation.tokenwise import TileSearch
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.model.strategies import STRATEGIES
from outsize.runtime.engine import Engine

TILE = 6
"""A batch has 16 tokens, so the last tile is shorter. T5's decoder has 8 tokens, which are not cut."""
KINDS = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "t5"]


def make(kind: str, dtype: torch.dtype) -> nn.Module:
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
    return zoo.batch("llama" if kind == "gemma3" else kind, seed=seed)


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
def plain(kind: str, dtype: torch.dtype) -> Outcome:
    """The plain loop with the same modules over tiles."""
    model = make(kind, dtype)
    names = tiled_modules(make(kind, dtype), batch(kind))
    with tiled(model, names):
        return cells.plain(model, [batch(kind, seed) for seed in range(2)], spec=Cell(kind=kind).spec, steps=2)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_strategies_give_the_bits_of_the_tiled_plain_loop_and_their_predicted_memory(
    kind: str, dtype: torch.dtype
) -> None:
    data = [batch(kind, seed) for seed in range(2)]
    for number, strategy in enumerate(STRATEGIES):
        weights: Literal["gpu", "host"] = ("gpu", "host")[number % 2]
        with cells.closing(prepare(kind, dtype, strategy=strategy.name, weights=weights)) as engine:
            assert engine.plan.tile_tokens == TILE and engine.plan.tiled
            found = cells.train(engine.model, engine.optimizer, data, steps=2, accumulate=1, engine=engine)
            cells.assert_same(found, plain(kind, dtype))
            assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
