"""The C kernel of AdamW for host memory: compiled when first wanted, kept in the cache folder, called without a lock.

Without a compiler there is none, which is said once; `adamw.py` then does the same in torch, to the same bits and several times slower.
OUTSIZE_KERNELS=torch asks for that.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outsize.base.log import log

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SPARE_CORES = 2
"""Left to the thread that issues work and to the driver."""


class _Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("b1", "b2", "o1", "o2", "eps", "decay", "step", "c2", "clip")]


class Kernel:
    def __init__(self, library: ctypes.CDLL):
        pointers = [ctypes.c_void_p] * 5
        self._functions = {}
        for name in ("split_bf16", "split_fp32", "whole_bf16", "whole_fp32"):
            function = getattr(library, name)
            function.argtypes = [*pointers, ctypes.c_int64, ctypes.POINTER(_Numbers), ctypes.c_int]
            function.restype = None
            self._functions[name] = function

    def update(self, weight: Tensor, lo: Tensor | None, m: Tensor, v: Tensor, grad: Tensor, numbers: dict[str, float]) -> None:
        """As `adamw.update`, on CPU tensors. `numbers`: those of Hyper, and `clip`."""
        name = f"{'whole' if lo is None else 'split'}_{'bf16' if grad.dtype == torch.bfloat16 else 'fp32'}"
        places = [None if t is None else t.data_ptr() for t in (weight, lo, m, v, grad)]
        self._functions[name](*places, weight.numel(), ctypes.byref(_Numbers(**numbers)), _num_threads())


@cache
def kernel() -> Kernel | None:
    """None where it was not wanted or cannot be had."""
    if os.environ.get("OUTSIZE_KERNELS") == "torch":
        return None
    try:
        return Kernel(ctypes.CDLL(str(_library())))
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()[:1] if isinstance(error, subprocess.CalledProcessError) else [str(error)]
        log.warning("updates on the host run in torch, several times slower: the C kernel could not be compiled (%s)", " ".join(said))
        return None


def _library() -> Path:
    """The compiled kernel, named by what went into it."""
    found = [shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")]
    compiler = next((path for path in found if path is not None), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    name = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), version, " ".join(_FLAGS).encode()])).hexdigest()[:16]
    folder = Path(os.environ.get("OUTSIZE_CACHE") or Path.home() / ".cache" / "outsize") / "native"
    path = folder / f"adamw-{name}.so"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = Path(tempfile.mkdtemp(prefix="outsize-"))
            path = folder / path.name
        made = folder / f".{path.name}-{os.getpid()}"
        subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"], capture_output=True, check=True)
        made.replace(path)
    return path


def _num_threads() -> int:
    """As many as torch may use, less some on machines that have them to spare."""
    cores = torch.get_num_threads()
    return cores - _SPARE_CORES if cores > 2 * _SPARE_CORES else cores
