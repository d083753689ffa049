"""Fused LoRA layers on CUDA: PEFT's gradients up to rounding and PEFT's masks, less memory, no host sync, and the bits
of the plain loop under every strategy.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

from collections.abc import Iterator
from typing import Any

import cells
import foreign_plans
import pytest
import torch
from kinds import test_families
from parity import test_adapters as parity
from torch import nn
from torch.utils.checkpoint import checkpoint
from unit.lora import test_fuse as unit

import outsize
from outsize.model.tensors import map_tensors

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SIZES: dict[str, Any] = dict(hidden=512, mlp=1536, heads=8, kv=2, r=16)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def models(dtype: torch.dtype, dropout: float, kind: str = "llama") -> tuple[nn.Module, nn.Module]:
    """PEFT's, and the same fused."""
    model = unit.adapted(kind, dtype, lora_dropout=dropout, **SIZES).to(DEVICE)
    return model, unit.fused(model)


def inputs(dtype: torch.dtype, tokens: int = 300) -> torch.Tensor:
    return unit.inputs(dtype, SIZES["hidden"], tokens).detach().to(DEVICE).requires_grad_()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "biases"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 2e-2)], ids=str)
def test_gradients_are_pefts_with_the_same_masks(
    kind: str, dropout: float, dtype: torch.dtype, tolerance: float
) -> None:
    model, both = models(dtype, dropout, kind)
    assert unit.distance(unit.results(both, inputs(dtype)), unit.results(model, inputs(dtype))) < tolerance


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_has_the_same_bits(dropout: float) -> None:
    _, model = models(torch.bfloat16, dropout)
    expected = unit.results(model, inputs(torch.bfloat16))
    found = unit.results(model, inputs(torch.bfloat16), forward=lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_waits_for_the_gpu(dropout: float) -> None:
    _, model = models(torch.bfloat16, dropout)
    x = inputs(torch.bfloat16)
    model.layer.mlp(x).sum().backward()  # type: ignore[operator, union-attr]
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.layer.mlp(x).sum().backward()  # type: ignore[operator, union-attr]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_peak_memory_is_less_than_pefts(dropout: float) -> None:
    peaks = []
    for model in models(torch.bfloat16, dropout):
        x = inputs(torch.bfloat16, tokens=4096)
        model(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "outside of layers"])
def test_every_strategy_gives_the_bits_of_the_plain_loop(name: str) -> None:
    case = parity.dataclasses.replace(parity.FUSED[name], fused=True)
    data = [map_tensors(lambda t: t.to(DEVICE), batch) for batch in case.batches()]
    plain = case.model().to(DEVICE)
    losses = test_families.run(plain, foreign_plans.reference(plain), None, data)
    for homes, strategy in zip(("streamed", "mixed", "streamed", "resident"), parity.STRATEGIES, strict=True):
        model = case.model()
        decision = parity.functools.partial(parity.base_at, homes=homes, strategy=strategy)
        how: dict[str, Any] = dict(spec=foreign_plans.SPEC, device=DEVICE, chunk_bytes=parity.CHUNK_BYTES)
        with cells.closing(cells.prepare_by_hand(model, case.batches()[0], decision=decision, **how)) as engine:
            assert test_families.run(model, engine.optimizer, None, data) == losses, strategy
        for (path, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(value.cpu(), expected.cpu()), f"{strategy} {path}"


def test_four_bit_weights() -> None:
    pytest.importorskip("bitsandbytes")
    from unit.lora import test_four_bit

    model = test_four_bit.quantized(torch.bfloat16, lora_dropout=0.1).to(DEVICE)
    x = unit.inputs(torch.bfloat16, hidden=test_four_bit.HIDDEN).detach().to(DEVICE).requires_grad_()
    theirs = unit.results(model, x)
    assert unit.distance(unit.results(outsize.fuse_lora(model), x), theirs) < 2e-2
