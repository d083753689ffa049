"""Folders that are whole or not there.

A *draft* is written beside its place under a name that nobody takes for a checkpoint, synced to the disk, and renamed last. The manifest inside
lists every file and its size and is written after all of them: a folder with a manifest that holds is complete, any other is not. A complete
folder is never changed again.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from outsize.base.errors import BadFile, SaveFailed, tell
from outsize.base.log import log
from outsize.base.units import show_bytes

MANIFEST = "outsize.json"
FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DRAFT = ".partial-"
_OLD = "-old"
_NAME = re.compile(re.escape(_DRAFT) + r"(.+)-(\d+)-(\d+)-\d+(-old)?")
_NUMBERS = itertools.count()


class Draft:
    def __init__(self, place: Path):
        self.place = place
        # Who writes it: process ids come again, so the time of birth belongs to it.
        self.path = place.parent / f"{_DRAFT}{place.name}-{os.getpid()}-{_born(os.getpid())}-{next(_NUMBERS)}"
        with telling(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()

    def require_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            self.discard()
            do = "Free some, or lower save_total_limit; nothing was changed"
            raise SaveFailed(tell(f"{self.place} needs {show_bytes(num_bytes)} on the disk", f"{show_bytes(free)} is free", do))

    def publish(self, facts: dict[str, Any], *, replace: bool = False) -> None:
        """Make it the checkpoint: from now on it is there, whole, also after a power cut."""
        with telling(self.place):
            files = {str(path.relative_to(self.path)): path.stat().st_size for path in sorted(self.path.rglob("*")) if path.is_file()}
            for name in files:
                _sync(self.path / name)
            manifest = self.path / MANIFEST
            manifest.write_text(json.dumps({"format": FORMAT, "files": files, **facts}, indent=1))
            _sync(manifest)
            _sync(self.path)
            old = None
            if self.place.exists():
                if not replace:
                    raise FileExistsError(17, "it is there already, and a checkpoint is never changed")
                old = self.path.with_name(self.path.name + _OLD)
                self.place.rename(old)
            self.path.rename(self.place)
            _sync(self.place.parent)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)

    def publish_into(self) -> None:
        """For a folder that may hold other things: the files go into it one by one, each whole, those that name others last."""
        with telling(self.place):
            self.place.mkdir(exist_ok=True)
            names = sorted((p.name for p in self.path.iterdir()), key=lambda name: (name.endswith(".json"), name))
            for name in names:
                _sync(self.path / name)
                (self.path / name).replace(self.place / name)
            self.path.rmdir()
            _sync(self.place)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def telling(place: Path) -> Iterator[None]:
    """Errors of the file system as sentences."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveFailed):
            raise
        do = "Free some space, or save elsewhere" if error.errno == 28 else "Give a place that can be written"
        found = f"{error.strerror or error} ({error.filename or place})"
        raise SaveFailed(tell(f"{place} can be written", found, f"{do}; what was saved before is as it was")) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of a complete folder; any other is refused with the reason."""
    again = "Use another checkpoint: this one was not written to its end, or was changed"
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        files, version = dict(facts["files"]), facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(tell(f"{folder} is a checkpoint with {MANIFEST}", f"that cannot be read ({error})", again)) from None
    if version != FORMAT:
        raise BadFile(tell(f"{folder} has the format {FORMAT}", f"it has {version}", "Read it with the version of outsize that wrote it"))
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} are there" if path.is_file() else "it is not there"
            raise BadFile(tell(f"{path} has {size} bytes", found, again))
    return facts


def checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete ones, by step."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            try:
                read_manifest(path)
            except BadFile as why:
                log.warning("%s is passed over: %s", path, why)
            else:
                found.append((int(match[1]), path))
    return sorted(found)


def newest(parent: Path) -> Path | None:
    settle(parent)
    found = checkpoints(parent)
    return found[-1][1] if found else None


def settle(parent: Path) -> None:
    """Clear up after runs that were killed: a draft that was complete but for its rename is renamed, other drafts go."""
    drafts = [(path, match) for path in sorted(parent.glob(f"{_DRAFT}*"), key=lambda p: p.name.endswith(_OLD)) if (match := _NAME.fullmatch(path.name))]
    for path, match in drafts:
        if _born(int(match[2])) == int(match[3]):
            continue  # its writer is at work
        place = parent / match[1]
        if match[4] is None and not place.exists() and _is_complete(path):
            path.rename(place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def rotate(parent: Path, limit: int | None, *, keep: Path | None = None) -> None:
    """Remove all but the newest `limit` complete ones; `keep` stays and counts."""
    settle(parent)
    if not limit:
        return
    kept = None if keep is None else keep.resolve()
    old = [path for _, path in checkpoints(parent) if path.resolve() != kept]
    most = max(limit - (kept is not None and kept.exists()), 1)
    for path in old[:-most]:
        log.info("removing %s (save_total_limit)", path)
        # The manifest first: what is left of a removal that is broken off is no checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except BadFile:
        return False
    return True


def _born(pid: int) -> int:
    """When a living process was started, in milliseconds; 0 for one that is not there."""
    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.NoSuchProcess:
        return 0


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
