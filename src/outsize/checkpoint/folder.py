"""Folders that are complete or absent.

A folder is written beside its final place under a temporary name (a *staged* folder), synced to disk, and renamed last.
Its manifest lists every file with its size and is written after all of them: a folder whose manifest matches is
complete, any other is not. A complete folder is never changed again.
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

from outsize.base.errors import BadFile, ConfigError, SaveFailed
from outsize.base.log import log
from outsize.base.units import show_bytes

MANIFEST = "outsize.json"
NAME_ONE = "Name a checkpoint, or the output_dir of a run."
FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STAGED = ".partial-"
_OLD = "-old"
# The name says who writes it: host, process and the process's start time, since process ids are reused.
_NAME = re.compile(
    re.escape(_STAGED) + r"(?P<place>.+)@(?P<host>[^@]*)-(?P<pid>\d+)-(?P<started>\d+)-\d+(?P<old>-old)?", re.DOTALL
)
_NUMBERS = itertools.count()
_FOREIGN_SECONDS = 24 * 3600
"""A staged folder of another host counts as abandoned after so long without a write."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNCHANGED = "Earlier saves are unchanged."
_INCOMPLETE = "It was not written to its end, or was changed since: use another checkpoint."


class StagedDir:
    def __init__(self, place: Path, *, replace: bool = False, inside: bool = False):
        # Links are resolved once, so that staged folder and final place stay on one disk if links or the working
        # directory change.
        self.place, self._replace = Path(os.path.realpath(place)), replace
        self.path = _staged_path(self.place / "files" if inside else self.place)
        with os_errors_as_save_failed(place):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()

    @classmethod
    def of(cls, place: Path, *, replace: bool = False) -> "StagedDir":
        """For a folder that is published as a whole. `replace`: publishing it removes a checkpoint of the same name."""
        recover_partial_saves(Path(os.path.realpath(place)).parent)
        _require_free(place, replace=replace)
        return cls(place, replace=replace)

    @classmethod
    def into(cls, place: Path) -> "StagedDir":
        """For files of a folder that may hold other files."""
        if os.path.exists(place) and not os.path.isdir(place):
            raise SaveFailed(f"{place}: it is a file, not a folder. Name another folder.")
        recover_partial_saves(place)
        return cls(place, inside=os.path.isdir(place))  # the folder may be a mount point

    def require_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            raise SaveFailed(
                f"{self.place} needs {show_bytes(num_bytes)} of disk space, but {show_bytes(free)} is free. "
                "Free some, or lower save_total_limit. Nothing was changed."
            )

    def publish(self, facts: dict[str, Any]) -> None:
        """Write the manifest and rename the folder to its place. Everything is on disk when this returns."""
        with os_errors_as_save_failed(self.place):
            self._set_modes()
            inside = sorted(self.path.rglob("*"))
            files = {str(path.relative_to(self.path)): path.stat().st_size for path in inside if path.is_file()}
            for path in inside:
                sync(path)
            # Only now: a staged folder with a manifest has all its files on disk.
            with (self.path / MANIFEST).open("x") as manifest:
                manifest.write(json.dumps({"format": FORMAT, "files": files, **facts}, indent=1))
            sync(self.path / MANIFEST)
            sync(self.path)
            _require_free(self.place, replace=self._replace)
            old = _staged_path(self.place, _OLD)
            try:
                if self.place.exists():
                    self.place.rename(old)
                self.path.rename(self.place)
            except BaseException:
                if old.exists() and not self.place.exists():
                    old.rename(self.place)
                raise
            sync(self.place.parent)
            shutil.rmtree(old, ignore_errors=True)

    def commit_files(self, is_stale: Callable[[str], bool] = lambda name: False) -> None:
        """Move the files one by one into a folder that may hold others.

        Stale files (of an earlier save with other file names) are removed first, and files that name others (.json)
        are moved last: an interrupted commit leaves files missing, never files of two saves together.
        """
        with os_errors_as_save_failed(self.place):
            self.place.mkdir(exist_ok=True)
            self._set_modes()
            inside = sorted(self.path.rglob("*"), key=lambda path: (path.suffix == ".json", path))
            for path in inside:
                sync(path)
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
            sync(self.place)

    def _set_modes(self) -> None:
        """Files may be read as the user's umask says. safetensors writes files that only their owner can read."""
        mode = self.path.stat().st_mode & 0o666
        for path in self.path.rglob("*"):
            if path.is_file():
                path.chmod(mode)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def os_errors_as_save_failed(place: Path) -> Iterator[None]:
    """Raise errors of the file system as SaveFailed, with a remedy."""
    try:
        yield
    except SaveFailed:
        raise
    except OSError as error:
        do = "Free some space, or save elsewhere." if error.errno in _NO_SPACE else "Name a folder that can be written."
        found = f"{error.strerror or error} ({error.filename or place})"
        raise SaveFailed(f"{place} cannot be written: {found}. {do} {_UNCHANGED}") from error
    except SafetensorError as error:
        found = str(error).rstrip(".")
        raise SaveFailed(
            f"{place} cannot be written: {found}. Free some space, or save elsewhere. {_UNCHANGED}"
        ) from error


def _require_free(place: Path, *, replace: bool) -> None:
    """Raise unless a checkpoint may be put there. Only checkpoints are replaced, not other things of that name."""
    if not os.path.lexists(place):
        return
    if not replace:
        raise SaveFailed(
            f"{place} exists already, and a checkpoint is never changed. Name another folder, or remove it first."
        )
    is_ours = place.is_dir() and (
        _CHECKPOINT.fullmatch(place.name) or (place / MANIFEST).exists() or not any(place.iterdir())
    )
    if not is_ours:
        raise SaveFailed(
            f"{place} cannot be replaced: it has no {MANIFEST}, so it is not a checkpoint. "
            "Name another folder, or remove it first."
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder. Raises BadFile for any other, with the reason."""
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        files, version = dict(facts["files"]), facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(
            f"{folder} is not a complete checkpoint: {MANIFEST} cannot be read ({error}). {_INCOMPLETE}"
        ) from None
    if version != FORMAT:
        raise BadFile(
            f"{folder} has the checkpoint format {version}, but this version of outsize reads format {FORMAT}. "
            "Read it with the version that wrote it."
        )
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            raise BadFile(f"{path} is missing. {_INCOMPLETE}")
        if (found := path.stat().st_size) != size:
            raise BadFile(f"{path} has {found} bytes instead of {size}. {_INCOMPLETE}")
    return facts


def require_exists(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder. {NAME_ONE}")


def is_plain(folder: Path) -> bool:
    """Whether it is a checkpoint of transformers' plain Trainer. See integrations/plain.py."""
    return (folder / "trainer_state.json").is_file() and not (folder / MANIFEST).exists()


def is_staged(folder: Path) -> bool:
    """Whether it is being written, or was abandoned by a killed process."""
    return folder.name.startswith(_STAGED)


def checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, by step."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir() and not is_plain(path):
            try:
                read_manifest(path)
            except BadFile as why:
                log.warning("%s is skipped: %s", path, why)
            else:
                found.append((int(match[1]), path))
    return sorted(found)


def newest(parent: Path) -> Path | None:
    recover_partial_saves(parent)
    found = checkpoints(parent)
    return found[-1][1] if found else None


def recover_partial_saves(parent: Path) -> None:
    """Clean up after killed processes: rename folders that were complete except for their rename (new before old), and
    remove other staged folders.
    """
    for path in sorted(parent.glob(f"{_STAGED}*"), key=lambda path: (path.name.endswith(_OLD), path)):
        match = _NAME.fullmatch(path.name)
        if match is None or _is_in_use(path, match):
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
    """Remove all but the newest `limit` complete checkpoints. The newest one and `keep` always stay; they count.

    The time of writing decides: an earlier run in the same folder may have reached a later step.
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
    """Rename first, so that an interrupted removal leaves no incomplete checkpoint."""
    removed = _staged_path(folder, _OLD)
    try:
        folder.rename(removed)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error.strerror)
    else:
        removed.unlink() if removed.is_symlink() else shutil.rmtree(removed, ignore_errors=True)


def _staged_path(place: Path, suffix: str = "") -> Path:
    pid = os.getpid()
    return place.parent / f"{_STAGED}{place.name}@{platform.node()}-{pid}-{_started(pid)}-{next(_NUMBERS)}{suffix}"


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except BadFile:
        return False
    return True


def _is_in_use(staged: Path, match: "re.Match[str]") -> bool:
    """Whether its process may still write to it. For another host, the time of the last write decides."""
    if match["host"] == platform.node():
        return abs(_started(int(match["pid"])) - int(match["started"])) < 2000  # setting the clock shifts start times
    try:
        last = max(path.stat().st_mtime for path in (staged, *staged.rglob("*")))
    except OSError:
        return True  # it is being changed
    return time.time() - last < _FOREIGN_SECONDS


def _started(pid: int) -> int:
    """Start time of a live process in milliseconds; 0 if there is none of this id, or only a zombie."""
    try:
        process = psutil.Process(pid)
        return 0 if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return 0


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
