"""The garbage collector beside a run: in the middle of a step it leaves alone what was there before.

A full collection walks every object of the process: 0.17 s once torch and transformers are imported, twice that beside updates on the host, and the device
waits for it. A decoder's steps bring one about now and then, each step of a vision-language model three or four. What outlived a collection between steps
is there to stay, so it is frozen: collections within a pass walk what came since. Between passes a full collection walks everything again: whoever drops an
engine and calls gc.collect() has its memory back.
"""

import gc
import threading
import weakref
from typing import Any

import torch

from outsize.model.course import Course

_courses: "weakref.WeakSet[Course]" = weakref.WeakSet()
"""Of engines that train."""


def begin(course: Course) -> None:
    """From here on collections within passes are short. The first time, this is a full one."""
    if course in _courses:
        return
    _courses.add(course)
    weakref.finalize(course, _end_if_last).atexit = False  # of an engine that is dropped without a word
    if _at_collection not in gc.callbacks:
        gc.callbacks.append(_at_collection)
    gc.collect()


def end(course: Course) -> None:
    _courses.discard(course)
    _end_if_last()


def _end_if_last() -> None:
    if not list(_courses) and _at_collection in gc.callbacks:
        gc.callbacks.remove(_at_collection)
        gc.unfreeze()


def _at_collection(phase: str, info: dict[str, Any]) -> None:
    if info["generation"] == 2 and not _is_in_a_pass():
        gc.unfreeze() if phase == "start" else gc.freeze()


def _is_in_a_pass() -> bool:
    """Lanes and autograd have threads of their own; what the main thread does outside of a forward and a backward is between passes."""
    is_main = threading.current_thread() is threading.main_thread()
    return not is_main or torch._C._current_graph_task_id() != -1 or any(course.is_open for course in _courses)
