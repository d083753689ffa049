"""A progress bar on stderr for work that takes more than two seconds. Shown only in terminals and notebooks.

`advance` draws it: a drawing thread would disturb timings. Only one bar is shown at a time, ours or another of rich's.
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
        """`total`: if known. It may be set later, or grow."""
        self.total, self.done = total, 0
        console = Console(stderr=True)
        # stderr is a FileProxy while rich shows another bar.
        is_shown = (console.is_interactive or console.is_jupyter) and not isinstance(sys.stderr, FileProxy)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), _Count(""), TimeElapsedColumn())
        # Other output is printed above the bar, unless it goes to a file.
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not is_shown,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task(what, total=total)
        self._started = self._drawn = time.monotonic()

    def advance(self) -> None:
        """Count one more item."""
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
    """Yield the items and show their count if they take long. `total`: if known."""
    with Bar(what, total) as bar:
        for item in items:
            bar.advance()
            yield item
