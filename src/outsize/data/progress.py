"""A bar for work that takes a while: nothing is shown for what is done at once."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")
_PATIENCE_SECONDS = 2.0


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, with their count on stderr as soon as it takes long. How many there will be is not known: they are read as they come."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    started, shown = time.monotonic(), False
    try:
        for item in items:
            if not shown and time.monotonic() - started > _PATIENCE_SECONDS:
                bar.start()
                shown = True
            bar.advance(task)
            yield item
    finally:
        if shown:
            bar.stop()
