"""Handles Ctrl-C and SIGTERM: the first finishes the step, saves and stops; the second exits at once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback


class Interrupt(TrainerCallback):
    def __init__(self, say: Callable[[str], None], *, leave: Callable[[], object]):
        """`leave` is called before the process exits without `finally` blocks."""
        self._say, self._leave = say, leave
        self.is_requested = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.is_requested:
            control.should_save = True
            control.should_training_stop = True
        return control

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            self._leave()
            os._exit(128 + number)
        self.is_requested = True
        self._say("Finishing this step, then saving. Press again to exit at once without saving.")
