"""Axolotl's example files, taken from its source package into a cache folder: `python -m tools.axolotl_examples` prints
where they are. They are other people's, so the repository has only their names and outcomes.

OUTSIZE_AXOLOTL_SDIST names a package that is on disk already.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.19.0"
_NAME = f"axolotl-{VERSION}"


class Unavailable(Exception):
    """The source package cannot be had; the text says why."""


def examples() -> Path:
    """The folder `examples` of Axolotl's source package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outsize" / "axolotl"
    folder = cache / _NAME / "examples"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            given = os.environ.get("OUTSIZE_AXOLOTL_SDIST")
            with tarfile.open(given or _download(Path(scratch))) as package:
                wanted = [member for member in package.getmembers() if member.name.startswith(f"{_NAME}/examples/")]
                package.extractall(scratch, members=wanted, filter="data")
            (Path(scratch) / _NAME).rename(cache / _NAME)
    return folder


def _download(to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", ":all:", "--dest", str(to), f"axolotl=={VERSION}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    # pip may fail to read the package's metadata; the file is there all the same.
    found = next(to.glob(f"{_NAME}.tar.gz"), None)
    if found is None:
        lines = run.stderr.strip().splitlines()
        raise Unavailable(f"pip cannot download axolotl=={VERSION}: {lines[-1] if lines else 'no message'}")
    return found


if __name__ == "__main__":
    print(examples())
