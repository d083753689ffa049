"""`prune.hidden_size`: the teacher with fewer residual channels, cut from it whenever a layer is read."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.cache_folder import write_whole
from outsize.base.errors import BadFile
from outsize.device.device import Device
from outsize.methods.bypass.hidden_size import (
    Channels,
    adapt_to_zeros,
    find_reduction,
    is_same_output,
    reduced_model,
    require_same_output,
    unsupported,
)
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.subblocks import record
from outsize.model.build import Built
from outsize.model.stack import LayerStack
from outsize.run.teacher import Teacher

CHANNELS_FILE = "channels.json"


class Reduced:
    """Also the source of its weights (`model.weights.Weights`)."""

    def __init__(
        self,
        teacher: Teacher,
        stack: LayerStack,
        parts: Mapping[int, LayerParts],
        hidden_size: int,
        device: Device,
        *,
        scales_embedding: bool = False,
    ):
        """`parts`: of the teacher's layers. `scales_embedding`: the class does, by the root of the hidden size."""
        self._of = teacher
        model = reduced_model(teacher.model, hidden_size)
        self.reduction = find_reduction(teacher.model, model)
        if scales_embedding:
            self.reduction = self.reduction.with_scaled_embedding(teacher.model, stack.path)
        self.channels: Channels | None = None
        """None: not ranked yet."""
        self.teacher = Teacher(Built(model, self), device)
        self.stack = LayerStack(model, stack.path, materialized=self.teacher.materialized)
        layers = self.stack.layers
        self.parts = {
            index: replace(each, layer=layers[index].module, config=self.stack.config) for index, each in parts.items()
        }

    @property
    def required_channels(self) -> Channels:
        assert self.channels is not None, "residual channels are ranked before anything is made of them"
        return self.channels

    @property
    def resident_bytes(self) -> int:
        """On the device for the whole run: buffers, and the numbers of the kept channels."""
        return self.teacher.resident_bytes + self.reduction.count * torch.int64.itemsize

    @property
    def hash(self) -> str:
        """Of the kept channels."""
        keep = self.required_channels.keep.tolist()
        return hashlib.sha256(json.dumps(keep).encode()).hexdigest()[:16]

    def read_into(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self.reduction.cut(name, self._of.value(name), self.required_channels))

    def close(self) -> None:
        """The files are the teacher's."""

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerParts]:
        """A layer with its weights in host memory."""
        params = list(self.stack.layers[index].module.parameters())
        self.teacher.load(params)
        try:
            yield self.parts[index]
        finally:
            self.teacher.release(params)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within it, layers have the sizes that count, and any channels."""
        before, reduction = self.channels, self.reduction
        self.channels = Channels.first(reduction.size, reduction.count, reduction.norms)
        try:
            yield
        finally:
            self.channels = before

    def norms(self, stack: LayerStack, layer: int | None) -> dict[str, nn.Module]:
        """By path, the teacher's norms over residual channels in a layer, or outside of all layers."""
        inside = tuple(f"{each.name}." for each in stack.layers)
        where = inside if layer is None else (inside[layer],)
        paths = [path for path in self.reduction.norms if path.startswith(where) == (layer is not None)]
        return {path: stack.model.get_submodule(path) for path in paths}

    def choose(self, folder: Path, statistics: Callable[[], Mapping[str, Tensor]]) -> None:
        """Take the channels of a folder's library; the first time, rank them. `statistics`: of all norms."""
        path = folder / CHANNELS_FILE
        if not path.exists():
            made = Channels.ranked(statistics(), self.reduction.count)
            facts = {
                "hidden_size": self.reduction.count,
                "of": self.reduction.size,
                "hash": hashlib.sha256(json.dumps(made.keep.tolist()).encode()).hexdigest()[:16],
                "channels": made.keep.tolist(),
                "scales": dict(made.scales),
            }
            write_whole(path, json.dumps(facts, indent=1) + "\n")
        self.channels = self._read(path)

    def _read(self, path: Path) -> Channels:
        try:
            facts = json.loads(path.read_text())
            keep, scales = torch.tensor(facts["channels"]), {str(k): float(v) for k, v in facts["scales"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise _damaged(path, str(error)) from None
        reduction = self.reduction
        is_sorted = keep.dim() == 1 and bool((keep.diff() > 0).all()) and not keep.is_floating_point()
        if not is_sorted or len(keep) != reduction.count or int(keep[0]) < 0 or int(keep[-1]) >= reduction.size:
            raise _damaged(path, f"it does not name {reduction.count} of {reduction.size} channels")
        if scales.keys() != reduction.norms.keys():
            raise _damaged(path, "it names other norms than the teacher has")
        found = Channels(keep, scales)
        if hashlib.sha256(json.dumps(keep.tolist()).encode()).hexdigest()[:16] != facts.get("hash"):
            raise _damaged(path, "its channels do not have its hash")
        return found


def _damaged(path: Path, why: str) -> BadFile:
    return BadFile(
        f"{path} is damaged: {why}. Restore it: the variants of this folder were trained on its channels. Or set "
        "another output_dir."
    )


@torch.no_grad()
def make_reduced(
    teacher: Teacher,
    stack: LayerStack,
    parts: Mapping[int, LayerParts],
    hidden_size: int,
    arguments: Mapping[str, Any],
    device: Device,
) -> Reduced:
    """Raises ModelUnsupported unless the class with fewer residual channels computes what the teacher computes when the
    other channels are zero. `arguments`: of a small batch.

    If few channels go, what does not scale as it should could pass as rounding: then half of them are checked.
    """
    config: Any = teacher.model.config
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "hidden_size", 0) or 0
    Reduced(teacher, stack, parts, hidden_size, device)  # its config and shapes are checked first
    few = max(heads, size // 2 // heads * heads) if hidden_size > 0.75 * size else hidden_size
    for scales_embedding in (False, True):
        reduced = Reduced(teacher, stack, parts, few, device, scales_embedding=scales_embedding)
        with reduced.measured():
            given, own = (each.capture(arguments).hidden for each in (stack, reduced.stack))
        if is_same_output(given[..., :few], own):
            _check(teacher, stack, parts, reduced, arguments)
            return Reduced(teacher, stack, parts, hidden_size, device, scales_embedding=scales_embedding)
    raise unsupported("the input of the layers", "it depends on the hidden size in more than its channels")


def _check(
    teacher: Teacher, stack: LayerStack, parts: Mapping[int, LayerParts], reduced: Reduced, arguments: Mapping[str, Any]
) -> None:
    adapt_to_zeros(reduced.teacher.model, reduced.reduction)
    count = reduced.reduction.count
    with reduced.measured():
        calls, own = stack.capture(arguments), reduced.stack.capture(arguments)
        hidden = calls.hidden.clone()
        hidden[..., count:] = 0
        few = hidden[..., :count].contiguous()
        seen = set()
        for index, layer in enumerate(stack.layers):
            if layer.structure in seen:
                continue
            seen.add(layer.structure)
            found = parts[index]
            with teacher.materialized(list(layer.module.parameters())):
                masked = reduced.reduction.masked(layer.name, layer.module, reduced.required_channels.keep)
            kinds = found.subblocks.keys()
            expected, of_parts = record(masked, found.subblocks, kinds, calls.calls[index], hidden)
            module = reduced.stack.layers[index].module
            with reduced.teacher.materialized(list(module.parameters())):
                made, own_parts = record(module, found.subblocks, kinds, own.calls[index], few)
            for kind in kinds:
                target = of_parts[kind].target[..., :count]
                require_same_output(f"{layer.name}.{found.subblocks[kind].module}", target, own_parts[kind].target)
            require_same_output(layer.name, expected[..., :count], made)
        expected, made = stack.output(arguments, hidden).logits, reduced.stack.output(arguments, few).logits
        require_same_output("its norm and head after the layers", expected, made)
