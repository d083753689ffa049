"""Chooses one variant for every sub-block under a target: options from scores and costs, limits from shares."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outsize.base.errors import ConfigError
from outsize.config.prune_target import PruneTarget
from outsize.methods.bypass.builder import config_sizes
from outsize.methods.bypass.choose import Choice, Limit, Option, TargetInfeasible, choose, choose_uniform
from outsize.methods.bypass.costs import Cost, CostMeter, Use
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.pruned_config import LayerChange, Part, PartPlace
from outsize.methods.bypass.variants import Variant
from outsize.run.prune_setup import PruneSetup

TEACHER = "teacher"
"""The name of the option that changes nothing."""
_PARTS: dict[str, Part] = {"attention": "attention", "ffn": "mlp"}
"""transformers' names of the kinds of sub-blocks."""


@dataclass(frozen=True, slots=True)
class Chosen:
    target: PruneTarget
    choice: Choice
    variants: Mapping[int, tuple[Variant, ...]]
    """By layer. Layers that stay as they are, are missing."""
    predicted: Mapping[str, float]
    """Costs of the whole model."""
    teacher: Mapping[str, float]

    @property
    def name(self) -> str:
        """`params-0.7`, `memory-9GiB-latency-0.8`."""
        parts = []
        for cost, bounds in self.target.limits.items():
            parts += [f"{cost}-{key.removesuffix('_share')}-{value:g}" for key, value in bounds.items()]
        return "_".join(parts).replace("-max-", "-")


def change_of(parts: LayerParts, variants: Sequence[Variant]) -> LayerChange:
    """How a layer's config differs if these variants are in it."""
    sizes: dict[str, Any] = {}
    skip, linear = set(), set()
    for variant in variants:
        sizes |= config_sizes(parts, variant)
        skip |= {_part(parts, change.subblock) for change in variant.changes if change.kind == "skip"}
        linear |= {_part(parts, change.subblock) for change in variant.changes if change.kind == "linear"}
    return LayerChange(sizes, frozenset(skip), frozenset(linear))


def _part(parts: LayerParts, subblock: str) -> Part:
    if subblock not in _PARTS:
        raise ConfigError(f"prune.target: {parts.name} has a {subblock}, which no folder can leave out. Remove target.")
    return _PARTS[subblock]


def places(setup: PruneSetup) -> dict[Part, PartPlace]:
    """Where attention and feed-forward are in a layer: the same in all layers."""
    found: dict[Part, PartPlace] = {}
    for parts in setup.parts.values():
        for subblock in parts.subblocks.values():
            norms = () if subblock.norm is None else (subblock.norm,)
            place = PartPlace(subblock.module, norms, subblock.num_outputs)
            name = _part(parts, subblock.kind)
            if found.setdefault(name, place) != place:
                raise ConfigError(
                    f"prune.target: the parts of {parts.name} have other names than those of layers before it. Models "
                    "with layers of several kinds are pruned as far as the library. Remove target."
                )
    return found


def _meter(setup: PruneSetup, places: Mapping[Part, PartPlace], use: Use, *, timed: bool) -> CostMeter:
    model: Any = setup.stack.model
    return CostMeter(model.config, type(model), setup.stack.path, places, setup.device, model.dtype, use, timed=timed)


class Choosing:
    """Costs of all variants, and choices among them."""

    def __init__(self, setup: PruneSetup, scores: Mapping[str, float], use: Use, *, timed: bool):
        """`scores`: by `LAYER/VARIANT`."""
        self._setup, self._use, self._scores = setup, use, scores
        self.places = places(setup)
        self._meter = _meter(setup, self.places, use, timed=timed)
        self._meter_of_teacher = self._meter
        if setup.unreduced is not None:
            self._meter_of_teacher = _meter(setup.unreduced, self.places, use, timed=timed)
        self._table = read_table(setup.prune.costs)
        self._is_timed = timed or self._table is not None
        self._layers = range(len(setup.stack.layers))
        self._fixed = self._cost(0, None, ())
        self._teacher = self._cost(0, None, (), of_teacher=True)
        self._options: list[Option] = []
        self._of_option: dict[tuple[str, str], tuple[int, Variant]] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        for layer in self._layers:
            self._add_layer(layer)

    def _add_layer(self, layer: int) -> None:
        variants = self._setup.variants.get(layer, ())
        beside = self._costs(self._beside_parts(layer))
        self._teacher = _plus(self._teacher, self._costs(self._beside_parts(layer, of_teacher=True)))
        if self._setup.prune.shape == "free":
            self._fixed, beside = _plus(self._fixed, beside), {}
        learned = sorted({variant.learn for variant in variants})
        units = [("block", tuple(self.places))] if "block" in learned else [(k, (_PARTS[k],)) for k in _PARTS]
        groups = []
        for unit, parts in units:
            own = self._cost(layer, parts, ())
            self._teacher = _plus(self._teacher, self._cost(layer, parts, (), of_teacher=True))
            some = [variant for variant in variants if variant.learn == unit]
            group = f"{layer:03d}/{unit}"
            groups.append(group)
            if self._setup.unreduced is None or not some:  # else an unpruned variant is among them, and trained
                self._options.append(Option(group, TEACHER, 0.0, _plus(own, beside)))
            for variant in some:
                name = _option_name(variant, parts)
                score = self._scores[f"{layer:03d}/{variant.name}"]
                if not math.isfinite(score):
                    continue  # it was stopped, or has no loss
                costs = self._cost(layer, parts, (variant,))
                # `uniform` drops whole layers, with all that is in them.
                self._options.append(Option(group, name, score, costs if name == "skip" else _plus(costs, beside)))
                self._of_option[group, name] = layer, variant
            beside = {}
        self._groups[f"{layer:03d}"] = tuple(groups)

    def _cost(
        self, layer: int, parts: Sequence[Part] | None, variants: Sequence[Variant], *, of_teacher: bool = False
    ) -> dict[str, float]:
        """Of some parts of a layer; of everything outside of the layers if `parts` is None."""
        meter = self._meter_of_teacher if of_teacher else self._meter
        if parts is None:
            return self._costs(self._timed(meter.outside(), "outside"))
        change = change_of(self._setup.parts[layer], variants) if variants else LayerChange()
        total: dict[str, float] = {}
        for part in parts:
            name = next(kind for kind, each in _PARTS.items() if each == part)
            label = f"{name}-{'-'.join(c.name for v in variants for c in v.changes if c.subblock == name) or TEACHER}"
            total = _plus(total, self._costs(self._timed(meter.cost(layer, part, change), label)))
        return total

    def _beside_parts(self, layer: int, *, of_teacher: bool = False) -> Cost:
        cost = (self._meter_of_teacher if of_teacher else self._meter).beside_parts(layer)
        return cost if self._table is None else replace(cost, prefill_seconds=0.0, decode_seconds=0.0)

    def _timed(self, cost: Cost, label: str) -> Cost:
        if self._table is None:
            return cost
        if label not in self._table:
            raise ConfigError(
                f"prune.costs: {self._setup.prune.costs} has no {label}. It needs outside and every variant, with "
                "prefill_seconds and decode_seconds."
            )
        given = self._table[label]
        return replace(cost, prefill_seconds=given["prefill_seconds"], decode_seconds=given["decode_seconds"])

    def _costs(self, cost: Cost) -> dict[str, float]:
        found = {"params": float(cost.params), "memory": self._use.memory(cost)}
        return {**found, "latency": self._use.latency(cost)} if self._is_timed else found

    def choose(self, target: PruneTarget) -> Chosen:
        limits = []
        for cost, bounds in target.limits.items():
            whole, fixed = self._teacher[cost], self._fixed[cost]
            low = max(bounds.get("min", -math.inf), bounds.get("min_share", -math.inf) * whole)
            high = min(bounds.get("max", math.inf), bounds.get("max_share", math.inf) * whole)
            limits.append(Limit(cost, high - fixed, low - fixed))
        seconds = self._setup.prune.choose_seconds
        try:
            if self._setup.prune.shape == "uniform":
                choice = choose_uniform(self._options, limits, self._groups, time_limit=seconds)
            else:
                choice = choose(self._options, limits, time_limit=seconds)
        except TargetInfeasible as error:
            raise error.plus(self._fixed) from None
        variants: dict[int, tuple[Variant, ...]] = {}
        for group, name in choice.names.items():
            if (found := self._of_option.get((group, name))) is not None:
                variants[found[0]] = (*variants.get(found[0], ()), found[1])
        return Chosen(target, choice, variants, _plus(self._fixed, choice.costs), self._teacher)


def _option_name(variant: Variant, parts: Sequence[Part]) -> str:
    """`skip` if nothing is left of these parts."""
    if all(change.kind == "skip" for change in variant.changes):
        return "skip" if len(variant.changes) == len(parts) else f"{variant.changes[0].subblock}-skip"
    return "-".join(change.name for change in variant.changes)


def _plus(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def read_table(path: str | None) -> dict[str, dict[str, float]] | None:
    if path is None:
        return None
    try:
        table = json.loads(Path(path).read_text())
        return {name: {key: float(value) for key, value in row.items()} for name, row in table.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"prune.costs: {path} cannot be read ({error}). Correct it.") from None
