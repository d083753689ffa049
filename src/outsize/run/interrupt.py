"""Ctrl-C: the first one lets the step end, saves and stops; the second one leaves at once. SIGTERM, as clusters send
it, counts as a first one.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import TrainerCallback


class Interrupt(TrainerCallback):
    def __init__(self, say: Callable[[str], None], *, leave: Callable[[], None]):
        """`leave` is called last, where no `finally` is."""
        self._say, self._leave = say, leave
        self.asked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.asked:
            control.should_save = True
            control.should_training_stop = True
        return control

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._leave()
            os._exit(128 + number)
        self.asked = True
        self._say("Finishing this step, then saving. Once more to leave at once, without saving.")
