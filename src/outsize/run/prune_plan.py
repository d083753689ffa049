"""Plans the memory of a pruning run: which variants of a layer are trained together, and where hidden states are kept.

A layer's teacher, its variants with their optimizer state, and the activations of one variant share the device. Sizes
are counted, activations are measured by running each variant of each kind of layer once on the largest batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate as accumulate_sums

from outsize.base.errors import PlanInfeasible
from outsize.base.units import show_bytes, show_enough
from outsize.hardware.gpu_budget import GpuBudget
from outsize.transfer.batch_cache import BatchCache, BatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantCost:
    name: str
    state_bytes: int
    """Weights, gradients, masters and moments on the device."""
    weight_bytes: int
    """Weights alone, as the library has them."""
    saved_bytes: int
    """What a state on disk takes."""
    active_bytes: int
    """Peak of a batch on the device: calls, teacher's forward, forward and backward of this variant; and the teacher's
    output of the batch before, on its way to the host.
    """
    seconds: float
    """Of a batch."""
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """A layer, or layers of the same structure with the same variants."""

    layers: tuple[int, ...]
    weight_bytes: int
    teacher_bytes: int
    """Peak of a batch on the device without variants."""
    importance_bytes: int
    """Peak of a batch on the device while importance is measured."""
    teacher_seconds: float
    variants: tuple[VariantCost, ...]
    load_seconds: float = 0.0
    """Of the teacher's layer, from its files to the device: once per pass."""
    make_seconds: float = 0.0
    """Of all variants together, beside batches: they are made, moved and stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunePlan:
    groups: dict[int, tuple[tuple[str, ...], ...]]
    """By layer: the variants that are trained together, group by group."""
    rounds: tuple[range, ...]
    """Batches of each round."""
    in_file: bool
    """Hidden states are kept in a file."""
    budget_bytes: int
    """`gpu_memory`."""
    gpu_bytes: int
    """Predicted peak on the device, without the overhead of the process."""
    gpu_total: int
    """The same with it: what `gpu_memory` would have to be."""
    host_bytes: int
    hidden_bytes: int
    """Of it, or of the disk: hidden states of the largest round."""
    disk_bytes: int
    """Hidden states and states of variants on disk at once, the library, and `kept_bytes`."""
    kept_bytes: int
    """Of the teacher's last hidden states, which are kept on disk for distillation. 0: they are not."""
    importance_seconds: float
    seconds: float
    """Of the training stage. Both 0: unknown."""

    @property
    def num_groups(self) -> int:
        return max(map(len, self.groups.values()), default=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    gpu: GpuBudget
    host_bytes: int
    disk_bytes: int
    """Free where hidden states may be kept; 0: nowhere."""
    output_bytes: int = 0
    """Free where the library is."""


def plan(
    costs: Sequence[LayerCost],
    budget: Budget,
    *,
    fixed_bytes: int,
    fixed_host_bytes: int,
    train: Sequence[BatchSpec],
    validation: Sequence[BatchSpec],
    calibration: Sequence[BatchSpec],
    accumulate: int,
    num_layers: int,
    keeps_best: bool,
    kept: Sequence[BatchSpec] = (),
    num_after: int = 0,
) -> PrunePlan:
    """Raises PlanInfeasible with the memory that is enough.

    Args:
        fixed_bytes: on the device for the whole run: stem, buffers, workspaces.
        fixed_host_bytes: in host memory for the whole run.
        train, validation, calibration: the hidden states of all batches, and of those that importance is measured on.
        num_layers: that the teacher runs.
        kept: the teacher's last hidden states that are kept on disk, in one round and if there is space.
        num_after: layers that run after these for `kept`.
    """
    fixed = fixed_bytes + BatchCache.device_bytes([*train, *validation])
    groups, peak = _grouped(costs, budget.gpu, fixed, max(spec.num_bytes for spec in train), num_layers + bool(kept))
    host = fixed_host_bytes + max((_host_bytes(cost, keeps_best=keeps_best) for cost in costs), default=0)
    rounds, in_file = _rounds(train, validation, calibration, accumulate, budget, host)
    most = [*train[rounds[0].start : rounds[0].stop], *validation]
    cached = BatchCache.host_bytes(most, in_file=in_file)
    variants = [variant for cost in costs for variant in cost.variants for _ in cost.layers]
    states = sum(v.saved_bytes for v in variants) if len(rounds) > 1 else max((_saved(c) for c in costs), default=0)
    hidden = sum(spec.num_bytes for spec in most)
    disk = (hidden if in_file else 0) + states + sum(v.weight_bytes for v in variants)
    kept_bytes = sum(spec.num_bytes for spec in kept) if len(rounds) == 1 else 0
    if disk + kept_bytes > budget.output_bytes:
        kept_bytes = 0
    return PrunePlan(
        groups={layer: parts for cost, parts in zip(costs, groups, strict=True) for layer in cost.layers},
        budget_bytes=budget.gpu.total_bytes,
        rounds=rounds,
        in_file=in_file,
        gpu_bytes=peak,
        gpu_total=budget.gpu.total_for(peak),
        host_bytes=host + cached,
        hidden_bytes=hidden,
        disk_bytes=disk + kept_bytes,
        kept_bytes=kept_bytes,
        importance_seconds=_pass_seconds(costs, len(calibration)) * num_layers,
        seconds=_seconds(
            costs, groups, len(train), accumulate, num_layers + (num_after if kept_bytes else 0), len(rounds)
        ),
    )


def _grouped(
    costs: Sequence[LayerCost], gpu: GpuBudget, fixed: int, hidden: int, num_layers: int
) -> tuple[tuple[tuple[tuple[str, ...], ...], ...], int]:
    """Groups of each kind of layer, filled in the order of the variants, and the highest peak. `hidden`: bytes of a
    batch's hidden states.
    """

    def peak_of(cost: LayerCost, group: Sequence[VariantCost]) -> int:
        # Only the last group of a layer passes hidden states on, and the last of `num_layers` does not.
        passes_on = group[-1] is cost.variants[-1] and any(layer < num_layers - 1 for layer in cost.layers)
        active = max([cost.teacher_bytes, *(v.active_bytes for v in group)]) - (0 if passes_on else hidden)
        states = sum(variant.state_bytes for variant in group)
        return fixed + cost.weight_bytes + max(states + active, cost.importance_bytes)

    needed = max([fixed, *(peak_of(cost, [variant]) for cost in costs for variant in cost.variants)])
    if needed > gpu.usable_bytes:
        total = gpu.total_for(needed)
        raise PlanInfeasible(
            f"gpu_memory {show_bytes(gpu.total_bytes)} is too small: a layer of the teacher, its largest variant and a "
            f"batch need at least {show_enough(total)}. Raise gpu_memory, or reduce micro_batch_size or sequence_len.",
            resource="gpu",
            allowed_bytes=gpu.total_bytes,
            needed_bytes=total,
        )
    every, peak = [], fixed
    for cost in costs:
        groups: list[list[VariantCost]] = []
        for variant in cost.variants:
            if not groups or peak_of(cost, [*groups[-1], variant]) > gpu.usable_bytes:
                groups.append([])
            groups[-1].append(variant)
        peak = max([peak, *(peak_of(cost, group) for group in groups)])
        every.append(tuple(tuple(variant.name for variant in group) for group in groups))
    return tuple(every), peak


def _host_bytes(cost: LayerCost, *, keeps_best: bool) -> int:
    """The layer as it is read, and all variants as they are made from it; later their best weights, and one of them as
    it is replaced.
    """
    weights = [variant.weight_bytes for variant in cost.variants]
    return sum(weights) + max(cost.weight_bytes, max(weights, default=0) if keeps_best else 0)


def _saved(cost: LayerCost) -> int:
    return sum(variant.saved_bytes for variant in cost.variants)


def _rounds(
    train: Sequence[BatchSpec],
    validation: Sequence[BatchSpec],
    calibration: Sequence[BatchSpec],
    accumulate: int,
    budget: Budget,
    host: int,
) -> tuple[tuple[range, ...], bool]:
    """As few rounds as possible, of whole steps: in host memory if all fits there, else in a file if that is larger.

    Importance is measured in one pass, whatever the rounds.
    """
    ends = [0, *accumulate_sums(spec.num_bytes for spec in train)]
    others = sum(spec.num_bytes for spec in validation)
    once = sum(spec.num_bytes for spec in calibration)
    staging = BatchCache.host_bytes([*train, *validation], in_file=True)

    def largest(size: int) -> int:
        """Bytes of the largest round of `size` batches."""
        starts = range(0, len(train), size)
        return max(once, others + max(ends[min(start + size, len(train))] - ends[start] for start in starts))

    steps = len(train) // accumulate
    for in_file, room in ((False, budget.host_bytes - host), (True, budget.disk_bytes)):
        if in_file and host + staging > budget.host_bytes:
            continue
        if largest(len(train)) <= room:
            return (range(len(train)),), in_file
    fits_file = budget.disk_bytes > budget.host_bytes - host and host + staging <= budget.host_bytes
    room = budget.disk_bytes if fits_file else budget.host_bytes - host
    for number in range(2, steps + 1):
        size = -(-steps // number) * accumulate
        if largest(size) <= room:
            return tuple(range(at, min(at + size, len(train))) for at in range(0, len(train), size)), fits_file
    least = host + largest(accumulate)
    raise PlanInfeasible(
        f"host_memory {show_bytes(budget.host_bytes)} is too small: a layer as it is read, the hidden states of one "
        f"step, of the validation rows and of prune.importance_tokens need at least {show_enough(least)}. Raise "
        "host_memory, set prune.cache_dir, or reduce these.",
        resource="host",
        allowed_bytes=budget.host_bytes,
        needed_bytes=least,
    )


def _pass_seconds(costs: Sequence[LayerCost], num_batches: int) -> float:
    """Of one layer of the teacher."""
    if not num_batches or not costs:
        return 0.0
    return max(cost.load_seconds + cost.teacher_seconds * num_batches for cost in costs)


def _seconds(
    costs: Sequence[LayerCost],
    groups: Sequence[Sequence[Sequence[str]]],
    num_batches: int,
    accumulate: int,
    num_layers: int,
    num_rounds: int,
) -> float:
    if any(not cost.teacher_seconds for cost in costs):
        return 0.0
    trained, total = 0, 0.0
    for cost, parts in zip(costs, groups, strict=True):
        passes = max(1, len(parts))
        layer = passes * cost.teacher_seconds
        layer += sum(variant.seconds + variant.step_seconds / accumulate for variant in cost.variants)
        total += len(cost.layers) * (layer * num_batches + num_rounds * (cost.load_seconds + cost.make_seconds))
        trained += len(cost.layers)
    others = max((cost.teacher_seconds for cost in costs), default=0.0) * num_batches
    others += max((cost.load_seconds for cost in costs), default=0.0) * num_rounds
    return total + (num_layers - trained) * others
