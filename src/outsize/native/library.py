"""Loads the C libraries of the package: compiled with it, else when first used and kept in the cache folder.

OUTSIZE_KERNELS=torch forces the torch forms, which compute the same bits, slower.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from outsize.base.cache_folder import cache_folder
from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.hardware.host import num_cores, quota_cores
from outsize.native.build import compile_library, find_compiler, fingerprint

_SPARE_CORES = 2
"""Cores left to the launching thread and to the driver."""


def forces_torch() -> bool:
    value = os.environ.get("OUTSIZE_KERNELS", "")
    if value not in ("", "torch"):
        raise ConfigError(f"OUTSIZE_KERNELS={value} is unknown. Set it to torch, or unset it.")
    return value == "torch"


def load_library(source: Path) -> ctypes.CDLL | str:
    """The library of a C source, or why there is none."""
    if forces_torch():
        return "OUTSIZE_KERNELS=torch"
    try:
        return packaged(source) or _compiled(source)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (
            error.stderr.decode(errors="replace").strip().splitlines()[:1]
            if isinstance(error, subprocess.CalledProcessError)
            else [str(error)]
        )
        return f"the C kernel could not be compiled: {' '.join(lines)}"


def packaged(source: Path) -> ctypes.CDLL | None:
    """The library that was compiled with the package (setup.py), if it was made from this source and runs on this
    machine.
    """
    for path in source.parent.glob("_native*.so"):
        try:
            library = ctypes.CDLL(str(path))
            library.made_from.restype = ctypes.c_char_p
            if library.made_from() == fingerprint(source).encode():
                return library
        except (OSError, AttributeError) as error:
            log.debug("%s is not used: %s", path, error)
    return None


def _compiled(source: Path) -> ctypes.CDLL:
    """The library in the cache folder, named by source and compiler; without a cache, from a temporary folder."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    name = f"{source.parent.name}-{fingerprint(source)}-{hashlib.sha256(version).hexdigest()[:8]}.so"
    if (folder := cache_folder()) is not None:
        path = folder / "native" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                compile_library(compiler, source, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.debug("%s cannot be used: %s", path, error)
    with tempfile.TemporaryDirectory(prefix="outsize-") as temporary:  # the file can be removed once it is loaded
        compile_library(compiler, source, Path(temporary) / name)
        return ctypes.CDLL(str(Path(temporary) / name))


def num_threads() -> int:
    """Threads of a call: all cores that torch, this process and its container may use, less the spare ones."""
    cores = max(1, min(torch.get_num_threads(), num_cores(), quota_cores()))
    return cores - _SPARE_CORES if cores > 2 * _SPARE_CORES else cores
