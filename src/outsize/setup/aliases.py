"""Refuses parameters that share memory with others, or with buffers: outsize gives each parameter memory of its own,
and a write to one would no longer be one to the other. Views into different parts of one storage (flattened weights, a
file mapped as one) are separate tensors and pass."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.model.weights import is_unmaterialized


@dataclass(slots=True)
class _Range:
    name: str
    tensor: Tensor
    first: int
    end: int
    """Addresses."""

    @property
    def is_trained(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


def require_own_memory(model: nn.Module) -> None:
    devices: dict[torch.device, list[_Range]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _has_memory(tensor):
            place = _Range(name, tensor, *_extent(tensor))
            devices.setdefault(tensor.device, []).append(place)
    for ranges in devices.values():
        for one, other in _overlapping(ranges):
            if isinstance(one.tensor, nn.Parameter) and isinstance(other.tensor, nn.Parameter):
                first, second = one.name, other.name
                raise ModelUnsupported(
                    f"{first} and {second} are two parameters over the same memory: an optimizer would update it "
                    "twice, with a state for each. To train "
                    f"one weight, assign the parameter itself ({_path(second)} = {_path(first)}); to train two, give "
                    "one a copy "
                    f"(nn.Parameter({_path(second)}.detach().clone()))."
                )
            param, buffer = (one, other) if isinstance(one.tensor, nn.Parameter) else (other, one)
            raise ModelUnsupported(
                f"{param.name} and the buffer {buffer.name} share memory, and outsize moves the parameter to memory "
                "of its own: the buffer would keep the old "
                "values. Read the parameter where the buffer is read, or give the buffer a copy."
            )


def _path(name: str) -> str:
    """As Python reads it: `layers[3].mlp.weight`."""
    path = "model"
    for part in name.split("."):
        path += f"[{part}]" if part.isdecimal() else f".{part}"
    return path


def _has_memory(tensor: Tensor) -> bool:
    return (
        not tensor.is_meta
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not is_unmaterialized(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum(
        (n - 1) * host_update_interval for n, host_update_interval in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlapping(ranges: list[_Range]) -> Iterator[tuple[_Range, _Range]]:
    """Pairs of which an update of one would change the other."""
    open_ranges: list[_Range] = []
    for later in sorted(ranges, key=lambda r: r.first):
        open_ranges = [r for r in open_ranges if r.end > later.first]
        for earlier in open_ranges:
            if (earlier.is_trained or later.is_trained) and _share_elements(earlier, later):
                yield earlier, later
        open_ranges.append(later)


def _share_elements(one: _Range, other: _Range) -> bool:
    """Whether two tensors whose ranges overlap have an element in common: columns of one matrix have none."""
    size, base = one.tensor.element_size(), min(one.first, other.first)
    if other.tensor.element_size() != size or (one.first - other.first) % size:
        return True
    of_one = torch.zeros((max(one.end, other.end) - base) // size, dtype=torch.bool)
    of_one.as_strided(one.tensor.shape, one.tensor.stride(), (one.first - base) // size).fill_(True)
    return bool(of_one.as_strided(other.tensor.shape, other.tensor.stride(), (other.first - base) // size).any())
