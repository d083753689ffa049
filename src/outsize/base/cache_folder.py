"""The folder that outsize keeps profiles, machine rates and compiled kernels in between runs, and how files get
there.
"""

import os
from pathlib import Path

from outsize.base.log import log


def cache_folder() -> Path | None:
    """`OUTSIZE_CACHE`, or `~/.cache/outsize` if it is not set. None if it is empty: nothing is kept between runs."""
    folder = os.environ.get("OUTSIZE_CACHE")
    if folder is None:
        return Path.home() / ".cache" / "outsize"
    return Path(folder) if folder else None


def profile_path(key: str) -> Path | None:
    """The file of a cached profile; None without a cache."""
    folder = cache_folder()
    return folder / "traces" / f"{key}.json" if folder is not None else None


def drop_profiles(keys: tuple[str, ...]) -> None:
    """Delete cached profiles that a run has contradicted. The next `prepare` profiles the model again."""
    for path in filter(None, map(profile_path, keys)):
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s contradicts this run and cannot be deleted (%s). Delete it by hand.", path, error)
            continue
        log.info("the cached profile %s was deleted: this run contradicts it", path.name)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing. Creates its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
