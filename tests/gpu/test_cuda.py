"""The engine on a real GPU. Run there with `make test-gpu PYTHON=python3`."""

import gc
import os
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.device.arena import pinned_arena
from outsize.device.choose import choose_device
from outsize.optim.adamw import RULE
from outsize.optim.rule import Scratch, update
from outsize.runtime.engine import Engine

pytestmark = pytest.mark.gpu
GiB = 2**30

SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}


def make(shape: str) -> LlamaForCausalLM:
    """Random bf16 weights on the CPU, drawn on the GPU because the CPU takes minutes."""
    config = LlamaConfig(**SHAPES[shape], use_cache=False, max_position_embeddings=8192)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rotary = LlamaForCausalLM(LlamaConfig(**{**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 8}))
    model.to_empty(device="cpu")
    model.tie_weights()
    for mine, theirs in zip(model.buffers(), rotary.buffers(), strict=True):
        mine.data = theirs.data.clone()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, p in model.named_parameters():
        draw = (
            torch.ones(p.shape)
            if "norm" in name
            else torch.randn(p.shape, device="cuda", generator=generator, dtype=torch.bfloat16) * 0.02
        )
        p.data.copy_(draw)
    return model.train()


def batch(shape: str, size: int = 2, tokens: int = 512, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, SHAPES[shape]["vocab_size"], (size, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train(engine: Engine, shape: str, steps: int, **how: Any) -> list[float]:
    losses = []
    for step in range(steps):
        out = engine.model(**batch(shape, seed=step, **how))
        out.loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(out.loss.detach()))
    return losses


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.cuda.set_per_process_memory_fraction(1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # updates on the host are what these tests wait for
    yield
    torch.set_num_threads(threads)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory_has_exactly_the_requested_size_and_is_pinned() -> None:
    """Trap C17."""
    pinned_arena(4096)  # the CUDA context is not what is measured
    before = psutil.Process().memory_info().rss
    buffer = pinned_arena(300 * 2**20 + 4096)
    assert buffer.is_pinned() and buffer[4096:].is_pinned() and buffer.numel() == 300 * 2**20 + 4096
    assert psutil.Process().memory_info().rss - before < 320 * 2**20


def test_the_torch_kernel_gives_the_same_bits_on_gpu_and_cpu() -> None:
    n = 1 << 20
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-32768, 32767, (n,), generator=g, dtype=torch.int32).to(torch.int16)
    grad = torch.where(
        torch.isfinite(bits.view(torch.bfloat16)), bits.view(torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)
    )
    host = [
        torch.randn(n, generator=g).bfloat16(),
        torch.zeros(n, dtype=torch.int16),
        torch.randn(n, generator=g) * 1e-20,
        torch.rand(n, generator=g) * 1e-38,
    ]
    card = [t.cuda() for t in host]
    for step in (1, 2, 3):
        hyper = RULE.numbers(dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1), step)
        for state, device in ((host, "cpu"), (card, "cuda")):
            scratch = Scratch(torch.empty(RULE.layout.scratch_bytes(1 << 18), dtype=torch.uint8, device=device))
            weight, lo, *moments = state
            update(RULE, weight, lo, moments, grad.to(device), numbers=hyper, clip=0.37109375, scratch=scratch)
    for ours, theirs in zip(card, host, strict=True):
        a, b = ours.cpu(), theirs
        same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
        assert bool(same.all()), int((~same).sum())


def test_three_very_different_plans_give_the_same_bits() -> None:
    """All streamed, mixed, all resident; with deterministic algorithms, since flash attention's backward is not by
    default.
    """
    torch.use_deterministic_algorithms(True)
    try:
        plans = {
            "streamed": outsize.Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0, n_offload=16, n_buffer=2),
            "mixed": outsize.Pins(
                n_persist=8, n_optimizer_gpu=6, n_optimizer_streamed=4, n_checkpoint=4, n_offload=4, n_swap=3
            ),
            "resident": outsize.Pins(n_swap=0, n_offload=0, n_checkpoint=0),
        }
        seen = {}
        for name, pins in plans.items():
            torch.manual_seed(0)
            spec = outsize.AdamW(lr=1e-4, max_grad_norm=1.0)
            engine = outsize.prepare(
                make("1b"), batch("1b"), optimizer=spec, device="cuda", pins=pins, chunk_bytes="64MiB"
            )
            losses = train(engine, "1b", 5)
            norm = float(engine.grad_norm)
            decision = engine.plan.decision
            seen[name] = (losses, norm, decision.strategies, decision.homes, len(engine.runtime.place.slots.slot_bytes))
            print(name, losses, norm, engine.report())
            engine.detach()
        assert seen["streamed"][:2] == seen["mixed"][:2] == seen["resident"][:2]
        for part in (2, 3, 4):
            assert len({str(facts[part]) for facts in seen.values()}) == 3
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_3b_shape_trains_under_16_gib() -> None:
    engine = outsize.prepare(
        make("3b"), batch("3b", 4, 1024), optimizer=outsize.AdamW(lr=1e-5), device="cuda", gpu_memory="16GiB"
    )
    losses = train(engine, "3b", 3, size=4, tokens=1024)
    reserved, outside = torch.cuda.max_memory_reserved(), choose_device("cuda")._outside  # type: ignore[attr-defined]
    print(losses, engine.report(), f"reserved {reserved / GiB:.2f} GiB, context and others {outside / GiB:.2f} GiB")
    assert reserved + outside <= 16 * GiB
    assert engine.report().gpu_peak_bytes <= engine.plan.gpu_budget_bytes + engine.device.overhead_bytes
    assert losses[-1] == losses[-1] and losses[-1] < 20
    engine.detach()


def test_a_7b_shape_starts_and_trains_under_24_gib_without_ever_being_whole_on_the_gpu() -> None:
    model = make("7b")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = sum(p.nbytes for p in model.parameters())
    pins = outsize.Pins(n_persist=0)
    engine = outsize.prepare(
        model,
        batch("7b", 2, 1024),
        optimizer=outsize.AdamW(lr=1e-5),
        device="cuda",
        gpu_memory="24GiB",
        host_memory="105GiB",
        pins=pins,
    )
    streamed = sum(engine.layout.chunks[c].nbytes for c in engine.runtime.place.slots.slot_of)
    assert streamed == sum(c.nbytes for c in engine.layout.chunks) >= weights
    assert engine.runtime.place.slots.total_bytes < weights / 4
    trial = engine.device.trial_peak_bytes  # type: ignore[attr-defined]
    print(f"profiling run at most {trial / GiB:.2f} GiB, weights {weights / GiB:.2f} GiB")
    assert trial < weights / 2, "prepare itself must not hold the model on the GPU"
    losses = train(engine, "7b", 2, size=2, tokens=1024)
    print(
        losses,
        engine.report(),
        f"reserved {torch.cuda.max_memory_reserved() / GiB:.2f} GiB, host "
        f"{psutil.Process().memory_info().rss / GiB:.1f} GiB",
    )
    assert torch.cuda.max_memory_reserved() <= 24 * GiB
    assert losses[-1] == losses[-1]


def test_the_allocator_is_quiet_after_warm_up() -> None:
    """Trap B9: no growth and no retries once the first steps are made."""
    engine = outsize.prepare(
        make("1b"),
        batch("1b"),
        optimizer=outsize.AdamW(lr=1e-5),
        device="cuda",
        chunk_bytes="64MiB",
        pins=outsize.Pins(n_persist=4, n_optimizer_gpu=4, n_offload=6, n_swap=3),
    )
    train(engine, "1b", 2)
    before = torch.cuda.memory_stats()
    train(engine, "1b", 3)
    after = torch.cuda.memory_stats()
    for key in ("reserved_bytes.all.peak", "num_alloc_retries", "num_device_alloc", "num_ooms"):
        assert after[key] == before[key], key
    engine.detach()


def test_every_update_ends_before_the_first_failure_is_raised() -> None:
    """Trap B15."""
    device = choose_device("cuda")
    done: list[int] = []

    def fails() -> None:
        raise ValueError("first")

    for work in (fails, lambda: done.append(1), fails, lambda: done.append(2)):
        device.submit("host", work, waits=[], reads=[], writes=[], seconds=0.0)
    with pytest.raises(ValueError, match="first"):
        device.synchronize()
    assert done == [1, 2]
    device.synchronize()


class _Named(torch.nn.Module):
    """Layers with dropout whose input comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x=x)
        return {"loss": x.square().sum()}


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def test_dropout_is_reproduced_on_the_gpu_also_for_keyword_inputs() -> None:
    norms = set()
    for pins in (outsize.Pins(), outsize.Pins(n_checkpoint=3), outsize.Pins(n_offload=3), outsize.Pins(n_swap=3)):
        model = _Named()
        x = torch.ones(32, 64)
        engine = outsize.prepare(model, {"x": x}, device="cuda", pins=pins, optimizer=outsize.AdamW(max_grad_norm=1.0))
        torch.manual_seed(7)
        for _ in range(2):
            model(x=x)["loss"].backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        norms.add(float(engine.grad_norm))
        engine.detach()
    assert len(norms) == 1, norms
