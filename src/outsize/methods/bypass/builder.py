"""Builds students: a module of the teacher's class, made from a changed config, with tensors made from the teacher's
(methods/bypass/tensors.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.methods.bypass.axes import Axis, Shapes, shapes_of, unit_of
from outsize.methods.bypass.importance import LayerImportance
from outsize.methods.bypass.matrices import matrix
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.resizing import Resizing, changed_dims, new_module, resizings
from outsize.methods.bypass.students import Replacement, Student, copied
from outsize.methods.bypass.subblocks import SubBlock
from outsize.methods.bypass.tensors import keep_channels, keep_experts, kept, linear_map, merge_heads
from outsize.methods.bypass.variants import Change, Variant


@torch.no_grad()
def build_student(parts: LayerParts, variant: Variant, importance: LayerImportance | None = None) -> Student:
    """A student of a layer whose weights are materialized, on the device where they are. `importance` None: channels,
    heads and experts are the first.
    """
    if variant.learn == "block":
        layer = copied(parts.layer)
        for change in variant.changes:
            layer.set_submodule(_subblock(parts, change).module, _changed(parts, change, importance))
        return Student(layer, None, None)
    (change,) = variant.changes
    subblock = _subblock(parts, change)
    norm = None
    if change.kind != "skip" and subblock.norm is not None:
        norm = copied(parts.layer.get_submodule(subblock.norm))
    return Student(_changed(parts, change, importance), norm, subblock)


def student_numels(parts: LayerParts, variant: Variant) -> dict[str, tuple[int, torch.dtype]]:
    """The parameters that a student will train, for `optim.flat.flat_bytes`. Reads no weights."""
    changed = {_subblock(parts, change).module: change for change in variant.changes}
    numels: dict[str, tuple[int, torch.dtype]] = {}
    kept_as_is = [parts.layer] if variant.learn == "block" else []
    for change in variant.changes if variant.learn != "block" else ():
        norm = _subblock(parts, change).norm
        kept_as_is += [parts.layer.get_submodule(norm)] if norm is not None and change.kind != "skip" else []
    for i, module in enumerate(kept_as_is):
        for name, param in module.named_parameters():
            if variant.learn != "block" or not any(name.startswith(f"{path}.") for path in changed):
                numels[f"{i}.{name}"] = param.numel(), param.dtype
    for path, change in changed.items():
        numels |= {f"{path}.{name}": numel for name, numel in _numels_of(parts, path, change).items()}
    return numels


def config_sizes(parts: LayerParts, variant: Variant) -> dict[str, Any]:
    """The settings of the config with which the teacher's class builds the variant's modules."""
    axes = {parts.axes[change.kind]: change.count for change in variant.changes if change.count is not None}
    return {axis.key: axis.changed(parts.config, size) for axis, size in axes.items()}


def _subblock(parts: LayerParts, change: Change) -> SubBlock:
    return parts.subblocks[change.subblock]  # type: ignore[index]


def _numels_of(parts: LayerParts, path: str, change: Change) -> dict[str, tuple[int, torch.dtype]]:
    module = parts.layer.get_submodule(path)
    own = {name: (param.numel(), param.dtype) for name, param in module.named_parameters()}
    if change.kind == "copy":
        return own
    if change.kind == "skip":
        return {}
    if change.kind == "linear":
        weight = _output(parts)
        return {"linear.weight": (len(weight) ** 2, weight.dtype)}
    made = new_module(parts, _subblock(parts, change).kind, sizes_of(parts, change))
    return {name: (param.numel(), own[name][1]) for name, param in made.named_parameters()}


def _changed(parts: LayerParts, change: Change, importance: LayerImportance | None) -> nn.Module:
    subblock = _subblock(parts, change)
    module = parts.layer.get_submodule(subblock.module)
    if change.kind == "copy":
        return copied(module)
    if change.kind == "skip":
        return Replacement(None, subblock.num_outputs)
    if change.kind == "linear":
        assert parts.value is not None
        value = parts.value.rows(parts.layer)
        return Replacement(linear_map(_output(parts), value, parts.value.heads), subblock.num_outputs)
    return resized(parts, change, importance)


def _output(parts: LayerParts) -> Tensor:
    assert parts.output is not None, f"{parts.name} has no linear map in place of attention"
    return matrix(parts.layer.get_submodule(parts.output))


def resized(parts: LayerParts, change: Change, importance: LayerImportance | None) -> nn.Module:
    """A sub-block's module with another width, number of KV heads or of experts."""
    subblock, count = _subblock(parts, change), change.count
    path = subblock.module
    made = new_module(parts, subblock.kind, sizes_of(parts, change), on_meta=False)
    given: dict[str, Tensor] = parts.layer.get_submodule(path).state_dict(prefix=f"{path}.")
    shapes = shapes_of(made, f"{path}.")
    if change.kind == "intermediate_size":
        tensors = _narrowed(parts, given, shapes, importance)
    elif change.kind == "num_key_value_heads":
        tensors = _with_merged_heads(parts, change, given, shapes, importance)
    else:
        tensors = _with_fewer_experts(parts, change, given, shapes, importance)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelUnsupported(
                f"{parts.name}.{name}: {type(parts.layer).__name__} builds it as {shape} for {change.kind} {count}, "
                f"which the teacher's {tuple(given[name].shape)} cannot be cut to. Choose another number."
            )
    made.load_state_dict({name.removeprefix(f"{path}."): tensor for name, tensor in tensors.items()}, assign=True)
    _copy_buffers(parts.layer.get_submodule(path), made)
    if change.kind == "experts":
        _require_routable(parts, change, made)
    return made


def _require_routable(parts: LayerParts, change: Change, module: nn.Module) -> None:
    """Routers that choose among groups of experts need a multiple of the groups."""
    weight = next(param for param in module.parameters() if param.dim() == 2)
    try:
        module(torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device))
    except RuntimeError as error:
        raise ModelUnsupported(
            f"experts: the router of {parts.name} cannot choose among {change.count} experts ({error}). Choose another "
            "number, a multiple of its groups of experts."
        ) from None


def sizes_of(parts: LayerParts, change: Change) -> dict[Axis, int]:
    assert change.count is not None
    return {parts.axes[change.kind]: change.count}


def layer_resizings(parts: LayerParts, change: Change) -> dict[str, Resizing]:
    """By tensor of the layer that a change resizes: the dimension, its size before and then. Reads no weights."""
    return resizings(parts, _subblock(parts, change).kind, sizes_of(parts, change))


def _scores(parts: LayerParts, scores: Mapping[str, Tensor], path: str) -> Tensor:
    if path not in scores:
        raise ModelUnsupported(
            f"{parts.name}.{path}: no importance was measured for it, because its output projection or router was not "
            "found. Set importance: truncate."
        )
    return scores[path]


def _narrowed(
    parts: LayerParts, given: Mapping[str, Tensor], shapes: Shapes, importance: LayerImportance | None
) -> dict[str, Tensor]:
    changes = changed_dims(given, shapes)
    widths: dict[str, tuple[int, int]] = {}
    for name, (_, was, now) in changes.items():
        unit = unit_of(parts.layer, name)
        widths[unit] = min(widths.get(unit, (was, now)), (was, now))
    keep = {
        unit: kept(None if importance is None else _scores(parts, importance.channels, unit), *width)
        for unit, width in widths.items()
    }
    tensors = {name: given[name].clone() for name in shapes if name not in changes}
    for name, (dim, _, _) in changes.items():
        unit = unit_of(parts.layer, name)
        tensors[name] = keep_channels(given[name], dim, keep[unit], widths[unit][0], parts.fused_width)
    return tensors


def _with_merged_heads(
    parts: LayerParts, change: Change, given: Mapping[str, Tensor], shapes: Shapes, importance: LayerImportance | None
) -> dict[str, Tensor]:
    heads, count = parts.axes[change.kind].size, change.count
    assert count is not None
    chosen = None
    if change.how != "average":
        chosen = torch.zeros(count, dtype=torch.int64)
        if change.how == "select" and importance is not None:
            scores = _scores(parts, importance.heads, _subblock(parts, change).module)
            chosen = scores.view(count, heads // count).argmax(1)
    changes = changed_dims(given, shapes)
    tensors = {name: given[name].clone() for name in shapes if name not in changes}
    for name, (dim, was, now) in changes.items():
        size = (was - now) // (heads - count) // (1 if parts.fused_heads == "separate" else 2)
        tensors[name] = merge_heads(given[name], dim, heads, count, parts.fused_heads, size, chosen)
    return tensors


def _with_fewer_experts(
    parts: LayerParts, change: Change, given: Mapping[str, Tensor], shapes: Shapes, importance: LayerImportance | None
) -> dict[str, Tensor]:
    assert change.count is not None
    path = _subblock(parts, change).module
    scores = None if importance is None else _scores(parts, importance.experts, path)
    keep = kept(scores, parts.axes["experts"].size, change.count)
    changes = changed_dims(given, shapes)
    listed = _list_of_experts(given, shapes)
    tensors: dict[str, Tensor] = {}
    for name in shapes:
        if name in changes:
            tensors[name] = keep_experts(given[name], keep)
        elif listed is not None and name.startswith(listed):
            number, _, rest = name.removeprefix(listed).partition(".")
            tensors[name] = given[f"{listed}{keep[int(number)]}.{rest}"].clone()
        else:
            tensors[name] = given[name].clone()
    return tensors


def _list_of_experts(given: Mapping[str, Tensor], shapes: Shapes) -> str | None:
    """The path, with a dot, of the list whose elements became fewer."""
    for name in given.keys() - shapes.keys():
        parts = name.split(".")
        return ".".join(parts[: next(i for i, part in enumerate(parts) if part.isdigit())]) + "."
    return None


def _copy_buffers(teacher: nn.Module, student: nn.Module) -> None:
    """Buffers that are not saved (rotary tables, masks), in the teacher's dtype and on its device."""
    theirs = dict(teacher.named_buffers())
    for path, module in student.named_modules():
        for name, buffer in module._buffers.items():
            own = theirs.get(f"{path}.{name}".lstrip("."))
            if buffer is not None and own is not None and own.shape == buffer.shape:
                module._buffers[name] = own.clone()
            elif buffer is not None:
                module._buffers[name] = buffer.to(next(teacher.parameters()).device)
