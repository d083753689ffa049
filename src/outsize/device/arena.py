"""Host memory for a whole run: anonymous pages of exactly the size asked for, huge where the system allows, touched by
all cores at once.

Torch's own allocators make pages when they are first written, 4 KiB at a time, which is then part of the first step;
its pinned one rounds up to a power of two and pins on one core (88 GiB took 57 s on the H200 machine; pages made this
way 1.2 s for 16 GiB).
"""

import mmap
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor


def arena(num_bytes: int) -> Tensor:
    """Zeroed, flat uint8. Freed with the last tensor that uses it."""
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        pages = _private_pages(num_bytes)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of host memory could not be had ({error.strerror})") from None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # a system that knows no such thing
            pages.madvise(getattr(mmap, advice))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
    return tensor.zero_()  # by all of torch's threads


def _private_pages(num_bytes: int) -> mmap.mmap:
    """Python's own default is shared memory, which has no huge pages on most systems, and which a forked child (a
    loader's worker) would keep alive.
    """
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


def pinned_arena(num_bytes: int) -> Tensor:
    """The same, page-locked, for copies to and from the GPU."""
    tensor = arena(num_bytes)
    if num_bytes:
        pointer = tensor.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0)
        if int(status) != 0:
            raise MemoryError(f"{num_bytes} bytes of host memory could not be page-locked (cudaHostRegister: {status})")
        weakref.finalize(tensor.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, pointer)
    return tensor
