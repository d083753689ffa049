"""Models and offloads of activations for tests, with any number of sets in flight and kept."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from threaded import ThreadedCpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.activation.layer_offload import LayerOffload
from outsize.device.device import Device, Event
from outsize.hardware.lanes import Lane
from outsize.model.discover import find_layers
from outsize.model.strategies import Strategy
from outsize.transfer.arena import Arena
from outsize.transfer.host_arena import HostArena
from outsize.transfer.transfer_queue import TransferQueue

WIDTH, ROWS = 8, 64
INPUT_BYTES = ROWS * WIDTH * 4
MiB = 2**20


class Layer(nn.Module):
    """With dropout. Takes a mask as a second argument, which all layers share."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        inner = torch.tanh(self.up(hidden_states)) * mask
        return hidden_states + self.down(nn.functional.dropout(inner, self.dropout))


class Model(nn.Module):
    """`num_calls`: each layer runs several times, so that weights do not grow with the number of calls."""

    def __init__(self, num_layers: int = 6, *, num_calls: int = 1, dropout: float = 0.25) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(num_layers))
        self.num_calls, self.run_layer = num_calls, _call

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(2 * WIDTH)
        x = self.stem(x)
        for layer in self.layers:
            for _ in range(self.num_calls):
                x = self.run_layer(layer, x, mask)
        return x.float().square().sum()


def _call(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return layer(x, mask)


def by_keywords(layer: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return layer(mask=mask, hidden_states=x)


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    return partial(checkpoint, use_reentrant=reentrant)


def inputs(rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def step(model: nn.Module, x: Tensor, *, autocast: bool = False) -> list[Tensor]:
    """Loss, gradients, and random numbers after forward and after backward."""
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x)
    after_forward = torch.rand(2)
    grads = torch.autograd.grad(loss, [x, *model.parameters()])
    return [loss.detach(), *grads, after_forward, torch.rand(2)]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def offloading(
    model: nn.Module,
    device: Device,
    strategy: Strategy = "offload",
    *,
    arena: Callable[[Device], Arena] = lambda device: HostArena(device, 16 * MiB),
    save_attention: bool = False,
    **how: int,
) -> Iterator[tuple[LayerOffload, TransferQueue]]:
    """`how`: of the queue. Its defaults are those of the public functions."""
    given: dict[str, Any] = {"max_in_flight": 2, "prefetch": 1, "keep_last": 3, **how}
    queue = TransferQueue(device, arena=arena(device), is_static=lambda tensor: False, **given)
    offload = LayerOffload(model, find_layers(model), strategy, lambda _: queue, save_attention=save_attention)
    try:
        yield offload, queue
    finally:
        offload.disable()


class RatedCpu(ThreadedCpu):
    """Copies take the seconds of the device's rates, on threads."""

    def submit(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        waits: Sequence[Event],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        seconds: float,
        name: str = "",
        blocks: bool = False,
    ) -> Event:
        def slow() -> None:
            time.sleep(seconds)
            work()

        return super().submit(
            lane, slow, waits=waits, reads=reads, writes=writes, seconds=seconds, name=name, blocks=blocks
        )
