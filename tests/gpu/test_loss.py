"""The loss in chunks on a real GPU: as full logits to rounding, in a fraction of their memory, without waiting for the
device.
"""

import gc
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.loss.chunked_loss import ChunkedLossPatch
from outsize.loss.cross_entropy import cross_entropy

pytestmark = pytest.mark.gpu
MiB = 2**20
VOCAB, HIDDEN, TOKENS = 32000, 1024, 8192


def head(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda", dtype=dtype) * 0.03).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), targets)


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, tensors)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).detach().norm() / expected.float().detach().norm())


def test_it_is_full_logits_to_rounding() -> None:
    hidden, weight, targets = head(torch.float32)
    expected, found = full(hidden, weight, targets), cross_entropy(hidden, weight, None, targets, chunk=1024)
    assert distance(found, expected) < 1e-6
    for one, other in zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert distance(one, other) < 1e-5


def test_in_bf16_it_is_about_as_near_to_fp32_as_full_logits() -> None:
    hidden, weight, targets = head(torch.bfloat16)
    truth = gradients(full(hidden.float(), weight.float(), targets), hidden, weight)
    usual = gradients(full(hidden, weight, targets), hidden, weight)
    found = gradients(cross_entropy(hidden, weight, None, targets, chunk=1024), hidden, weight)
    for one, other, true in zip(found, usual, truth, strict=True):
        assert distance(one, true) < 4 * distance(other, true)


def test_it_takes_one_chunk_and_does_not_wait_for_the_device() -> None:
    hidden, weight, targets = head(torch.bfloat16)
    num_items = torch.tensor(TOKENS, device="cuda")
    cross_entropy(
        hidden, weight, None, targets, chunk=1024, num_items=num_items
    ).backward()  # cuBLAS has its workspace now
    hidden.grad = weight.grad = None
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = cross_entropy(hidden, weight, None, targets, chunk=1024, num_items=num_items)
        (loss / 3).backward()
        cross_entropy(hidden, weight, None, targets, chunk=1024)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chunk = 1024 * VOCAB * (2 + 4)
    assert torch.cuda.max_memory_allocated() - before < 2 * (hidden.nbytes + weight.nbytes) + chunk + 16 * MiB


def test_equal_runs_have_equal_bits() -> None:
    hidden, weight, targets = head(torch.bfloat16)
    one, other = (gradients(cross_entropy(hidden, weight, None, targets, chunk=1024), hidden, weight) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB,
    )
    return (
        LlamaForCausalLM(LlamaConfig(**shape, use_cache=False, max_position_embeddings=8192)).to(torch.bfloat16).train()
    )


def test_plans_have_equal_bits_and_keep_to_their_estimate() -> None:
    ids = torch.randint(0, VOCAB, (2, 4096), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    losses = []
    torch.use_deterministic_algorithms(True)  # attention's backward is not by itself
    try:
        for pins in (None, outsize.Pins(n_persist=0, n_checkpoint=4)):
            with closing(outsize.prepare(model(), batch, gpu_memory="16GiB", pins=pins)) as engine:
                assert engine.plan.loss == "in chunks of 4096 tokens"
                found = []
                for _ in range(3):
                    out = engine.model(**batch)
                    out.loss.backward()
                    engine.optimizer.step()
                    found.append(float(out.loss.detach()))
                losses.append(found)
                assert engine.report().gpu_peak_bytes <= engine.plan.gpu_budget_bytes
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]


def test_the_seam_is_the_models_own_loss_to_rounding() -> None:
    ids = torch.randint(0, VOCAB, (1, 2048), device="cuda")
    plain = model().cuda().float()
    expected = plain(input_ids=ids, labels=ids).loss
    seam = ChunkedLossPatch(plain, 256)
    seam.attach()
    found = plain(input_ids=ids, labels=ids).loss
    seam.detach()
    assert distance(found, expected) < 1e-6
