"""Rows over tiles and rows that are too short for them: a plan for the first does not hold for the second, which may
need more memory.
"""

from typing import Any

import pytest
import torch
import zoo
from cells import closing

import outsize
from outsize.base.errors import ConfigError
from outsize.runtime.engine import Engine

TILE = 8


def rows_of(tokens: int, rows: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, zoo.VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def prepare(batch: dict[str, torch.Tensor], **how: Any) -> Engine:
    pins = outsize.Pins(n_swap=0, n_offload=0, n_checkpoint=0)
    return outsize.prepare(zoo.make("llama"), batch, device="sim:1GiB", tile_tokens=TILE, pins=pins, **how)


def step(engine: Engine, tokens: int) -> int:
    """The peak of a step on the device."""
    engine.device.count_anew()
    engine.model(**rows_of(tokens)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return engine.report().gpu_peak_bytes


def num_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    replan = engine.replan
    monkeypatch.setattr(engine, "replan", lambda *args: (made.append(1), replan(*args))[1])
    return made


def test_a_batch_that_is_too_short_for_tiles_is_planned_once_at_the_longest_such_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(prepare(rows_of(2 * TILE + 4))) as engine:
        made = num_plans(engine, monkeypatch)
        tiled, before = engine.plan.tiled, engine.plan.estimate.gpu_bytes
        assert engine.plan.tile_tokens == TILE and "model.layers.0.mlp" in tiled
        step(engine, 2 * TILE + 1)
        assert not made
        for tokens in (5, 2 * TILE, TILE, 2 * TILE + 4):
            step(engine, tokens)
        assert len(made) == 1 and engine.plan.tiled == tiled and engine.plan.tile_tokens == TILE
        assert engine.plan.estimate.gpu_bytes > before
        assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes


def test_with_max_shape_both_are_planned_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(prepare(rows_of(6), max_shape=(1, 3 * TILE))) as engine:
        made = num_plans(engine, monkeypatch)
        for tokens in (6, 3 * TILE, 2 * TILE, 2 * TILE + 1):
            step(engine, tokens)
        assert not made and engine.plan.tiled
        assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes


def test_a_longer_batch_than_planned_is_tiled_after_a_new_plan() -> None:
    with closing(prepare(rows_of(2 * TILE))) as engine:
        assert not engine.plan.tiled and engine.plan.tile_tokens == 0
        step(engine, 3 * TILE)
        assert engine.plan.tiled
        step(engine, 2 * TILE)
        assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes


def test_without_tiles_nothing_is_cut() -> None:
    with closing(outsize.prepare(zoo.make("llama"), rows_of(40), device="sim:1GiB", tile_tokens=0)) as engine:
        assert not engine.plan.tiled


def test_a_plan_with_other_tiles_is_refused() -> None:
    with closing(prepare(rows_of(40))) as engine:
        plan = engine.plan
    with pytest.raises(ConfigError, match=r"modules run over tiles of 8 tokens, but here .* over tiles of 16"):
        outsize.prepare(zoo.make("llama"), rows_of(40), device="sim:1GiB", tile_tokens=16, plan=plan)


@pytest.mark.parametrize("value", [-1, 2.5, True, "8"])
def test_a_length_that_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="tile_tokens"):
        outsize.prepare(zoo.make("llama"), rows_of(8), device="sim:1GiB", tile_tokens=value)
