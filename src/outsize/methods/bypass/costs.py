"""What a variant of a sub-block costs in use: parameters, bytes of weights and of KV cache, seconds.

Costs are those of a model with one layer, with only this sub-block, less those of one with neither. So what is measured
is what transformers runs, and whatever a class does beside its sub-blocks is not counted twice.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outsize.device.device import Device
from outsize.methods.bypass.pruned_config import LayerChange, Part, PartPlace, pruned_config, with_layers
from outsize.model.pruned import pruned_class

_DECODED = 16
"""Tokens that are decoded one by one to time one of them."""
_REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    params: int
    weight_bytes: int
    kv_bytes: float
    """Of the KV cache, per token of context."""
    prefill_seconds: float | None = None
    """Of a batch of contexts. None: not measured."""
    decode_seconds: float | None = None
    """Of one more token for each row."""

    def __sub__(self, other: "Cost") -> "Cost":
        def less(a: float | None, b: float | None) -> float | None:
            return None if a is None or b is None else max(a - b, 0.0)

        return Cost(
            params=self.params - other.params,
            weight_bytes=self.weight_bytes - other.weight_bytes,
            kv_bytes=self.kv_bytes - other.kv_bytes,
            prefill_seconds=less(self.prefill_seconds, other.prefill_seconds),
            decode_seconds=less(self.decode_seconds, other.decode_seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What a model is used for."""

    batch: int = 1
    context: int = 4096
    decoded: int = 256
    """Tokens that are generated for each row."""

    def memory(self, cost: Cost) -> float:
        return cost.weight_bytes + self.batch * (self.context + self.decoded) * cost.kv_bytes

    def latency(self, cost: Cost) -> float:
        assert cost.prefill_seconds is not None and cost.decode_seconds is not None, "it was not measured"
        return cost.prefill_seconds + self.decoded * cost.decode_seconds


@dataclass
class CostMeter:
    """Costs of sub-blocks on a device. Each distinct shape is measured once."""

    config: Any
    """Of the teacher."""
    parent: type
    layer_list: str
    parts: Mapping[Part, PartPlace]
    device: Device
    dtype: torch.dtype
    use: Use
    timed: bool = True
    _known: dict[Any, Cost] = field(default_factory=dict)

    def cost(self, layer: int, part: Part, change: LayerChange) -> Cost:
        """Of one sub-block of a layer that is changed in this way. `LayerChange()`: as the teacher has it."""
        others = frozenset(self.parts) - {part}
        only = replace(change, skip=change.skip | others, linear=change.linear - others)
        return self._of((layer,), only) - self._of((layer,), self._nothing)

    def beside_parts(self, layer: int) -> Cost:
        """Of what a layer has beside its parts: norms that several parts read, or that follow a part."""
        return self._of((layer, layer), self._nothing) - self._of((layer,), self._nothing)

    def outside(self) -> Cost:
        """Of everything but the layers."""
        return self._of((0,), self._nothing) - self.beside_parts(0)

    @property
    def _nothing(self) -> LayerChange:
        return LayerChange(skip=frozenset(self.parts))

    def _of(self, layers: tuple[int, ...], change: LayerChange) -> Cost:
        types = getattr(self.config, "layer_types", None)
        key = (
            tuple(types[layer] if types else None for layer in layers),
            tuple(sorted(change.sizes.items())),
            tuple(sorted(change.skip)),
            tuple(sorted(change.linear)),
        )
        if key not in self._known:
            self._known[key] = self._measured(layers, change)
        return self._known[key]

    @torch.no_grad()
    def _measured(self, layers: tuple[int, ...], change: LayerChange) -> Cost:
        config, parent = with_layers(self.config, layers), self.parent
        if change != LayerChange():
            changes = dict.fromkeys(range(len(layers)), change)
            config = pruned_config(config, parent, self.layer_list, self.parts, changes)
            parent = pruned_class(config, parent)
        with self.device.torch_device:  # which draws its weights in no time
            model: Any = parent._from_config(config, dtype=self.dtype)  # type: ignore[attr-defined]
        params = sum(each.numel() for each in model.parameters())
        weight_bytes = sum(each.nbytes for each in model.parameters())
        # The size of a cache needs few tokens; seconds need all.
        rows, tokens = (self.use.batch, self.use.context) if self.timed else (1, 4)
        model = model.eval()
        ids = torch.zeros(rows, tokens, dtype=torch.long, device=self.device.torch_device)
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        kept = cache.layers[0]
        # Where attention is skipped, a cache keeps one number per token to count tokens by: as good as nothing.
        has_keys = "attention" not in change.skip | change.linear
        kv_bytes = (kept.keys.nbytes + kept.values.nbytes) / (rows * tokens) if has_keys else 0.0
        cost = Cost(params=params, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
        if not self.timed:
            return cost
        one = ids[:, :1]

        def prefilled() -> Any:
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

        def decode() -> None:
            past = prefilled()
            for _ in range(_DECODED):
                past = model(input_ids=one, past_key_values=past, use_cache=True).past_key_values

        prefill, both = self._seconds(prefilled), self._seconds(decode)
        return replace(cost, prefill_seconds=prefill, decode_seconds=max(both - prefill, 0.0) / _DECODED)

    def _seconds(self, work: Callable[[], object]) -> float:
        work()
        found = []
        for _ in range(_REPEATS):
            start = self.device.mark()
            work()
            end = self.device.mark()
            self.device.synchronize()
            found.append(self.device.between(start, end))
        return statistics.median(found)
