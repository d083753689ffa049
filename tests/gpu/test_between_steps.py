"""Reads and writes of weights and gradients between steps on CUDA, where no guard runs after the first step: the same
bits as a plain loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.reference import AdamW as Reference
from outsize.schedule.pins import Pins

pytestmark = pytest.mark.gpu
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "use_cache": False,
}
PINS = {
    "resident": Pins(),
    "streamed": Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0, n_checkpoint=4, n_swap=0, n_offload=0),
    "streamed, updated on the gpu": Pins(n_persist=0, n_swap=0, n_offload=0),
    "resident, updated on the host": Pins(n_optimizer_gpu=0, n_optimizer_streamed=0, n_checkpoint=0),
    "state streamed": Pins(n_persist=2, n_optimizer_gpu=0, n_optimizer_streamed=6, n_swap=0, n_offload=0),
}
SPEC = outsize.AdamW(lr=1e-3, weight_decay=0.1)
torch_clip_grad_norm_ = nn.utils.clip_grad_norm_
Between = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, SHAPE["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.cuda(), "labels": ids.cuda()}


def train(model: nn.Module, optimizer: Any, before_step: Between, after_step: Between) -> tuple[list[float], list[Any]]:
    losses, seen = [], []
    for seed in range(4):
        loss = model(**batch(seed)).loss
        loss.backward()
        seen.append(before_step(model))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(after_step(model))
        losses.append(float(loss.detach()))
    return losses, seen


def assert_same_run(pins: str, before_step: Between, after_step: Between, dtype: torch.dtype) -> None:
    plain = make(dtype).cuda()
    reference = Reference(
        SPEC.param_groups(plain.named_parameters()),
        lr=SPEC.lr,
        betas=SPEC.betas,
        eps=SPEC.eps,
        weight_decay=SPEC.weight_decay,
    )
    wanted = train(plain, reference, before_step, after_step)
    model = make(dtype)
    engine = outsize.prepare(
        model, batch(0), optimizer=SPEC, pins=PINS[pins], chunk_bytes="256KiB", chunked_loss=False, gpu_memory="4GiB"
    )
    found = train(model, engine.optimizer, before_step, after_step)
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
    engine.detach()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu()), name


def nothing(model: nn.Module) -> None:
    return None


@torch.no_grad()
def read(model: nn.Module) -> dict[str, Any]:
    return {
        "data": {n: p.data.clone() for n, p in model.named_parameters()},
        "norm": {n: p.detach().float().norm() for n, p in model.named_parameters()},
        "foreach": torch._foreach_norm(list(model.parameters())),
        "histogram": {
            n: torch.histc(p.float().cpu(), 8) for n, p in model.named_parameters() if n.endswith("q_proj.weight")
        },
        "cpu": {n: p.cpu() for n, p in model.named_parameters()},
        "device": [p.data.device.type == "cuda" for p in model.parameters()],
    }


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_read_between_steps_are_the_weights(pins: str, dtype: torch.dtype) -> None:
    assert_same_run(pins, read, read, dtype)


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_averages(pins: str, place: str) -> None:
    averages: dict[int, Any] = {}

    def update(model: nn.Module) -> list[torch.Tensor]:
        if id(model) not in averages:
            averages[id(model)] = AveragedModel(make(torch.float32).to(place), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averages[id(model)].update_parameters(model)
        return [p.detach().clone() for p in averages[id(model)].parameters()]

    assert_same_run(pins, nothing, update, torch.float32)


@torch.no_grad()
def write(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)
    torch._foreach_mul_(list(model.parameters()), 0.999)
    torch.manual_seed(1)
    nn.init.normal_(model.model.layers[1].mlp.up_proj.weight, std=0.02)
    model.model.layers[2].mlp.down_proj.weight[3] = 0.5
    model.model.norm.weight.data = model.model.norm.weight.data * 1.01


@pytest.mark.parametrize("pins", PINS)
def test_writes_between_steps_are_kept(pins: str) -> None:
    """They went into a slot and were lost."""
    assert_same_run(pins, nothing, write, torch.float32)


def edit(model: nn.Module) -> Any:
    norm = torch_clip_grad_norm_(model.parameters(), 0.1)
    for param in model.parameters():
        param.grad.mul_(2.0)
    nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight) * 1e-3
    return norm, {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("pins", PINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_are_read_and_edited(pins: str, dtype: torch.dtype) -> None:
    assert_same_run(pins, edit, nothing, dtype)


@pytest.mark.parametrize("pins", PINS)
def test_gradients_edited_between_micro_batches_are_clipped_by_their_norm(pins: str) -> None:
    """An edit of a gradient on the host is a kernel, and copies on other lanes read and write the same memory."""

    def run(model: nn.Module, optimizer: Any, norm: Callable[[], torch.Tensor]) -> list[float]:
        norms = []
        for seed in range(4):
            model(**batch(2 * seed)).loss.backward()
            for param in model.parameters():
                param.grad.mul_(0.5)
            model(**batch(2 * seed + 1)).loss.backward()
            optimizer.step()
            norms.append(float(norm()))
            optimizer.zero_grad()
        return norms

    plain, model = make(torch.bfloat16).cuda(), make(torch.bfloat16)
    reference = Reference(plain.named_parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=0.1)
    engine = outsize.prepare(
        model, batch(0), optimizer=replace(SPEC, max_grad_norm=0.1), pins=PINS[pins], accumulate=2,
        chunk_bytes="256KiB", chunked_loss=False, gpu_memory="4GiB",
    )  # fmt: skip
    wanted = run(plain, reference, lambda: reference.grad_norm)
    assert run(model, engine.optimizer, lambda: engine.grad_norm) == wanted
    engine.detach()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu()), name


def test_a_walk_leaves_no_device_memory_behind() -> None:
    model = make(torch.bfloat16)
    engine = outsize.prepare(
        model, batch(0), optimizer=SPEC, pins=PINS["streamed"], chunk_bytes="256KiB", gpu_memory="4GiB"
    )
    train(model, engine.optimizer, nothing, nothing)
    engine.drain()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = [p.data for p in model.parameters()]
    total = sum(float(p.data.float().norm()) for p in model.parameters())
    assert total > 0 and len(held) > 0
    largest = max(p.numel() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before <= 3 * 4 * largest
    del held
    assert torch.cuda.memory_allocated() == before
    engine.detach()


def test_a_module_called_by_itself_and_generation_use_the_weights() -> None:
    plain = make(torch.float32).cuda()
    model = make(torch.float32)
    engine = outsize.prepare(
        model, batch(0), optimizer=SPEC, pins=PINS["streamed"], chunk_bytes="256KiB", gpu_memory="4GiB"
    )
    train(model, engine.optimizer, nothing, nothing)
    with engine.gathered() as values:
        plain.load_state_dict({n: v for n, v in values.items()}, strict=False)
    plain.tie_weights()
    x = torch.randn(2, 4, SHAPE["hidden_size"], device="cuda")
    with torch.no_grad():
        assert torch.equal(model.model.layers[3].mlp(x), plain.model.layers[3].mlp(x))
        assert torch.equal(
            model.get_input_embeddings()(batch(0)["input_ids"]), plain.get_input_embeddings()(batch(0)["input_ids"])
        )
        ids = batch(1)["input_ids"][:1, :8]
        assert torch.equal(
            model.eval().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0),
            plain.eval().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0),
        )
    engine.detach()
