"""The C kernels of optimizer updates and of the gradient norm.

Without a compiler there is no kernel, which is logged once. `rule.py` then computes the same bits in torch, several
times slower. Calls release the GIL.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.native.build import UPDATES
from outsize.native.library import forces_torch, load_library, num_threads

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
        if function(*pointers, grad.numel(), _Numbers(*numbers), threads or num_threads()) != 0:
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


@cache
def find_kernel() -> Kernel | str:
    """The kernel, or why it cannot be used."""
    library = load_library(UPDATES)
    if not isinstance(library, str):
        return Kernel(library)
    if not forces_torch():
        log.warning("updates on the host run in torch, several times slower: %s", library)
    return library


def kernel() -> Kernel | None:
    found = find_kernel()
    return found if isinstance(found, Kernel) else None
