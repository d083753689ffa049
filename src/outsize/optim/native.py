"""The C kernels of optimizer updates and of the gradient norm: compiled with the package, else when first used and kept
in the cache folder.

Without a compiler there is no kernel, which is logged once. `rule.py` then computes the same bits in torch, several
times slower; OUTSIZE_KERNELS=torch forces that. Calls release the GIL.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.cache_folder import cache_folder
from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.hardware.host import num_cores, quota_cores
from outsize.optim.build import compile_library, find_compiler, fingerprint

_PACKAGE = Path(__file__).parent
_SPARE_CORES = 2
"""Cores left to the launching thread and to the driver."""


_Numbers = ctypes.c_float * 9
"""The scalars of a rule (the longest list), then the clipping factor."""


class Kernel:
    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._functions: dict[str, Any] = {}
        self._function("adamw_split_bf16")  # AttributeError if the library is of another source

    def _function(self, name: str) -> Any:
        if (function := self._functions.get(name)) is None:
            function = getattr(self._library, name)
            function.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, _Numbers, ctypes.c_int]
            function.restype = ctypes.c_int
            self._functions[name] = function  # last: another thread may find it from here on
        return function

    def _call(
        self, name: str, tensors: Sequence[Tensor | None], grad: Tensor, numbers: tuple[float, ...], threads: int | None
    ) -> None:
        function = self._function(f"{name}_{'bf16' if grad.dtype == torch.bfloat16 else 'fp32'}")
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*tensors, grad)]
        if function(*pointers, grad.numel(), _Numbers(*numbers), threads or _num_threads()) != 0:
            raise MemoryError("no memory for a kernel on the host")

    def update(
        self,
        rule: str,
        weight: Tensor,
        lo: Tensor | None,
        state: Sequence[Tensor],
        grad: Tensor,
        numbers: tuple[float, ...],
        *,
        threads: int | None = None,
    ) -> None:
        """`rule.update` on CPU tensors. The last of the numbers is the clipping factor."""
        tensors = (weight, lo, *state, *(None,) * (2 - len(state)))
        self._call(f"{rule}_{'whole' if lo is None else 'split'}", tensors, grad, numbers, threads)

    def segment_sums(self, grad: Tensor, sums: Tensor, *, threads: int | None = None) -> None:
        """`norm.segment_sums` on CPU tensors."""
        self._call("segment_sums", (sums, None, None, None), grad, (), threads)


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
    """The library that was compiled with the package (setup.py), if it was made from this source and runs on this
    machine.
    """
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
    """The library in the cache folder, named by source and compiler; without a cache, from a temporary folder."""
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    name = f"updates-{fingerprint()}-{hashlib.sha256(version).hexdigest()[:8]}.so"
    if (folder := cache_folder()) is not None:
        path = folder / "native" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                compile_library(compiler, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.debug("%s cannot be used: %s", path, error)
    with tempfile.TemporaryDirectory(prefix="outsize-") as temporary:  # the file can be removed once it is loaded
        compile_library(compiler, Path(temporary) / name)
        return ctypes.CDLL(str(Path(temporary) / name))


def _num_threads() -> int:
    """Threads of an update: all cores that torch, this process and its container may use, less the spare ones."""
    cores = max(1, min(torch.get_num_threads(), num_cores(), quota_cores()))
    return cores - _SPARE_CORES if cores > 2 * _SPARE_CORES else cores
