"""Attention computed once, under the engine: all strategies give the plain loop's bits and random numbers, the kernel
runs once per layer, and the device has exactly the bytes that the plan names.

Attention with dropout (GPT-2 by default) or by hand (T5) is recomputed: its layers do not have these strategies.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cells
import packed
import pytest
import torch
import zoo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from outsize.activation import attention
from outsize.activation.attention import is_attention
from outsize.device.observer import push_mode, remove_mode
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.strategies import STRATEGIES
from outsize.optim.adamw import AdamW

SPEC = AdamW(lr=1e-2, max_grad_norm=cells.MAX_GRAD_NORM)
STEPS = 2
SAVING = ("recompute+attention", "offload+attention")
RECOMPUTED = ("t5", "gpt2-attention-dropout")
KINDS = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "packed", *RECOMPUTED)
PACKED = [packed.batch(packed.documents(8, 3, 5, seed=seed), packed.documents(15, 1, seed=seed)) for seed in range(2)]


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    if kind == "packed":
        return packed.model("qwen3", dtype)
    if kind == "gemma3":
        return packed.model("gemma3", dtype, attention="sdpa")
    if not kind.startswith("gpt2"):
        return zoo.make(kind, dtype)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=128, vocab_size=zoo.VOCAB, use_cache=False)
    config.attn_pdrop = 0.1 if kind == "gpt2-attention-dropout" else 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel._from_config(config, dtype=dtype).train()


def data_of(kind: str) -> list[Any]:
    return PACKED if kind == "packed" else cells.batches(kind if kind in zoo.KINDS else "llama", 2)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func):
            self.runs[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def counting() -> Iterator[Counting]:
    mode = Counting()
    push_mode(mode)
    yield mode
    remove_mode(mode)


def trained(kind: str, dtype: str, strategy: str, counting: Counting | None = None) -> tuple[Any, torch.Tensor, int]:
    """The outcome, the random state at the end, and by how many bytes the plan was wrong."""
    weights = torch.float32 if dtype == "fp32" else torch.bfloat16
    model, data = model_of(kind, weights), data_of(kind)
    if strategy == "plain":
        outcome = cells.plain(model, data, spec=SPEC, steps=STEPS)
        return outcome, torch.get_rng_state(), 0
    homes: dict[str, Any] = dict(weights="host", optimizer="gpu" if "offload" in strategy else "host", depth=1)
    device = SimDevice(lookup("16GiB"))
    with cells.closing(
        cells.prepare_by_hand(model, data[0], spec=SPEC, device=device, strategy=strategy, **homes)
    ) as engine:
        expected = {"keep"} if kind in RECOMPUTED and strategy in SAVING else {"keep", strategy}
        assert set(engine.plan.decision.strategies) == expected
        if counting is not None:
            counting.runs.clear()
        outcome = cells.train(engine.model, engine.optimizer, data, engine=engine, steps=STEPS, accumulate=1)
        rng = torch.get_rng_state()
        return outcome, rng, engine.plan.estimate.gpu_bytes - engine.report().gpu_peak_bytes


DEFAULT = {(kind, ("fp32", "bf16")[i % 2], s) for i, kind in enumerate(KINDS) for s in SAVING}
CASES = [
    pytest.param(kind, dtype, s.name, marks=[] if (kind, dtype, s.name) in DEFAULT else [pytest.mark.full])
    for kind in KINDS
    for dtype in ("fp32", "bf16")
    for s in STRATEGIES
]


@pytest.mark.parametrize(("kind", "dtype", "strategy"), CASES)
def test_every_strategy_has_the_bits_the_random_numbers_and_the_bytes(
    kind: str, dtype: str, strategy: str, parity_cell: Callable[[object], None]
) -> None:
    expected, rng, _ = trained(kind, dtype, "plain")
    found, rng_now, error = trained(kind, dtype, strategy)
    cells.assert_same(found, expected)
    assert torch.equal(rng_now, rng)
    assert error == 0 if kind != "t5" else error >= 0
    parity_cell((kind, dtype, strategy))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "packed"])
def test_the_kernel_runs_once_per_layer(kind: str, counting: Counting) -> None:
    runs = {}
    for strategy in ("recompute", *SAVING):
        trained(kind, "fp32", strategy, counting)
        [(_, runs[strategy])] = counting.runs.items()
    layers = 4
    assert runs == {"recompute": 2 * layers * STEPS, **dict.fromkeys(SAVING, layers * STEPS)}


@pytest.mark.parametrize("strategy", SAVING)
def test_a_corrupted_output_changes_the_weights(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = trained("llama", "fp32", strategy)
    back = attention._AttentionOutputs._return
    monkeypatch.setattr(attention._AttentionOutputs, "_return", lambda *given: back(*given).mul(1 + 2**-10))
    found, _, _ = trained("llama", "fp32", strategy)
    assert found.losses[0] == expected.losses[0] and found.norms != expected.norms
    assert any(not torch.equal(found.weights[name], value) for name, value in expected.weights.items())
