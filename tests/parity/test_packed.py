"""Packed rows without masks under the engine: under every plan the plain loop's bits, with batches of other documents
than the planned one.
"""

from collections.abc import Callable
from typing import Any

import cells
import packed
import pytest
import torch

from outsize.optim.adamw import AdamW

SPEC = AdamW(lr=1e-2, max_grad_norm=cells.MAX_GRAD_NORM)
PLANNED = packed.batch(packed.documents(8, 3, 3, 2), packed.documents(15, 1))
DATA = [
    packed.batch(packed.documents(9, 7, seed=1), packed.documents(16, seed=2)),
    packed.batch(packed.documents(4, 4, 4, 4, seed=3), packed.documents(2, 14, seed=4)),
    packed.batch(packed.documents(15, 1, seed=5), packed.documents(5, 5, 6, seed=6)),
]
PLANS: dict[str, dict[str, Any]] = {
    "keep": dict(weights="gpu", optimizer="gpu"),
    "recompute": dict(strategy="recompute", weights="host", optimizer="host"),
    "offload": dict(strategy="offload", weights="host", optimizer="streamed", depth=2),
    "swap": dict(strategy="swap", weights="host", optimizer="host", depth=0),
}
DEFAULT = {("gemma3", "bf16", "offload"), ("mixtral", "fp32", "recompute"), ("llama", "bf16", "swap")}
CASES = [
    pytest.param(kind, dtype, plan, marks=[] if (kind, dtype, plan) in DEFAULT else [pytest.mark.full])
    for kind in packed.KINDS
    for dtype in ("fp32", "bf16")
    for plan in PLANS
]


@pytest.mark.parametrize(("kind", "dtype", "plan"), CASES)
def test_every_plan_gives_the_plain_loops_bits(
    kind: str, dtype: str, plan: str, parity_cell: Callable[[object], None]
) -> None:
    weights = torch.float32 if dtype == "fp32" else torch.bfloat16
    how = dict(steps=3, accumulate=2)
    expected = cells.plain(packed.model(kind, weights), DATA, spec=SPEC, **how)  # type: ignore[arg-type]
    model = packed.model(kind, weights)
    with cells.closing(
        cells.prepare_by_hand(model, PLANNED, spec=SPEC, device="sim:16GiB", accumulate=2, **PLANS[plan])
    ) as engine:
        found = cells.train(engine.model, engine.optimizer, DATA, engine=engine, **how)  # type: ignore[arg-type]
    cells.assert_same(found, expected)
    parity_cell((kind, dtype, plan))
