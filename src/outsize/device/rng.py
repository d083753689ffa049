"""Saves and restores the state of random generators: Python's, numpy's and torch's on the host, and the device's."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.device.device import Device


@dataclass(frozen=True, eq=False, slots=True)
class HostRng:
    """State of the generators of Python, numpy and torch on the CPU."""

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def now(cls) -> "HostRng":
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def is_now(self) -> bool:
        now = HostRng.now()
        same_numpy = all(np.array_equal(mine, theirs) for mine, theirs in zip(self.numpy, now.numpy, strict=True))
        return same_numpy and self.python == now.python and torch.equal(self.torch, now.torch)


@contextmanager
def host_rng_untouched() -> Iterator[None]:
    """Restore the host's generators at the end, for code without a device. Also works as a decorator."""
    host = HostRng.now()
    try:
        yield
    finally:
        host.restore()


@contextmanager
def rng_untouched(device: Device) -> Iterator[None]:
    """Restore all generators at the end of the block."""
    rewind = rewinder(device)
    try:
        yield
    finally:
        rewind()


def rewinder(device: Device) -> Callable[[], None]:
    """A function that restores all generators to their current state, each time it is called."""
    host, own = HostRng.now(), device.rng_state()

    def rewind() -> None:
        host.restore()
        device.set_rng_state(own)

    return rewind
