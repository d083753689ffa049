"""Walks through the teacher's layers with the hidden states of many batches in a cache, one layer at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.device.device import Device
from outsize.methods.bypass.norm_statistics import NormStatistics
from outsize.methods.bypass.train import Batch
from outsize.model.stack import run
from outsize.run.prune_batches import Given
from outsize.run.prune_setup import PruneSetup
from outsize.transfer.batch_cache import BatchCache, BatchSpec


class Walk:
    """The hidden states of some batches: at first those that go into layer 0."""

    def __init__(
        self, setup: PruneSetup, specs: Sequence[BatchSpec], given: Callable[[int], Given], folder: Path | None
    ):
        """`given(place)`: the batch at a place of the cache. `folder`: of the cache's file; None: host memory."""
        self._setup, self._given, self.num_batches = setup, given, len(specs)
        self.cache = BatchCache(setup.device, specs, folder)
        for place in range(self.num_batches):
            with setup.device.on_host():
                batch = given(place)
            self.cache.write(place, setup.stack.capture(self._arguments(batch)).hidden)
        self.cache.finish()

    def batch_at(self, place: int, layer: int) -> Batch:
        device = self._setup.device
        with device.on_host():
            given = self._given(place)
        call = self._setup.stack.capture(self._arguments(given)).calls[layer]
        return Batch(call, put(device, given.valid), given.tokens)

    def _arguments(self, given: Given) -> dict[str, Any]:
        return {name: put(self._setup.device, value) for name, value in given.arguments.items()}

    @contextmanager
    def layer(self, index: int, make: Callable[[nn.Module], None] | None = None) -> Iterator[nn.Module]:
        """A layer of the teacher on the device. `make` gets it before, in host memory."""
        teacher, module = self._setup.teacher, self._setup.stack.layers[index].module
        params = list(module.parameters())
        teacher.load(params)
        try:
            if make is not None:
                with self._setup.device.on_host():
                    make(module)
            teacher.place(params)
            yield module
        finally:
            teacher.release(params)

    @torch.no_grad()
    def pass_through(self, layer: int, run_layer: Callable[[Batch, Tensor], Tensor]) -> None:
        """Replace the hidden states of all batches by what `run_layer` makes of them."""
        for place in range(self.num_batches):
            hidden = self.cache.read(place, min(place + 1, self.num_batches - 1))
            self.cache.write(place, run_layer(self.batch_at(place, layer), hidden))
        self.cache.finish()

    def skip(self, layer: int) -> None:
        """Pass through a layer that has nothing to train."""
        with self.layer(layer) as module:
            self.pass_through(layer, lambda batch, hidden: run(module, batch.call, hidden))

    def last_hidden_state(self, place: int, then: int) -> Tensor:
        """What the head gets of a batch, after all layers. `then`: the batch that is asked for next."""
        hidden = self.cache.read(place, then)
        with self._setup.device.on_host():
            given = self._given(place)
        return self._setup.stack.last_hidden_state(self._arguments(given), hidden)

    def run_outside(self, norms: NormStatistics) -> None:
        """Run what the model has before and after its layers, after all of them."""
        for place in range(self.num_batches):
            with self._setup.device.on_host():
                valid = self._given(place).valid
            with norms.listening(put(self._setup.device, valid)):
                self.last_hidden_state(place, min(place + 1, self.num_batches - 1))

    def close(self) -> None:
        self.cache.close()


def put(device: Device, value: Any) -> Any:
    return device.put(value) if isinstance(value, Tensor) else value
