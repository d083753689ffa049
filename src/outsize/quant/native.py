"""The C kernel of 4-bit quantization. Without a compiler there is none, which is logged once, and `four_bit.py`
computes the same bytes in torch. Calls release the GIL.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.native.build import QUANTIZER
from outsize.native.library import forces_torch, load_library, num_threads

_SUFFIXES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Kernel:
    def __init__(self, library: ctypes.CDLL):
        self._functions: dict[torch.dtype, Any] = {}
        for dtype, suffix in _SUFFIXES.items():
            function = self._functions[dtype] = getattr(library, f"quantize_{suffix}")
            pointer = ctypes.c_void_p
            function.argtypes = [pointer, pointer, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int]
            function.restype = ctypes.c_int

    def quantize(
        self,
        weight: Tensor,
        packed: Tensor,
        absmax: Tensor,
        thresholds: Tensor,
        codes: Tensor,
        *,
        threads: int | None = None,
    ) -> None:
        """`four_bit.quantize_in_torch`, on contiguous CPU tensors."""
        pointers = [tensor.data_ptr() for tensor in (weight, packed, absmax)]
        tables = [tensor.data_ptr() for tensor in (thresholds, codes)]
        function = self._functions[weight.dtype]
        if function(*pointers, weight.numel(), *tables, threads or num_threads()) != 0:
            raise MemoryError("no memory for a kernel on the host")


@cache
def find_kernel() -> Kernel | str:
    """The kernel, or why it cannot be used."""
    library = load_library(QUANTIZER)
    if not isinstance(library, str):
        return Kernel(library)
    if not forces_torch():
        log.warning("weights are quantized in torch, several times slower: %s", library)
    return library


def kernel() -> Kernel | None:
    found = find_kernel()
    return found if isinstance(found, Kernel) else None
