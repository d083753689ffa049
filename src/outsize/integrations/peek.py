"""Reads the first batch of a loader for the plan, without changing what training reads.

A map-style dataset is read again, and so is a stream with `set_epoch`. Any other stream may allow one pass only: its
items that were read are kept and returned again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import IterableDataset

from outsize.base.errors import ConfigError
from outsize.device.rng import HostRng


def first_batch(loader: Any) -> Any:
    """On the CPU: a dict of tensors, or a list of rows in online training. The caller restores global generators."""
    # Not accelerate's loader: it reads one batch ahead and marks the start of an epoch in its gradient state.
    base = getattr(loader, "base_dataloader", loader)
    stream = getattr(base, "dataset", None)
    generators = [(generator, generator.get_state()) for generator in _generators(base)]
    with stream.peeking() if isinstance(stream, Rewound) else nullcontext():
        batch = next(iter(base), None)
    for generator, state in generators:
        generator.set_state(state)
    if getattr(base, "_iterator", None) is not None:
        base._iterator = None  # persistent workers would continue from here
    if batch is None:
        raise ConfigError("The training data has no batch. Check the dataset and dataloader_drop_last.")
    return batch if isinstance(batch, list) else dict(batch)


def _generators(loader: Any) -> list[torch.Generator]:
    """Generators of the loader's samplers, which may draw a new order for each pass (TRL's RepeatSampler)."""
    found, left = {}, [loader]
    while left:
        owner = left.pop()
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        left += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(owner, name, None)) is not None]
    return list(found.values())


def rewindable(dataset: Any) -> Any:
    """Wrap a stream that cannot be read again from its beginning; return other datasets as they are."""
    return Rewound(dataset) if isinstance(dataset, IterableDataset) and not hasattr(dataset, "set_epoch") else dataset


class Rewound(IterableDataset):
    """A stream whose first items can be peeked at. The next pass begins with them; later ones are the stream's own."""

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset
        self._peeking = False
        self._seen: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._before = self._after = HostRng.now()
        """Random state before and after the peeked items: a stream may draw random numbers for its items."""

    @contextmanager
    def peeking(self) -> Iterator[None]:
        self._peeking = True
        try:
            yield
        finally:
            self._peeking = False

    def __iter__(self) -> Iterator[Any]:
        if self._peeking:
            return self._peek()
        return iter(self.dataset) if self._rest is None else self._again()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if "dataset" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _peek(self) -> Iterator[Any]:
        if self._rest is None:
            self._before = HostRng.now()
            self._rest = iter(self.dataset)
        yield from list(self._seen)
        for item in self._rest:
            self._seen.append(item)
            self._after = HostRng.now()
            yield item

    def _again(self) -> Iterator[Any]:
        assert self._rest is not None
        seen, rest, self._seen, self._rest = self._seen, self._rest, [], None
        is_same = self._before.is_now()
        for number, item in enumerate(seen, 1):
            # The caller has restored the generators. The stream draws for these items only once.
            if is_same and number == len(seen):
                self._after.restore()
            yield item
        yield from rest
