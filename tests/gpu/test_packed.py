"""Attention of packed rows on CUDA: `varlen` computes each document as it is alone, syncs nothing, and trains the same
bits under every plan.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

from collections.abc import Iterator
from typing import Any

import cells
import foreign_plans
import packed
import pytest
import torch
from kinds import test_families
from torch import Tensor, nn

from outsize.model.packed_attention import _varlen, packed_attention
from outsize.model.tensors import map_tensors

pytestmark = pytest.mark.gpu
LENGTHS = (300, 1, 129, 82)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def random(head_dim: int) -> list[Tensor]:
    """Queries of eight heads, keys and values of two, and a gradient."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), heads, head_dim, generator=rng).bfloat16() for heads in (8, 2, 2, 8)]


def results(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, lengths: tuple[int, ...], window: int
) -> list[Tensor]:
    """The result and the gradients. CPU tensors are computed by the CPU's operator."""
    given = [part.detach().requires_grad_() for part in (query, key, value)]
    offsets = torch.tensor([0, *lengths, 0]).cumsum(0).int().to(query.device)
    settings = offsets, max(lengths), window, query.shape[-1] ** -0.5
    out = _varlen(*given, *settings) if query.is_cuda else packed_attention(*given, *settings)[0]
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 100])
def test_varlen_is_the_cpus_operator_to_rounding(head_dim: int, window: int) -> None:
    tensors = random(head_dim)
    truth = results(*(part.float() for part in tensors), LENGTHS, window)  # type: ignore[arg-type]
    found = results(*(part.cuda() for part in tensors), LENGTHS, window)  # type: ignore[arg-type]
    for one, true in zip(found, truth, strict=True):
        assert float((one.cpu().float() - true).norm() / true.norm()) < 1e-2


def test_a_document_has_the_bits_it_has_alone() -> None:
    tensors = [part.cuda() for part in random(128)]
    together = results(*tensors, LENGTHS, 0)  # type: ignore[arg-type]
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = results(*(tensor[part] for tensor in tensors), (length,), 0)  # type: ignore[arg-type]
        assert all(torch.equal(one, whole[part]) for one, whole in zip(alone, together, strict=True))
        start += length


def test_a_training_step_of_a_packed_row_waits_for_nothing_and_has_no_mask() -> None:
    torch.use_deterministic_algorithms(False)
    model: Any = packed.model("qwen3", torch.bfloat16).cuda()
    model.get_input_embeddings().requires_grad_(False)  # its backward sorts
    batch = map_tensors(lambda t: t.cuda(), packed.batch(packed.documents(3000, 1000, 96)))
    model(**batch).loss.backward()  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_every_plan_gives_the_plain_loops_bits(kind: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    planned = packed.batch(packed.documents(8, 3, 3, 2), packed.documents(15, 1))
    rows = [
        packed.batch(packed.documents(9, 7, seed=1), packed.documents(16, seed=2)),
        packed.batch(packed.documents(4, 4, 4, 4, seed=3), packed.documents(2, 14, seed=4)),
    ]
    data = [map_tensors(lambda t: t.cuda(), batch) for batch in rows]
    plain = packed.model(kind, torch.bfloat16).cuda()
    losses = test_families.run(plain, foreign_plans.reference(plain), loss, data)
    for strategy in ("keep", "recompute", "offload", "swap"):
        model = packed.model(kind, torch.bfloat16)
        how: dict[str, Any] = dict(spec=foreign_plans.SPEC, device="cuda", strategy=strategy)
        how |= dict(weights="host", optimizer="host", depth=1)
        with cells.closing(cells.prepare_by_hand(model, planned, **how)) as engine:
            assert test_families.run(model, engine.optimizer, loss, data) == losses, strategy
        for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(value.cpu(), expected.cpu()), name
