"""Ranges: the memory of one tensor of a model, as flat ranges of its elements.

Saving, loading and exporting copy range by range, so a parameter may be stored in several places. With one range, which
is all of a contiguous tensor, nothing is copied to give it its shape.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.checkpoint.tensorfile import TensorFile, TensorSpec


@dataclass(frozen=True, slots=True)
class Ranges:
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None: the elements are in row-major order. Else a permuted tensor, with its elements in the order of memory."""
    parts: tuple[tuple[Tensor, int], ...]
    """Flat tensors, each with the number of its first element."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Ranges":
        """Ranges over a tensor, to write it to a file; over a copy if it is not contiguous."""
        return cls(tuple(tensor.shape), None, ((tensor.reshape(-1), 0),))

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.parts[0][0].dtype, self.shape)

    def whole(self, *, owns: bool = False) -> Tensor:
        """The tensor in its shape: a view if one range holds it, else a copy on the CPU. `owns`: behind a storage of
        its own, for code that looks at storages.
        """
        flat = self.parts[0][0]
        if len(self.parts) > 1:
            flat = torch.cat([part.to("cpu") for part, _ in sorted(self.parts, key=lambda part: part[1])])
        assert flat.numel() == math.prod(self.shape), "these ranges hold a part of the tensor"
        flat = own_storage(flat) if owns else flat
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride)

    def matching(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each range with the matching elements of a tensor that has this shape, or expands to it."""
        tensor = tensor.expand(self.shape)
        flat = (tensor if self.stride is None else tensor.permute(memory_order(self.stride))).reshape(-1)
        return ((part, flat[first : first + part.numel()]) for part, first in self.parts)

    def copy_(self, value: Tensor) -> None:
        for part, new in self.matching(value):
            part.copy_(new)

    def write(self, file: TensorFile, key: str) -> None:
        assert self.spec == file.entries[key].spec, key
        if self.stride is not None:
            file.write(key, self.whole())
            return
        for part, first in self.parts:
            file.write(key, part, first)

    def read(self, file: TensorFile, key: str) -> None:
        """Fill the ranges from a file. Those on a device are filled from a CPU tensor, one after another."""
        if self.stride is not None:
            self.copy_(file.read(key))
            return
        for part, first in self.parts:
            on_cpu = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            file.read_range(key, on_cpu, first)
            if on_cpu is not part:
                part.copy_(on_cpu)


def memory_order(stride: tuple[int, ...]) -> list[int]:
    """The dimensions of a dense tensor, from the one with the largest stride."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


def own_storage(flat: Tensor) -> Tensor:
    """The same memory behind a storage of its own. Buffers hold tensors of several dtypes, and torch.save refuses a
    storage that is read as two.
    """
    start = flat.storage_offset() * flat.itemsize
    storage = (
        flat.untyped_storage()[start : start + flat.nbytes]
        if flat.numel()
        else torch.UntypedStorage(0, device=flat.device)
    )
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, flat.shape)  # type: ignore[call-overload]
