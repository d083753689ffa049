"""The first batch of a loader, looked at without being taken: the plan is made for it, and training must not notice.

A dataset with items by number is simply read again, and so is a stream that knows epochs. Any other stream may have but
one pass: what was read of it is kept and given again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import IterableDataset

from outsize.base.errors import ConfigError, tell
from outsize.device.rng import HostRng


def first_batch(loader: Any) -> Any:
    """On the CPU: a dict of tensors, or a list of rows in online training. The caller restores global generators."""
    # Below accelerate: its loaders read one batch ahead, and tell its gradient state that an epoch has begun.
    base = getattr(loader, "base_dataloader", loader)
    stream = getattr(base, "dataset", None)
    generators = [(generator, generator.get_state()) for generator in _generators(base)]
    with stream.looking() if isinstance(stream, Rewound) else nullcontext():
        batch = next(iter(base), None)
    for generator, state in generators:
        generator.set_state(state)
    if getattr(base, "_iterator", None) is not None:
        base._iterator = None  # workers that persist would go on from here
    if batch is None:
        do = "Look at the dataset, and at dataloader_drop_last"
        raise ConfigError(tell("the data to plan for has at least one batch", "it has none", do))
    return batch if isinstance(batch, list) else dict(batch)


def _generators(loader: Any) -> list[torch.Generator]:
    """Those of its samplers, which may draw another order for each pass (TRL's RepeatSampler)."""
    found, left = {}, [loader]
    while left:
        owner = left.pop()
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        left += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(owner, name, None)) is not None]
    return list(found.values())


def rewindable(dataset: Any) -> Any:
    """The dataset itself where it can be read again from its beginning."""
    return Rewound(dataset) if isinstance(dataset, IterableDataset) and not hasattr(dataset, "set_epoch") else dataset


class Rewound(IterableDataset):
    """A stream whose first items can be looked at; the next pass begins with them. All later passes are the stream's
    own.
    """

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset
        self._looking = False
        self._seen: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._before = self._after = HostRng.now()
        """Around what was looked at: a stream may draw random numbers for its items."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def __iter__(self) -> Iterator[Any]:
        if self._looking:
            return self._look()
        return iter(self.dataset) if self._rest is None else self._again()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if "dataset" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _look(self) -> Iterator[Any]:
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
            # Whoever looked has put the generators back. What the stream drew for these items it draws only once.
            if is_same and number == len(seen):
                self._after.restore()
            yield item
        yield from rest
