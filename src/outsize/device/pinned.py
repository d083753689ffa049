"""Pinned host memory of exactly the size asked for: anonymous pages, touched by all cores, then registered with the driver.

Torch's own pinned allocator rounds up to a power of two and pins page by page on one core; at tens of GiB both hurt.
"""

import mmap
import warnings
import weakref

import torch
from torch import Tensor


def pinned_empty(num_bytes: int) -> Tensor:
    """Zeroed, page-locked, flat uint8. Unpinned and freed with the last tensor that uses it."""
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
    tensor.zero_()
    pointer = tensor.data_ptr()
    status = torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0)
    if int(status) != 0:
        raise MemoryError(f"{num_bytes} bytes of host memory could not be page-locked (cudaHostRegister: {status})")
    weakref.finalize(tensor.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, pointer)
    return tensor
