"""Offload of activations without a plan on a real GPU: traps D38, D39 and D45 of hidden-state offload."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.setup.activation_offload import enable_offload, offload_activations

pytestmark = pytest.mark.gpu
WIDTH, ROWS = 1024, 8192
INPUT_BYTES = ROWS * WIDTH * 2
BOUND = 2 + 1 + 1 + 3
"""Copies in flight, one, prefetched, and kept: inputs of layers on the GPU at once."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(self.up(x).tanh(), 0.1))


class Model(nn.Module):
    def __init__(self, num_layers: int, device: str = "cuda") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers)).to(device, torch.bfloat16)

    def forward(self, x: Tensor, checkpoint: Callable[..., Any] | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) if checkpoint is None else checkpoint(layer, x, use_reentrant=False)
        return x.float().square().mean()


def inputs(device: str = "cuda") -> Tensor:
    rng = torch.Generator(device).manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=rng, device=device, dtype=torch.bfloat16).requires_grad_()


def step(model: nn.Module, x: Tensor, **how: Any) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    loss = model(x, **how)
    loss.backward()
    assert x.grad is not None
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [loss.detach(), x.grad, *(grad.clone() for grad in grads), torch.rand(2, device=x.device)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["hidden_states", "legacy", "disk"])
def test_the_bits_are_those_of_torchs_checkpointing_d37(name: Any, tmp_path: Path) -> None:
    """Traps D37, D48: three steps, so that memory of the first is used again."""
    model, x = Model(10), inputs()
    expected = step(model, x, checkpoint=torch.utils.checkpoint.checkpoint)
    with offload_activations(model, name) as offload:
        for _ in range(3):
            assert same(step(model, x), expected)
        (queue,) = offload._queues.values()
        assert queue.arena.used_bytes == queue.num_in_flight == queue.num_returned == 0
        assert offload.num_sent == 3 * (10 if name == "legacy" else 7)
        if name == "hidden_states":
            assert all(memory.is_pinned() for memory in queue.arena.memory(0))


def peak(model: Model) -> int:
    """Above weights, gradients and what was there before."""
    x = inputs()
    step(model, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    for param in model.parameters():
        param.grad.zero_()  # type: ignore[union-attr]
    model(x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def offloaded_peak(num_layers: int) -> int:
    model = Model(num_layers)
    with outsize.hidden_states_offload(model):
        return peak(model)


def test_the_peak_does_not_depend_on_the_number_of_layers_d38() -> None:
    """Trap D38."""
    few, many = offloaded_peak(8), offloaded_peak(32)
    assert abs(many - few) <= INPUT_BYTES // 4
    # What one layer saves and makes in its backward comes on top. It is measured without the offload, which refuses a
    # model of one layer.
    assert many <= BOUND * INPUT_BYTES + peak(Model(1))


def test_late_copies_change_nothing_d39() -> None:
    """Trap D39: copies start late, behind a kernel that spins, and freed memory is overwritten as soon as it is reused."""
    model, x = Model(10), inputs()
    expected = step(model, x)
    with outsize.hidden_states_offload(model) as offload:
        step(model, x)
        (queue,) = offload._queues.values()
        streams = [queue._device._stream(lane) for lane in ("d2h", "h2d")]  # type: ignore[attr-defined]

        def delay(*_: Any) -> None:
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
            torch.full((ROWS, WIDTH), torch.nan, device="cuda", dtype=torch.bfloat16)

        for layer in model.layers:
            layer.register_forward_pre_hook(delay)
            layer.register_full_backward_pre_hook(delay)
        for _ in range(3):
            assert same(step(model, x), expected)


def test_backward_on_another_stream_d45() -> None:
    """Trap D45."""
    model, x = Model(10), inputs()
    expected = step(model, x)
    with outsize.hidden_states_offload(model):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(model, x)
        torch.cuda.current_stream().wait_stream(stream)
        assert same(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_another_device_d45() -> None:
    """Trap D45: the current device is the first, the layers and their inputs are on the second."""
    model, x = Model(10, "cuda:1"), inputs("cuda:1")
    expected = step(model, x)
    with outsize.hidden_states_offload(model) as offload:
        assert same(step(model, x), expected)
        assert list(offload._queues) == [torch.device("cuda:1")]


def test_the_allocator_of_the_process_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(10)
    offload = enable_offload(model, "hidden_states")
    step(model, inputs())
    offload.disable()
    assert "expandable segments" not in caplog.text
