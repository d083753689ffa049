"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING

from outsize.base.errors import ConfigError
from outsize.run.shapes import require_one_of

if TYPE_CHECKING:
    from outsize.schedule.plan import UpdateMode

# The names of the YAML file, and shorter ones.
SEQUENCE_LEN, MICRO_BATCH = ("--sequence-len", "--seq"), ("--micro-batch-size", "--micro-batch")


def require_file(option: str, path: Path | None) -> None:
    """Fail before the work if its result could not be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = f"{path} is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"{option}: {found}. Name a file in an existing folder.")


def update_mode(update: str) -> "UpdateMode":
    modes: dict[str, UpdateMode] = {"after-step": "after_step", "in-backward": "in_backward"}
    return modes[require_one_of(modes, update, "--update")]
