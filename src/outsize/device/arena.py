"""Host memory for a whole run: anonymous pages of the exact size, huge where possible, first written by all cores.

Torch's own allocators create pages of 4 KiB when they are first written, which slows the first step. Its pinned
allocator rounds up to a power of two and pins on one core (88 GiB took 57 s on the H200 machine; these pages take 1.2 s
for 16 GiB).
"""

import mmap
import warnings
import weakref
from contextlib import suppress

import torch
from torch import Tensor


def arena(num_bytes: int) -> Tensor:
    """Zeroed host memory as flat uint8. Freed with the last tensor that uses it."""
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        pages = _private_pages(num_bytes)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be allocated ({error.strerror})") from None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # not on every system
            pages.madvise(getattr(mmap, advice))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
    return tensor.zero_()  # by all of torch's threads


def _private_pages(num_bytes: int) -> mmap.mmap:
    """Private anonymous pages. Python's default is shared memory, which has no huge pages on most systems and which a
    forked child (a DataLoader worker) keeps alive.
    """
    if hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


def pinned_arena(num_bytes: int) -> Tensor:
    """Page-locked host memory, for copies to and from the GPU."""
    tensor = arena(num_bytes)
    if num_bytes:
        pointer = tensor.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0)
        if int(status) != 0:
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be page-locked (cudaHostRegister: {status})")
        weakref.finalize(tensor.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, pointer)
    return tensor
