"""Functions from the teacher's tensors to a student's. They work on any tensor that has the pruned dimension: weights,
biases, norms of queries and keys, projections that are fused, and stacks of experts.

A tensor without that dimension is the teacher's: the bias of an output projection has one value for each output, which
no variant removes.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

FusedWidth = Literal["halves", "interleaved"]
"""How gate and up share a dimension: all of one before all of the other, or alternating."""
FusedHeads = Literal["separate", "after", "grouped"]
"""How queries, keys and values share a dimension: not at all; all queries, then all keys, then all values; or for each
KV head its queries, its key and its value."""


def kept(scores: Tensor | None, size: int, count: int) -> Tensor:
    """The `count` places with the highest scores, in ascending order, of the last dimension; without scores the
    first.
    """
    if scores is None:
        return torch.arange(count)
    assert scores.shape[-1] == size, f"scores for {scores.shape[-1]} places, of which there are {size}"
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


def keep_channels(tensor: Tensor, dim: int, keep: Tensor, size: int, fused: FusedWidth) -> Tensor:
    """The channels `keep` of a dimension with `size` channels, or with two values for each, gate and up.

    `keep`: (channels,), or (experts, channels) for a tensor whose first dimension is experts.
    """
    copies, left = divmod(tensor.shape[dim], size)
    assert left == 0
    keep = keep.to(tensor.device)
    if fused == "halves":
        places = torch.cat([keep + size * copy for copy in range(copies)], dim=-1)
    else:
        places = (keep.unsqueeze(-1) * copies + torch.arange(copies, device=keep.device)).flatten(-2)
    if places.dim() == 1:
        return tensor.index_select(dim, places)
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = places.shape
    sizes = list(tensor.shape)
    sizes[dim] = places.shape[1]
    return tensor.gather(dim, places.view(shape).expand(sizes))


def keep_experts(tensor: Tensor, keep: Tensor) -> Tensor:
    """Of a stack of experts, or of what a router has for each."""
    return tensor.index_select(0, keep.to(tensor.device))


def merge_heads(
    tensor: Tensor, dim: int, heads: int, count: int, fused: FusedHeads, head_size: int, chosen: Tensor | None = None
) -> Tensor:
    """`count` KV heads in place of `heads`, each made from neighbouring ones, whose queries it serves.

    `chosen`: by new head, which of its old ones it is; None for their average.
    """

    def merged(part: Tensor) -> Tensor:
        grouped = part.reshape(count, heads // count, -1, *part.shape[1:])
        if chosen is not None:
            made = grouped[torch.arange(count, device=part.device), chosen.to(part.device)]
        else:
            wide = torch.promote_types(part.dtype, torch.float32)
            made = grouped.to(wide).mean(1).to(part.dtype)
        return made.reshape(-1, *part.shape[1:])

    return _by_part(tensor, dim, heads, count, fused, head_size, merged)


def repeat_heads(tensor: Tensor, dim: int, heads: int, count: int, fused: FusedHeads, head_size: int) -> Tensor:
    """`count` KV heads in place of `heads`: each is repeated for its neighbours, and serves a part of its queries."""

    def repeated(part: Tensor) -> Tensor:
        return part.reshape(heads, -1, *part.shape[1:]).repeat_interleave(count // heads, 0).flatten(0, 1)

    return _by_part(tensor, dim, heads, count, fused, head_size, repeated)


def _by_part(
    tensor: Tensor,
    dim: int,
    heads: int,
    count: int,
    fused: FusedHeads,
    head_size: int,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply `change` to the rows of the keys and to those of the values."""
    tensor = tensor.movedim(dim, 0)
    if fused == "separate":
        made = change(tensor)
    elif fused == "after":
        each = heads * head_size
        queries, keys, values = tensor.split([len(tensor) - 2 * each, each, each])
        made = torch.cat([queries, change(keys), change(values)])
    else:
        rest = tensor.shape[1:]
        grouped = tensor.reshape(heads, -1, head_size, *rest)
        queries = grouped[:, :-2].reshape(count, -1, head_size, *rest)
        keys, values = (change(grouped[:, place].flatten(0, 1)).view(count, 1, head_size, *rest) for place in (-2, -1))
        made = torch.cat([queries, keys, values], dim=1).flatten(0, 2)
    return made.movedim(0, dim).contiguous()


def linear_map(output: Tensor, value: Tensor, kv_heads: int) -> Tensor:
    """Output projection times value projection, (hidden, hidden): attention in which every token attends to itself.

    `output`: (hidden, heads × head size), `value`: (KV heads × head size, hidden).
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    times, hidden = output.shape[1] // value.shape[0], value.shape[1]
    repeated = value.view(kv_heads, -1, hidden).repeat_interleave(times, 0).reshape(-1, hidden)
    return (output.to(wide) @ repeated.to(wide)).to(output.dtype)
