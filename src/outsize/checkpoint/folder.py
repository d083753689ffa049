"""Folders that are whole or not there.

A *draft* is written beside its place under a name that nobody takes for a checkpoint, synced to the disk, and renamed
last. The manifest inside lists every file and its size and is written after all of them: a folder with a manifest that
holds is complete, any other is not. A complete folder is never changed again.
"""

import contextlib
import errno
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from outsize.base.errors import BadFile, SaveFailed, tell
from outsize.base.log import log
from outsize.base.units import show_bytes

MANIFEST = "outsize.json"
FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DRAFT = ".partial-"
_OLD = "-old"
# Who writes it: the machine and the process. Process ids come again, so the time of birth belongs to it.
_NAME = re.compile(
    re.escape(_DRAFT) + r"(?P<place>.+)@(?P<host>[^@]*)-(?P<pid>\d+)-(?P<born>\d+)-\d+(?P<old>-old)?", re.DOTALL
)
_NUMBERS = itertools.count()
_FOREIGN_SECONDS = 24 * 3600
"""A draft of another machine is taken for dead when nobody has written into it for so long."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StagedDir:
    def __init__(self, place: Path, *, replace: bool = False, inside: bool = False):
        # Links are followed once: whatever happens to them and to the working folder meanwhile, draft and place stay
        # together on one disk.
        self.place, self._replace = Path(os.path.realpath(place)), replace
        self.path = _draft_path(self.place / "files" if inside else self.place)
        with os_errors_as_save_failed(place):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()

    @classmethod
    def of(cls, place: Path, *, replace: bool = False) -> "StagedDir":
        """Of a folder that is to be there whole. `replace`: a checkpoint that is there now goes when this one is
        published.
        """
        recover_partial_saves(Path(os.path.realpath(place)).parent)
        _require_free(place, replace=replace)
        return cls(place, replace=replace)

    @classmethod
    def into(cls, place: Path) -> "StagedDir":
        """Of files for a folder that may hold other things."""
        if os.path.exists(place) and not os.path.isdir(place):
            raise SaveFailed(tell(f"{place} is a folder, or not there yet", "it is a file", "Name another folder"))
        recover_partial_saves(place)
        return cls(place, inside=os.path.isdir(place))  # which may be a disk of its own

    def require_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            do = "Free some, or lower save_total_limit; nothing was changed"
            raise SaveFailed(
                tell(f"{self.place} needs {show_bytes(num_bytes)} on the disk", f"{show_bytes(free)} is free", do)
            )

    def publish(self, facts: dict[str, Any]) -> None:
        """Make it the checkpoint: from now on it is there, whole, also after a power cut."""
        with os_errors_as_save_failed(self.place):
            inside = sorted(self.path.rglob("*"))
            files = {str(path.relative_to(self.path)): path.stat().st_size for path in inside if path.is_file()}
            for path in inside:
                _sync(path)
            # Not before: a draft with a manifest is one whose files are on the disk.
            with (self.path / MANIFEST).open("x") as manifest:
                manifest.write(json.dumps({"format": FORMAT, "files": files, **facts}, indent=1))
            _sync(self.path / MANIFEST)
            _sync(self.path)
            _require_free(self.place, replace=self._replace)
            old = _draft_path(self.place, _OLD)
            try:
                if self.place.exists():
                    self.place.rename(old)
                self.path.rename(self.place)
            except BaseException:
                if old.exists() and not self.place.exists():
                    old.rename(self.place)
                raise
            _sync(self.place.parent)
            shutil.rmtree(old, ignore_errors=True)

    def commit_files(self, is_stale: Callable[[str], bool] = lambda name: False) -> None:
        """For a folder that may hold other things: the files go into it one by one, each whole.

        Names in the folder that are stale (left by something of another shape) go first, and files that name others
        (.json) come last: a folder in between has too little, not what does not belong together.
        """
        with os_errors_as_save_failed(self.place):
            self.place.mkdir(exist_ok=True)
            inside = sorted(self.path.rglob("*"), key=lambda path: (path.suffix == ".json", path))
            for path in inside:
                _sync(path)
            stay = {path.name for path in inside if path.suffix != ".json"}
            for path in self.place.iterdir():
                if path.is_file() and is_stale(path.name) and path.name not in stay:
                    path.unlink()
            for path in inside:
                if path.is_file():
                    to = self.place / path.relative_to(self.path)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(to)
            self.discard()
            _sync(self.place)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def os_errors_as_save_failed(place: Path) -> Iterator[None]:
    """Errors of the file system as sentences."""
    try:
        yield
    except SaveFailed:
        raise
    except OSError as error:
        do = "Free some space, or save elsewhere" if error.errno in _NO_SPACE else "Give a place that can be written"
        found = f"{error.strerror or error} ({error.filename or place})"
        raise SaveFailed(tell(f"{place} can be written", found, f"{do}; what was saved before is as it was")) from error
    except SafetensorError as error:  # the library's own words for a file that it could not write
        raise SaveFailed(
            tell(
                f"{place} can be written",
                str(error),
                "Free some space, or save elsewhere; what was saved before is as it was",
            )
        ) from error


def _require_free(place: Path, *, replace: bool) -> None:
    """That a checkpoint may be put there. Only a checkpoint is replaced: not whatever else a path happens to name."""
    if not os.path.lexists(place):
        return
    if not replace:
        raise SaveFailed(
            tell(
                f"{place} is not there yet",
                "it is, and a checkpoint is never changed",
                "Name another folder, or remove it first",
            )
        )
    is_ours = place.is_dir() and (
        _CHECKPOINT.fullmatch(place.name) or (place / MANIFEST).exists() or not any(place.iterdir())
    )
    if not is_ours:
        raise SaveFailed(
            tell(
                f"{place} is a checkpoint that may be replaced",
                f"it has no {MANIFEST}",
                "Name another folder, or remove it first",
            )
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of a complete folder; any other is refused with the reason."""
    again = "Use another checkpoint: this one was not written to its end, or was changed"
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        files, version = dict(facts["files"]), facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(
            tell(f"{folder} is a checkpoint with {MANIFEST}", f"that cannot be read ({error})", again)
        ) from None
    if version != FORMAT:
        raise BadFile(
            tell(
                f"{folder} has the format {FORMAT}",
                f"it has {version}",
                "Read it with the version of outsize that wrote it",
            )
        )
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} are there" if path.is_file() else "it is not there"
            raise BadFile(tell(f"{path} has {size} bytes", found, again))
    return facts


def is_plain(folder: Path) -> bool:
    """Whether transformers' plain Trainer has written it. See integrations/plain.py."""
    return (folder / "trainer_state.json").is_file() and not (folder / MANIFEST).exists()


def checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete ones, by step."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            if is_plain(path):
                continue
            try:
                read_manifest(path)
            except BadFile as why:
                log.warning("%s is passed over: %s", path, why)
            else:
                found.append((int(match[1]), path))
    return sorted(found)


def newest(parent: Path) -> Path | None:
    recover_partial_saves(parent)
    found = checkpoints(parent)
    return found[-1][1] if found else None


def recover_partial_saves(parent: Path) -> None:
    """Clear up after runs that were killed: what was complete but for its rename is renamed, the new before the old;
    other drafts go.
    """
    for path in sorted(parent.glob(f"{_DRAFT}*"), key=lambda path: (path.name.endswith(_OLD), path)):
        match = _NAME.fullmatch(path.name)
        if match is None or _is_at_work(path, match):
            continue
        place = parent / match["place"]
        if place.exists() or not _is_complete(path):
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            path.rename(place)
        except OSError as error:
            log.warning("%s is complete but cannot be renamed to %s: %s", path, place, error.strerror)


def rotate(parent: Path, limit: int | None, *, keep: Path | None = None) -> None:
    """Remove all but the newest `limit` complete ones; the newest of all stays, and `keep`, which counts.

    Newest by when it was written: an earlier run in the same place may have gone further.
    """
    recover_partial_saves(parent)
    if not limit:
        return
    found = sorted((path for _, path in checkpoints(parent)), key=lambda path: (path / MANIFEST).stat().st_mtime_ns)
    stay = {path for path in found if path == found[-1] or (keep is not None and path.resolve() == keep.resolve())}
    for path in reversed(found):
        if len(stay) < limit:
            stay.add(path)
    for path in found:
        if path not in stay:
            log.info("removing %s (save_total_limit)", path)
            _remove(path)


def _remove(folder: Path) -> None:
    """Renamed first: a removal that is broken off leaves no half of a checkpoint."""
    gone = _draft_path(folder, _OLD)
    try:
        folder.rename(gone)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error.strerror)
    else:
        gone.unlink() if gone.is_symlink() else shutil.rmtree(gone, ignore_errors=True)


def _draft_path(place: Path, suffix: str = "") -> Path:
    pid = os.getpid()
    return place.parent / f"{_DRAFT}{place.name}@{platform.node()}-{pid}-{_born(pid)}-{next(_NUMBERS)}{suffix}"


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except BadFile:
        return False
    return True


def _is_at_work(draft: Path, match: "re.Match[str]") -> bool:
    """Whether its writer may still be writing. Of another machine only the time of the last write is known."""
    if match["host"] == platform.node():
        return abs(_born(int(match["pid"])) - int(match["born"])) < 2000  # a clock that is set shifts times of birth
    try:
        last = max(path.stat().st_mtime for path in (draft, *draft.rglob("*")))
    except OSError:
        return True  # somebody is changing it
    return time.time() - last < _FOREIGN_SECONDS


def _born(pid: int) -> int:
    """When a living process was started, in milliseconds; 0 for one that is not there, or is dead and not buried."""
    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return 0


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
