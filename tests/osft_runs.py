"""Prepared models that train by OSFT, for the tests of whole runs."""

from typing import Any

import torch
import zoo
from cells import CHUNK_BYTES, closing
from torch import Tensor, nn

import outsize
from outsize.runtime.engine import Engine

HALF = outsize.OSFT(unfreeze_rank_ratio=0.5)
TIGHT = outsize.Pins(n_persist=0, n_buffer=1, n_optimizer_gpu=0, n_optimizer_streamed=0)
MIXED = outsize.Pins(n_persist=4, n_optimizer_gpu=4, n_optimizer_streamed=3)
PLANS = {"roomy": None, "tight": TIGHT, "mixed": MIXED}


def prepare(
    model: nn.Module | None = None,
    pins: outsize.Pins | None = None,
    method: Any = HALF,
    dtype: torch.dtype = torch.bfloat16,
) -> Engine:
    model = zoo.make("plain", dtype) if model is None else model
    optimizer = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)
    batch = zoo.batch("plain")
    return outsize.prepare(
        model, batch, optimizer=optimizer, method=method, device="sim:1GiB", pins=pins, chunk_bytes=CHUNK_BYTES
    )


def step(engine: Engine, seed: int) -> float:
    loss = engine.model(**zoo.batch("plain", seed=seed)).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return float(loss.detach())


def values(engine: Engine) -> dict[str, Tensor]:
    with engine.gathered() as found:
        return {name: value.clone() for name, value in found.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def uninterrupted(steps: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[float], dict[str, Tensor]]:
    with closing(prepare(dtype=dtype)) as engine:
        return [step(engine, seed) for seed in range(steps)], values(engine)


def engine_names(state: dict[str, Any]) -> list[tuple[str, dict[str, Tensor]]]:
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    return [(names[i], one) for i, one in state["state"].items()]


def named_state(engine: Engine) -> list[tuple[str, dict[str, Tensor]]]:
    return [(name, engine.optimizer_state(name)) for name in engine.optimizer.names]
