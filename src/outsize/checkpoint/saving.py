"""Saving: one save in progress, in the background or not.

Tensors are written directly from the buffers that hold them. Those on the GPU are written at once, one after the other.
A thread may write those in host memory during training, chunk by chunk in the order of use; the next update of a chunk
waits until the chunk is written.
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
    def __init__(self, staged: StagedDir, contents: Contents, *, later: set[int]):
        """`later`: chunks that a thread may write."""
        self._staged, self._contents = staged, contents
        self._written = {chunk: threading.Event() for chunk in sorted(contents.items.keys() & later)}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        with self.writing():
            staged.require_space(contents.nbytes)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield the folder to write into. An error inside removes it."""
        try:
            with os_errors_as_save_failed(self._staged.place):
                yield self._staged.path
        except BaseException:
            self._staged.discard()
            raise

    def write(
        self, publish: Callable[[StagedDir], None], then: Callable[[], None] | None = None, *, background: bool = False
    ) -> None:
        """Write all tensors, publish the folder, and call `then`. With `background`, a thread writes the chunks in
        `later`, publishes and calls `then`.
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
                log.warning("%s is saved in the foreground: %s", self._staged.place, error)
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
                publish(self._staged)
            if then is not None:
                then()
        except BaseException as error:
            self._error = error
            if self._thread is not None:
                log.error("saving %s failed: %s", self._staged.place, error)  # `finish` may not be called
        finally:
            _close(files)
            for written in self._written.values():
                written.set()

    def wait_written(self, chunk: int) -> None:
        """Block until this chunk is written."""
        if chunk in self._written:
            self._written[chunk].wait()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Block until the folder is published. Raises the error of the save, once."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _write(items: list[Item], files: dict[str, TensorFile]) -> None:
    for item in items:
        item.ranges().write(files[item.file], item.key)


def _close(files: dict[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
