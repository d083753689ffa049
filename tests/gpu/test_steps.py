"""Many steps, no waiting, and the same bits whichever kernels and plans make them. A shape small enough to be quick,
large enough to stream.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.base.errors import PlanInfeasible
from outsize.optim import native, rule
from outsize.runtime.engine import Engine
from outsize.schedule.pins import Pins

pytestmark = pytest.mark.gpu
MiB = 2**20

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
PINS = {
    "resident": Pins(),
    "streamed": Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0, n_checkpoint=6, n_swap=0, n_offload=0),
    "streamed state": Pins(
        n_persist=2, n_optimizer_gpu=0, n_optimizer_streamed=6, n_checkpoint=6, n_swap=0, n_offload=0
    ),
    "mixed": Pins(n_persist=2, n_optimizer_gpu=6, n_offload=3, n_checkpoint=1, n_swap=1, n_buffer=3),
}


@pytest.fixture(autouse=True)
def _all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def batch(seed: int, rows: int = 4, tokens: int = 512) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, SHAPE["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def prepare(**how: Any) -> Engine:
    torch.manual_seed(0)
    how.setdefault("optimizer", outsize.AdamW(lr=1e-3, update="in_backward"))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, use_cache=False)).to(torch.bfloat16).train()
    return outsize.prepare(model, batch(0), device="cuda", chunk_bytes="16MiB", **how)


def step(engine: Engine, seed: int) -> torch.Tensor:
    out = engine.model(**batch(seed))
    with engine.last_backward():
        out.loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return out.loss.detach()


@pytest.mark.parametrize("update", ["in_backward", "after_step"])
def test_plans_and_kernels_give_the_same_bits(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = outsize.AdamW(lr=1e-3, update=update, max_grad_norm=None if update == "in_backward" else 0.5)
    found = {}
    torch.use_deterministic_algorithms(True)  # attention's backward is not by itself
    try:
        for kernels in ("native", "torch"):
            monkeypatch.setenv("OUTSIZE_KERNELS", "torch" if kernels == "torch" else "")
            rule.find_gpu_kernel.cache_clear()
            native.find_kernel.cache_clear()
            for name, pins in PINS.items():
                with closing(prepare(pins=pins, optimizer=spec)) as engine:
                    losses = [float(step(engine, seed)) for seed in range(3)]
                    with engine.gathered() as weights:
                        found[kernels, name] = losses, dict(weights)
    finally:
        torch.use_deterministic_algorithms(False)
        rule.find_gpu_kernel.cache_clear()
        native.find_kernel.cache_clear()
    losses, weights = found["native", "resident"]
    for key, (other_losses, other_weights) in found.items():
        assert other_losses == losses, key
        assert all(torch.equal(other_weights[name], value) for name, value in weights.items()), key


@pytest.mark.parametrize("name", PINS)
def test_backward_and_step_wait_for_nothing_but_updates_on_the_host(name: str) -> None:
    """A hidden synchronisation empties the queue of the GPU. The forward is left out: transformers itself looks at
    position ids there.
    """
    with closing(prepare(pins=PINS[name])) as engine:
        for seed in range(4):
            out = engine.model(**batch(seed))
            torch.cuda.set_sync_debug_mode("error" if seed > 1 else "default")
            try:
                with engine.last_backward():
                    out.loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_two_hundred_steps_at_the_tightest_plan_take_no_more_memory_than_five() -> None:
    with pytest.raises(PlanInfeasible) as refused:
        prepare(gpu_memory="1GiB")
    context = 2**30 - refused.value.allowed_bytes
    budget = int((refused.value.needed_bytes + context) * 1.04) + MiB  # the allocator's share grows with the budget
    with closing(prepare(gpu_memory=budget)) as engine:
        # Allocated before the first measurement: 200 losses that are kept one by one can take another page of 2 MiB,
        # if earlier tests have left no free blocks.
        losses = torch.zeros(200, device="cuda")
        for seed in range(5):
            losses[seed] = step(engine, seed)
        engine.drain()
        before, host = torch.cuda.memory_stats(), psutil.Process().memory_info().rss
        for seed in range(200):
            losses[seed] = step(engine, seed)
        engine.drain()
        after, host_growth = torch.cuda.memory_stats(), psutil.Process().memory_info().rss - host
        assert torch.isfinite(losses).all()
        for key in (
            "reserved_bytes.all.peak",
            "allocated_bytes.all.peak",
            "num_alloc_retries",
            "segment.all.peak",
            "num_ooms",
        ):
            assert after[key] <= before[key], (key, before[key], after[key])
        assert after["reserved_bytes.all.peak"] <= budget
        assert engine.report().gpu_peak_bytes <= engine.plan.gpu_budget_bytes
        assert host_growth < 32 * MiB
