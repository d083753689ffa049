"""RowShards: rows of matrices over the processes of a group, divided as DTensor's Shard(0) divides them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RowShards:
    """Without a group: one process holds all rows."""

    group: Any = None
    """The processes that hold different rows. Never the world: with replicas it counts rows several times."""
    replicas: Any = None
    """The processes that hold the same rows, or None."""

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.group is not None else 1

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    @cached_property
    def num_replicas(self) -> int:
        return dist.get_world_size(self.replicas) if self.replicas is not None else 1

    def is_in(self, replica: int) -> bool:
        """Whether this process is of the replica with this number."""
        return replica == (dist.get_rank(self.replicas) if self.replicas is not None else 0)

    def part(self, rows: int) -> slice:
        """The rows that this process holds, of this many."""
        step = -(-rows // self.size)
        start = min(self.rank * step, rows)
        return slice(start, min(start + step, rows))

    def gather(self, local: Tensor, rows: int) -> Tensor:
        """All rows, from each process's."""
        if self.size == 1:
            return local
        step = -(-rows // self.size)
        full = local.new_empty(step * self.size, *local.shape[1:])
        dist.all_gather(list(full.split(step)), padded(local, step), group=self.group)
        return full[:rows]

    def sum_to_rows(self, full: Tensor) -> Tensor:
        """This process's rows of the sum of all processes' matrices."""
        if self.size == 1:
            return full
        part, step = self.part(len(full)), -(-len(full) // self.size)
        local = full.new_empty(step, *full.shape[1:])
        dist.reduce_scatter(local, list(padded(full, step * self.size).split(step)), group=self.group)
        return local[: part.stop - part.start]

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the processes, in place, by one all-reduce."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def anywhere(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Which flags any process has set, replicas included. Every process must call it alike."""
        found = torch.tensor(flags, dtype=torch.float32, device=device)
        for group in (self.group, self.replicas):
            if group is not None:
                dist.all_reduce(found, group=group)
        return [count > 0 for count in found.tolist()]


def padded(rows: Tensor, count: int) -> Tensor:
    """The rows and zeros, `count` in all."""
    rows = rows.contiguous()
    return rows if len(rows) == count else torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
