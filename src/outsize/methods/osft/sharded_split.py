"""Splits weights whose rows are sharded: each weight is gathered on one process, split there, and its parts are sent
back. Processes get weights by cost. Replicas receive the same parts: each would compute others.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.base.errors import ModelUnsupported
from outsize.methods.osft.factors import FactorSplit, split_factors
from outsize.methods.osft.row_shards import RowShards, padded
from outsize.methods.osft.shape import SplitShape
from outsize.model.weights import is_finite
from outsize.progress import Bar


def split_factors_of(named: Sequence[tuple[str, SplitShape, Tensor]], shards: RowShards) -> list[FactorSplit]:
    """The local parts of all weights, from their names, shapes and local rows. Every process of the groups must call it
    alike.
    """
    _require_finite(named, shards)
    weights = [(shape, rows) for _, shape, rows in named]
    owners = balance([s.rows * s.columns * s.small for s, _ in weights], shards.size * shards.num_replicas)
    queues = [[i for i, owner in enumerate(owners) if owner == w] for w in range(shards.size * shards.num_replicas)]
    parts: dict[int, FactorSplit] = {}
    with Bar("splitting weights", len(weights)) as bar:
        for turn in range(max(map(len, queues), default=0)):
            active = [(divmod(worker, shards.size), queue[turn]) for worker, queue in enumerate(queues) if queue[turn:]]
            whole = {
                i: _gathered(*weights[i], owner, shards) for (replica, owner), i in active if shards.is_in(replica)
            }
            splits = {i: split_factors(w, weights[i][0].frozen_rank) for i, w in whole.items() if w is not None}
            del whole
            for (replica, owner), i in active:
                parts[i] = _distributed(splits.pop(i, None), *weights[i], replica, owner, shards)
                bar.advance()
    return [parts[i] for i in range(len(weights))]


def _require_finite(named: Sequence[tuple[str, SplitShape, Tensor]], shards: RowShards) -> None:
    """In every process, since one that raises alone leaves the others waiting."""
    if not named:
        return
    found = shards.anywhere([not is_finite(rows) for *_, rows in named], named[0][2].device)
    for (name, *_), is_damaged in zip(named, found, strict=True):
        if is_damaged:
            raise ModelUnsupported(f"OSFT: {name} has NaN or infinite values. Load the model again from intact files.")


def balance(costs: Sequence[float], workers: int) -> list[int]:
    """The worker of each item: the largest items first, each to the worker with the least."""
    loads, owners = [0.0] * workers, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def _gathered(shape: SplitShape, rows: Tensor, owner: int, shards: RowShards) -> Tensor | None:
    """All rows, on the owner alone."""
    if shards.size == 1:
        return rows
    step = -(-shape.rows // shards.size)
    full = rows.new_empty(step * shards.size, shape.columns) if shards.rank == owner else None
    into = None if full is None else list(full.split(step))
    dist.gather(padded(rows, step), into, dst=dist.get_global_rank(shards.group, owner), group=shards.group)
    return None if full is None else full[: shape.rows]


def _distributed(
    split: FactorSplit | None, shape: SplitShape, rows: Tensor, replica: int, owner: int, shards: RowShards
) -> FactorSplit:
    n, m, k, r = shape.rows, shape.columns, shape.frozen_rank, shape.rank
    sizes = (n, k), (k, m), (n, r), (r, 1), (r, m)
    parts = []
    for i, size in enumerate(sizes):
        whole = None if split is None else split[i].reshape(size)
        if i == FactorSplit._fields.index("s"):
            part = rows.new_empty(size, dtype=torch.float32) if whole is None else whole
            if shards.is_in(replica) and shards.size > 1:
                dist.broadcast(part, dist.get_global_rank(shards.group, owner), group=shards.group)
        else:
            part = _scattered(whole, size, rows, owner, shards, sends=shards.is_in(replica))
        if shards.num_replicas > 1:
            part = part.contiguous()
            dist.broadcast(part, dist.get_global_rank(shards.replicas, replica), group=shards.replicas)
        parts.append(part)
    frozen_u, frozen_v, u, values, v = parts
    return FactorSplit(frozen_u, frozen_v, u, values.view(-1), v)


def _scattered(
    whole: Tensor | None, size: tuple[int, int], like: Tensor, owner: int, shards: RowShards, *, sends: bool
) -> Tensor:
    """This process's rows of the owner's matrix. Without `sends`: memory for them."""
    if shards.size == 1 and whole is not None:
        return whole
    step, part = -(-size[0] // shards.size), shards.part(size[0])
    rows = like.new_empty(step, size[1], dtype=torch.float32)
    if sends and shards.size > 1:
        pieces = None if whole is None else list(padded(whole, step * shards.size).split(step))
        dist.scatter(rows, pieces, src=dist.get_global_rank(shards.group, owner), group=shards.group)
    return rows[: part.stop - part.start]
