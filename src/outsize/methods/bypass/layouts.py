"""How the tensors of a layer are laid out: found by trying each way on a part of a batch.

A cut sub-block is compared with the teacher's, changed so that both must give the same: channels that were removed are
multiplied by zero, merged KV heads are repeated. What no way reproduces is no axis: variants of that kind are refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.methods.bypass.axes import is_input
from outsize.methods.bypass.builder import layer_resizings, resized
from outsize.methods.bypass.matrices import matrix
from outsize.methods.bypass.parts import LayerParts, Value, find_parts
from outsize.methods.bypass.students import copied
from outsize.methods.bypass.subblocks import SubBlock, SubBlockRun, find_subblocks, record
from outsize.methods.bypass.tensors import FusedHeads, FusedWidth, linear_map, repeat_heads
from outsize.methods.bypass.variants import Change
from outsize.model.stack import LayerCall, first_tensor, run

_TOLERANCE = 1e-3
"""Of the squared error, relative: above what rounding in bf16 makes, below what a wrong order makes."""


def inspect_layer(
    name: str,
    layer: nn.Module,
    config: Any,
    call: LayerCall,
    hidden: Tensor,
    overrides: Mapping[str, str] | None = None,
) -> LayerParts:
    """All that building students needs to know of a layer. `LayerParts.of_layer` gives it for layers of the same
    structure.

    `hidden`: the layer's input for a small batch whose rows have two tokens or more and no padding before the first.
    `overrides`: of `find_subblocks`. The layer's weights are materialized.
    """
    subblocks = find_subblocks(layer, call, hidden, overrides)
    _, runs = record(layer, subblocks, subblocks.keys(), call, hidden)
    return _with_layouts(find_parts(name, layer, config, subblocks), runs)


@torch.no_grad()
def _with_layouts(parts: LayerParts, runs: Mapping[str, SubBlockRun]) -> LayerParts:
    if "intermediate_size" in parts.axes:
        parts = _with_fused_width(parts, runs["ffn"])
    if (attention := parts.subblocks.get("attention")) is not None:
        if "num_key_value_heads" in parts.axes:
            parts = _with_fused_heads(parts, runs["attention"])
        parts = replace(parts, output=_last_matrix(parts.layer, attention, runs["attention"]))
        parts = replace(parts, value=_value(parts, runs["attention"]))
    return replace(parts, shape=replace(parts.shape, has_linear_attention_map=parts.value is not None))


def _with_fused_width(parts: LayerParts, given: SubBlockRun) -> LayerParts:
    size = parts.axes["intermediate_size"].size
    change = Change(subblock="ffn", kind="intermediate_size", count=size // 2)
    path = parts.subblocks["ffn"].module
    changes = layer_resizings(parts, change)
    masked = copied(parts.layer.get_submodule(path))
    tensors = dict(masked.named_parameters(prefix=path))
    for name, (dim, _, now) in changes.items():
        if is_input(parts.layer, name, changes):
            tensors[name].narrow(dim, now, tensors[name].shape[dim] - now).zero_()
    ways: tuple[FusedWidth, ...] = ("halves", "interleaved")
    for way in ways:
        tried = replace(parts, fused_width=way)
        if _agree(parts, "ffn", given, masked, resized(tried, change, None)):
            return tried
    return _without(parts, "intermediate_size")


def _with_fused_heads(parts: LayerParts, given: SubBlockRun) -> LayerParts:
    heads = parts.axes["num_key_value_heads"].size
    count = max(divisor for divisor in range(1, heads) if heads % divisor == 0)
    change = Change(subblock="attention", kind="num_key_value_heads", count=count, how="average")
    path = parts.subblocks["attention"].module
    ways: tuple[FusedHeads, ...] = ("separate", "after", "grouped")
    for way in ways:
        tried = replace(parts, fused_heads=way)
        try:
            student = resized(tried, change, None)
            repeated = copied(parts.layer.get_submodule(path))
            own = student.state_dict(prefix=f"{path}.")
            for name, (dim, was, now) in layer_resizings(parts, change).items():
                head_size = (was - now) // (heads - count) // (1 if way == "separate" else 2)
                whole = repeat_heads(own[name], dim, count, heads, way, head_size)
                repeated.get_parameter(name.removeprefix(f"{path}.")).copy_(whole)
        except (RuntimeError, ModelUnsupported):  # its sizes do not go into this way
            continue
        if _agree(parts, "attention", given, repeated, student):
            return tried
    return _without(parts, "num_key_value_heads")


def _without(parts: LayerParts, kind: str) -> LayerParts:
    axes = {other: axis for other, axis in parts.axes.items() if other != kind}
    sizes: dict[str, Any] = {kind: None}
    return replace(parts, axes=axes, shape=replace(parts.shape, **sizes))


def _input(parts: LayerParts, kind: Any, given: SubBlockRun) -> Tensor:
    norm = parts.subblocks[kind].norm
    return given.input if norm is None else first_tensor(parts.layer.get_submodule(norm)(given.input))


def _agree(parts: LayerParts, kind: str, given: SubBlockRun, one: nn.Module, other: nn.Module) -> bool:
    hidden = _input(parts, kind, given)
    return _is_close(*(run(module.eval(), given.call, hidden) for module in (one, other)))


def _is_close(left: Tensor, right: Tensor) -> bool:
    left, right = left.double(), right.double()
    return bool((left - right).square().sum() <= _TOLERANCE * left.square().sum())


def _last_matrix(layer: nn.Module, subblock: SubBlock, given: SubBlockRun) -> str | None:
    """The path of the last linear map that the module runs, if it returns hidden states."""
    ran: list[tuple[str, Any]] = []
    handles = []
    for path, module in layer.get_submodule(subblock.module).named_modules(prefix=subblock.module):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            handles.append(module.register_forward_hook(lambda *call, path=path: ran.append((path, call[2]))))
    try:
        hidden = given.input if subblock.norm is None else first_tensor(layer.get_submodule(subblock.norm)(given.input))
        run(layer.get_submodule(subblock.module), given.call, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return ran[-1][0] if ran and ran[-1][1].shape[-1] == given.target.shape[-1] else None


def _value(parts: LayerParts, given: SubBlockRun) -> Value | None:
    """Where the value projection is. A row's first token attends to itself alone: there the output must be output
    projection times value.
    """
    if parts.output is None:
        return None
    first, target = _input(parts, "attention", given)[:, 0], given.target[:, 0]
    output = matrix(parts.layer.get_submodule(parts.output))
    bias = getattr(parts.layer.get_submodule(parts.output), "bias", None)
    for value in _candidates(parts, output):
        try:
            linear = linear_map(output, value.rows(parts.layer), value.heads)
            constant = value.bias(parts.layer)
            shift = 0 if constant is None else linear_map(output, constant.unsqueeze(1), value.heads).squeeze(1)
        except RuntimeError:  # its sizes do not go into this way
            continue
        if _is_close(target, first @ linear.T + shift + (0 if bias is None else bias)):
            return value
    return None


def _candidates(parts: LayerParts, output: Tensor) -> Iterator[Value]:
    attention, config = parts.subblocks["attention"].module, parts.config
    heads = dict.fromkeys((parts.shape.num_key_value_heads, getattr(config, "num_attention_heads", None), 1))
    for path, module in parts.layer.get_submodule(attention).named_modules(prefix=attention):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or path == parts.output:
            continue
        rows, inputs = matrix(module).shape
        if inputs != len(output):
            continue
        for number in (number for number in heads if number is not None):
            if path.rpartition(".")[2].startswith("v"):
                yield Value(path, "separate", number, rows)
            if (size := (rows - output.shape[1]) // 2) > 0:
                yield Value(path, "after", number, size)
                yield Value(path, "grouped", number, size)
