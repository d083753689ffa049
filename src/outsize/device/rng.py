"""Where random generators stand: of Python, numpy and torch on the host, and of the device. To make again what was
made, with the same numbers.
"""

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
    """Where the generators of Python, numpy and torch on the CPU stand."""

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
    """The same of the host's generators alone, where no device is chosen yet. Also works as a decorator."""
    host = HostRng.now()
    try:
        yield
    finally:
        host.restore()


@contextmanager
def rng_untouched(device: Device) -> Iterator[None]:
    """Whatever is drawn inside is as if it had not been."""
    rewind = rewinder(device)
    try:
        yield
    finally:
        rewind()


def rewinder(device: Device) -> Callable[[], None]:
    """Puts all generators back to where they stand now, as often as it is called."""
    host, own = HostRng.now(), device.rng_state()

    def rewind() -> None:
        host.restore()
        device.set_rng_state(own)

    return rewind
