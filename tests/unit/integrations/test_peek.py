import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from outsize.base.errors import ConfigError
from outsize.integrations.peek import Rewound, first_batch, rewindable


class Counting(IterableDataset):
    """Counts anew in each pass."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"x": i} for i in range(self.length))

    def __len__(self) -> int:
        return self.length


class OneShot(IterableDataset):
    """As a socket or a pipe: what was read is gone."""

    name = "pipe"

    def __init__(self, length: int):
        self._items = iter(range(length))

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"x": i} for i in self._items)


class Drawing(IterableDataset):
    """Its items are random numbers."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        while True:
            yield {"x": random.random() + float(torch.rand(()))}


def take(loader: Any, count: int | None = None) -> list[float]:
    found = []
    for batch in loader:
        found += batch["x"].tolist()
        if count is not None and len(found) >= count:
            break
    return found


def loader_of(dataset: Any) -> Any:
    return DataLoader(rewindable(dataset), batch_size=2)


@pytest.mark.parametrize("looks", [0, 1, 3])
@pytest.mark.parametrize("stream", [Counting, OneShot])
def test_no_item_of_a_stream_is_lost_or_repeated(stream: Any, looks: int) -> None:
    loader = loader_of(stream(5))
    for _ in range(looks):
        assert first_batch(loader)["x"].tolist() == [0, 1]
    assert take(loader) == [0, 1, 2, 3, 4]
    assert take(loader) == ([0, 1, 2, 3, 4] if stream is Counting else [])


def test_a_look_at_another_loader_of_the_same_stream_is_enough() -> None:
    stream = Rewound(OneShot(5))
    assert first_batch(DataLoader(stream, batch_size=3))["x"].tolist() == [0, 1, 2]
    assert first_batch(DataLoader(stream, batch_size=4))["x"].tolist() == [0, 1, 2, 3]
    assert take(DataLoader(stream, batch_size=2)) == [0, 1, 2, 3, 4]


def test_a_look_in_the_middle_of_a_pass_is_a_new_pass() -> None:
    loader = loader_of(Counting(5))
    running = iter(loader)
    next(running)
    assert first_batch(loader)["x"].tolist() == [0, 1]
    assert next(running)["x"].tolist() == [2, 3]


def test_a_stream_that_draws_random_numbers_draws_the_same_ones() -> None:
    """The caller puts the generators back after the look, and the stream must not draw its first numbers a
    second time.
    """

    def numbers(look: bool) -> list[float]:
        torch.manual_seed(0), random.seed(0)
        loader = loader_of(Drawing())
        if look:
            before = random.getstate(), torch.get_rng_state()
            first_batch(loader)
            random.setstate(before[0]), torch.set_rng_state(before[1])
        return take(loader, 6)

    assert numbers(look=True) == numbers(look=False)


def test_generators_that_moved_on_after_the_look_are_left_alone() -> None:
    loader = loader_of(Drawing())
    first_batch(loader)
    torch.manual_seed(7)
    running = iter(loader)  # draws a number for its workers
    before = torch.get_rng_state()
    next(running)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_can_be_read_again_is_not_wrapped() -> None:
    by_number = [{"x": 1}]
    knows_epochs = pytest.importorskip("datasets").Dataset.from_list(by_number).to_iterable_dataset()
    assert rewindable(by_number) is by_number and rewindable(knows_epochs) is knows_epochs
    assert isinstance(rewindable(Counting(1)), Rewound)


def test_a_wrapped_stream_is_like_the_stream() -> None:
    stream = Rewound(OneShot(2))
    assert stream.name == "pipe" and not hasattr(stream, "column_names")
    with pytest.raises(TypeError, match="len"):
        len(stream)
    assert len(Rewound(Counting(3))) == 3 and len(DataLoader(Rewound(Counting(3)), batch_size=2)) == 2
    assert list(copy.copy(Rewound(Counting(2)))) == [{"x": 0}, {"x": 1}]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_begin_anew_after_a_look(persistent: bool) -> None:
    loader = DataLoader(OneShot(5), batch_size=2, num_workers=1, persistent_workers=persistent)
    assert first_batch(loader)["x"].tolist() == [0, 1]
    assert take(loader) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dataset", [Counting(0), OneShot(0)])
def test_data_without_a_batch_is_an_error(dataset: Any) -> None:
    with pytest.raises(ConfigError, match="dataloader_drop_last"):
        first_batch(loader_of(dataset))
