"""A bar for work that takes a while, on stderr: nothing is shown for what is done at once, nor where nobody watches."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")
_PATIENCE_SECONDS = 2.0


def counted(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """The items, with their count as soon as it takes long. `total`: how many there will be, where that is known."""
    count = TextColumn("{task.completed:,.0f}") if total is None else MofNCompleteColumn()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *(() if total is None else (BarColumn(bar_width=24),)), count, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=total)
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
