"""A bar for work that takes a while, on stderr: nothing is shown for what is done at once, nor where nobody watches.

It is drawn by whoever advances it: a thread that draws would run beside what is being timed. There is one at a time:
beside one that is shown, ours or another of rich's, there is no other.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

Item = TypeVar("Item")
_PATIENCE_SECONDS = 2.0
_REDRAW_SECONDS = 0.1
_shown: "Bar | None" = None


class Bar:
    def __init__(self, what: str, total: int | None = None):
        """`total`: how many there will be, where that is known. It may become known later, or grow."""
        self.total, self.done = total, 0
        console = Console(stderr=True)
        # A proxy is how rich prints above a bar that is there.
        is_watched = (console.is_interactive or console.is_jupyter) and not isinstance(sys.stderr, FileProxy)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), _Count(""), TimeElapsedColumn())
        # What is printed meanwhile comes above the bar, unless it goes to a file.
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not is_watched,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task(what, total=total)
        self._started = self._drawn = time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        global _shown
        self.done += 1
        now = time.monotonic()
        is_due = now - self._drawn > _REDRAW_SECONDS or self.done == self.total
        if now - self._started > _PATIENCE_SECONDS and is_due and _shown in (None, self):
            _shown, self._drawn = self, now
            self._progress.update(self._task, completed=self.done, total=self.total)
            self._progress.start()
            self._progress.refresh()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: Any) -> None:
        global _shown
        if _shown is self:
            _shown = None
            self._progress.stop()


class _Count(TextColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f}" + (f"/{task.total:,.0f}" if task.total is not None else ""))


def counted(items: Iterable[Item], what: str, *, total: int | None = None) -> Iterator[Item]:
    """The items, with their count as soon as it takes long. `total`: how many there will be, where that is known."""
    with Bar(what, total) as bar:
        for item in items:
            bar.advance()
            yield item
