"""Saving: one save on its way to the disk.

No copy is made. Tensors that live on the device are written at once, one after the other; what lies in host memory may be written by a thread
while training goes on, chunk by chunk in the order of use, and a chunk's next update waits until the chunk is written.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outsize.checkpoint.folder import Draft, telling
from outsize.model.tensorfile import TensorFile
from outsize.runtime.contents import Contents, Item


class Saving:
    """One save on its way."""

    def __init__(self, place: Path, *, num_bytes: int):
        self.place = place
        self._draft = Draft(place)
        self._draft.require_space(num_bytes)
        self._written: dict[int, threading.Event] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to write into; an error inside leaves nothing behind."""
        try:
            with telling(self.place):
                yield self._draft.path
        except BaseException:
            self._draft.discard()
            raise

    def write(self, contents: Contents, *, later: set[int], publish: Callable[[Draft], None]) -> None:
        """Write all tensors, those of the chunks `later` by a thread, and publish the folder when the last one is written."""
        with self.writing() as folder:
            files = {name: TensorFile.create(folder / name, specs, {"format": "pt"}) for name, specs in contents.specs.items()}
        self._written = {chunk: threading.Event() for chunk in sorted(contents.items.keys() & later)}
        try:
            with self.writing():
                for chunk in sorted(contents.items.keys() - later):
                    _write(contents.items[chunk], files)
        except BaseException:
            _close(files)
            raise

        def rest() -> None:
            try:
                with self.writing():
                    for chunk, done in self._written.items():
                        _write(contents.items[chunk], files)
                        done.set()
                    _close(files)
                    publish(self._draft)
            except BaseException as error:
                self._error = error
                self._draft.discard()
            finally:
                _close(files)
                for done in self._written.values():
                    done.set()

        if later:
            self._thread = threading.Thread(target=rest, name="outsize-save")
            self._thread.start()
        else:
            rest()
            self.finish()

    def wait_written(self, chunk: int) -> None:
        """Before a chunk is updated."""
        if chunk in self._written:
            self._written[chunk].wait()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Until it is published; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _write(items: list[Item], files: dict[str, TensorFile]) -> None:
    for item in items:
        files[item.file].write(item.key, item.read())


def _close(files: dict[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
