"""Modules over tiles on CUDA: each tile as torch computes it, with the same dropout in backward, and the same bits
under every strategy.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

from collections.abc import Iterator
from typing import Any

import cells
import foreign_plans
import pytest
import torch
from kinds import test_families
from parity import test_tiles as parity
from torch import Tensor, nn
from unit.activation import test_tiles as unit

from outsize.model.strategies import STRATEGIES
from outsize.model.tensors import map_tensors

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("name", ["llama", "norm", "gpt2"])
def test_tiles_compute_what_torch_computes_of_each_tile(name: str) -> None:
    """Trap D48: dropout in a recomputed tile draws what its forward drew, and no more is drawn."""
    with torch.device(DEVICE):
        module = unit.made(name, torch.bfloat16).to(DEVICE)
        x = torch.randn(2, unit.TOKENS, 16).bfloat16().requires_grad_()
        wanted = unit.tile_by_tile(module, x)
        after = torch.rand(2)
        unit.assert_same(unit.over_tiles(module, x), wanted)
        assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "lora"])
def test_every_strategy_gives_the_bits_of_the_tiled_plain_loop(kind: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    planned = parity.batch(kind)
    names = parity.tiled_modules(parity.make(kind, torch.bfloat16), planned)
    data = [map_tensors(lambda t: t.to(DEVICE), parity.batch(kind, seed=seed)) for seed in range(2)]
    plain = parity.make(kind, torch.bfloat16).to(DEVICE)
    torch.manual_seed(7)
    with parity.tiled(plain, names):
        losses = test_families.run(plain, foreign_plans.reference(plain), loss, data)
    for strategy in STRATEGIES:
        model = parity.make(kind, torch.bfloat16)
        how: dict[str, Any] = dict(spec=foreign_plans.SPEC, device=DEVICE, strategy=strategy.name, depth=1)
        how |= dict(weights="host", optimizer="host", tile_tokens=parity.TILE)
        with cells.closing(cells.prepare_by_hand(model, planned, **how)) as engine:
            assert engine.plan.tiled == names
            torch.manual_seed(7)
            assert test_families.run(model, engine.optimizer, loss, data) == losses, strategy.name
        for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(value.cpu(), expected.cpu()), f"{strategy.name} {name}"
