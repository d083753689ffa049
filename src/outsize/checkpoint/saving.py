"""Saving: one save on its way to the disk.

No copy is made. Tensors that live on the device are written at once, one after the other; what lies in host memory may
be written by a thread while training goes on, chunk by chunk in the order of use, and a chunk's next update waits until
the chunk is written.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outsize.base.log import log
from outsize.checkpoint.contents import Contents, Item
from outsize.checkpoint.folder import StagedDir, os_errors_as_save_failed
from outsize.checkpoint.tensorfile import TensorFile


class Saving:
    """One save on its way."""

    def __init__(self, draft: StagedDir, contents: Contents, *, later: set[int]):
        """`later`: chunks that a thread may write."""
        self._draft, self._contents = draft, contents
        self._written = {chunk: threading.Event() for chunk in sorted(contents.items.keys() & later)}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        with self.writing():
            draft.require_space(contents.nbytes)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to write into; an error inside leaves nothing behind."""
        try:
            with os_errors_as_save_failed(self._draft.place):
                yield self._draft.path
        except BaseException:
            self._draft.discard()
            raise

    def write(
        self, publish: Callable[[StagedDir], None], then: Callable[[], None] | None = None, *, background: bool = False
    ) -> None:
        """Write all tensors, publish the folder, and call `then`. In the background this returns before the chunks that
        are `later` are written.
        """
        files: dict[str, TensorFile] = {}
        try:
            with self.writing() as folder:
                for name, specs in self._contents.specs.items():
                    files[name] = TensorFile.create(folder / name, specs, {"format": "pt"})
                for chunk in sorted(self._contents.items.keys() - self._written.keys()):
                    _write(self._contents.items[chunk], files)
        except BaseException:
            _close(files)
            raise
        if background:
            self._thread = threading.Thread(target=self._write_rest, args=(files, publish, then), name="outsize-save")
            try:
                self._thread.start()
                return
            except RuntimeError as error:  # no more threads
                log.warning("%s is saved in the foreground: %s", self._draft.place, error)
                self._thread = None
        self._write_rest(files, publish, then)
        self.finish()

    def _write_rest(
        self, files: dict[str, TensorFile], publish: Callable[[StagedDir], None], then: Callable[[], None] | None
    ) -> None:
        try:
            with self.writing():
                for chunk, written in self._written.items():
                    _write(self._contents.items[chunk], files)
                    written.set()
                _close(files)
                publish(self._draft)
            if then is not None:
                then()
        except BaseException as error:
            self._error = error
            if self._thread is not None:
                log.error("saving %s failed: %s", self._draft.place, error)  # in case that nobody comes to hear it
        finally:
            _close(files)
            for written in self._written.values():
                written.set()

    def wait_written(self, chunk: int) -> None:
        """Before a chunk is updated."""
        if chunk in self._written:
            self._written[chunk].wait()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until nobody reads or writes for it any more."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Until it is published; raises what went wrong."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _write(items: list[Item], files: dict[str, TensorFile]) -> None:
    for item in items:
        files[item.file].write(item.key, item.read())


def _close(files: dict[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
