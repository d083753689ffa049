"""The C kernel of AdamW for host memory: built with the package, or compiled at first use and kept in the cache folder.

Without a compiler, one warning is logged, and `adamw.py` computes the same bits in torch, several times slower.
OUTSIZE_KERNELS=torch selects that. Calls release the GIL.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outsize.base.cache_folder import cache_folder
from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.hardware.host import num_cores, quota_cores
from outsize.optim.build import compile_library, find_compiler, fingerprint

_PACKAGE = Path(__file__).parent
_SPARE_CORES = 2
"""Left to the launching thread and to the driver."""


class _Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("b1", "b2", "o1", "o2", "eps", "decay", "step", "c2", "clip")]


class Kernel:
    def __init__(self, library: ctypes.CDLL):
        pointers = [ctypes.c_void_p] * 5
        self._functions = {}
        for name in ("split_bf16", "split_fp32", "whole_bf16", "whole_fp32"):
            function = getattr(library, name)
            function.argtypes = [*pointers, ctypes.c_int64, ctypes.POINTER(_Numbers), ctypes.c_int]
            function.restype = ctypes.c_int
            self._functions[name] = function

    def update(
        self,
        weight: Tensor,
        lo: Tensor | None,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        numbers: dict[str, float],
        *,
        threads: int | None = None,
    ) -> None:
        """As `adamw.update`, on CPU tensors. `numbers`: those of Hyper, and `clip`."""
        name = f"{'whole' if lo is None else 'split'}_{'bf16' if grad.dtype == torch.bfloat16 else 'fp32'}"
        places = [None if t is None else t.data_ptr() for t in (weight, lo, m, v, grad)]
        if (
            self._functions[name](*places, weight.numel(), ctypes.byref(_Numbers(**numbers)), threads or _num_threads())
            != 0
        ):
            raise MemoryError("host memory is full: an update on the host cannot be started")


def forces_torch() -> bool:
    value = os.environ.get("OUTSIZE_KERNELS", "")
    if value not in ("", "torch"):
        raise ConfigError(f"OUTSIZE_KERNELS={value} is unknown. Set it to torch, or unset it.")
    return value == "torch"


@cache
def find_kernel() -> Kernel | str:
    """The kernel, or why it cannot be used."""
    if forces_torch():
        return "OUTSIZE_KERNELS=torch"
    try:
        return Kernel(_packaged() or _compiled())
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (
            error.stderr.decode(errors="replace").strip().splitlines()[:1]
            if isinstance(error, subprocess.CalledProcessError)
            else [str(error)]
        )
        reason = f"the C kernel could not be compiled: {' '.join(lines)}"
        log.warning("updates on the host run in torch, several times slower: %s", reason)
        return reason


def kernel() -> Kernel | None:
    found = find_kernel()
    return found if isinstance(found, Kernel) else None


def _packaged() -> ctypes.CDLL | None:
    """The library built with the package (setup.py), if it is of this source and loads on this machine."""
    for path in _PACKAGE.glob("_native*.so"):
        try:
            library = ctypes.CDLL(str(path))
            library.made_from.restype = ctypes.c_char_p
            if library.made_from() == fingerprint().encode():
                return library
        except (OSError, AttributeError) as error:
            log.debug("%s is not used: %s", path, error)
    return None


def _compiled() -> ctypes.CDLL:
    """The library in the cache folder, named by source, flags and compiler; without a cache, in a temporary folder."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    name = f"adamw-{fingerprint()}-{hashlib.sha256(version).hexdigest()[:8]}.so"
    if (folder := cache_folder()) is not None:
        path = folder / "native" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                compile_library(compiler, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.debug("%s cannot be used: %s", path, error)
    with tempfile.TemporaryDirectory(prefix="outsize-") as temporary:  # a loaded library does not need its file
        compile_library(compiler, Path(temporary) / name)
        return ctypes.CDLL(str(Path(temporary) / name))


def _num_threads() -> int:
    """Threads of an update: all cores that torch, this process and its container may use, less the spare ones."""
    cores = max(1, min(torch.get_num_threads(), num_cores(), quota_cores()))
    return cores - _SPARE_CORES if cores > 2 * _SPARE_CORES else cores
