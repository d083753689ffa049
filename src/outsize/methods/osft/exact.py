"""exact_products: matrix products in the dtype of their operands, whatever the user's settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


@contextmanager
def exact_products(like: Tensor) -> Iterator[None]:
    """No autocast, and no TF32 for fp32 operands: it loses 1e-4 of a change to the frozen span."""
    backends: tuple[Any, ...] = ()
    if like.dtype == torch.float32:
        backends = (torch.backends.cuda.matmul, cast(Any, torch.backends.mkldnn).matmul)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(like.device.type, enabled=False):
            yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
