"""The inverse of pruning: tensors of the teacher's sizes that compute what a pruned sub-block does, with zeros and
repeats.
"""

from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import ConfigError
from outsize.methods.bypass.builder import sizes_of
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.resizing import resizings
from outsize.methods.bypass.tensors import repeat_heads
from outsize.methods.bypass.variants import Change


def padded(parts: LayerParts, change: Change, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one changed sub-block, by name in the layer, as the teacher's class has them. The weights of the
    teacher's layer need not be loaded.
    """
    kind: Any = change.subblock
    path = parts.subblocks[kind].module
    if change.kind == "skip":
        own = parts.layer.get_submodule(path).state_dict(prefix=f"{path}.")
        return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in own.items()}
    if change.kind == "copy":
        return tensors
    if change.kind not in ("intermediate_size", "num_key_value_heads"):
        raise ConfigError(
            f"prune.form: {parts.name} has the variant {change.name}, which the teacher's class cannot express with "
            "zeros. Use form: per_layer."
        )
    made, axis = dict(tensors), parts.axes[change.kind]
    for name, (dim, was, now) in resizings(parts, kind, sizes_of(parts, change)).items():
        if change.kind == "intermediate_size":
            made[name] = _with_zeros(tensors[name], dim, was, now, axis.size, interleaved=parts.fused_width != "halves")
        else:
            assert change.count is not None
            size = (was - now) // (axis.size - change.count) // (1 if parts.fused_heads == "separate" else 2)
            made[name] = repeat_heads(tensors[name], dim, change.count, axis.size, parts.fused_heads, size)
    return made


def _with_zeros(tensor: Tensor, dim: int, was: int, now: int, size: int, *, interleaved: bool) -> Tensor:
    """`size`: channels of the teacher; the dimension may have several values for each (gate and up)."""
    copies = max(was // size, 1)
    moved = tensor.movedim(dim, 0)
    rest = moved.shape[1:]
    wide = torch.zeros((was, *rest), dtype=tensor.dtype, device=tensor.device)
    if interleaved:
        wide.view(was // copies, copies, *rest)[: now // copies] = moved.reshape(now // copies, copies, *rest)
    else:
        wide.view(copies, was // copies, *rest)[:, : now // copies] = moved.reshape(copies, now // copies, *rest)
    return wide.movedim(0, dim).contiguous()
