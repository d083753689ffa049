"""AdamW with OSFT for a plain training loop, without the engine. Its arithmetic is that of `outsize.reference`."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from outsize import reference
from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.methods.osft.factors import project_u, project_v
from outsize.methods.osft.method import OSFT
from outsize.methods.osft.row_shards import RowShards
from outsize.methods.osft.sharded_split import split_factors_of
from outsize.methods.osft.stored_bases import bases_folder, load_or_split
from outsize.methods.osft.targets import choose_trainable, find_targets
from outsize.methods.osft.weights import DriftWeight, FactoredWeight, SplitWeight, local, local_gradient
from outsize.model.weights import is_unmaterialized
from outsize.optim import adamw
from outsize.optim.rule import Scratch, update


class AdamW(reference.AdamW):
    """Trains a model's weights by OSFT and its other parameters by AdamW.

    Gradients of split weights are contracted when backward has computed them: afterwards `weight.grad` is None. A step
    consumes the result. Use `max_grad_norm` to clip: the norm is that of the gradients of drifts or factors and of the
    other parameters.
    """

    def __init__(self, model: nn.Module, method: OSFT, *, bases: str | Path | None = None, **settings: Any):
        """
        Args:
            bases: folder for the bases of drifts; default: the cache. To resume on another machine, keep it with the
                checkpoints.
            settings: of `outsize.AdamW`: lr, betas, eps, weight_decay, max_grad_norm, nonfinite, fp32_grads, groups. A
                weight that a group names stands for its drift or factors.
        """
        spec = adamw.AdamW(**settings)
        if spec.update != "after_step":
            raise ConfigError("update='in_backward' needs the engine. Leave it out, or use outsize.prepare.")
        self.method, self._folder = method, bases_folder() if bases is None else Path(bases)
        self.targets = find_targets(model, method)
        choose_trainable(model, method, self.targets)
        params = dict(model.named_parameters())
        _require_values(params)
        self._shards = _shards_of({name: p for name, p in params.items() if p.requires_grad}, method)
        if self._shards.group is not None and spec.fp32_grads:
            raise ConfigError("fp32_grads: DTensor gradients are summed by FSDP. Set its reduce_dtype instead.")
        self.split_weights: dict[str, SplitWeight] = {weight.name: weight for weight in self._split(params)}
        self._sharded: dict[Tensor, nn.Parameter] = {}
        """Other DTensor parameters, by the local parameters that the optimizer updates."""
        groups = [
            {**group, "params": [pair for name, p in group["params"] for pair in self._trained(name, p)]}
            for group in spec.param_groups(params.items())
        ]
        settings = {**spec.defaults, "max_grad_norm": spec.max_grad_norm, "nonfinite": spec.nonfinite}
        super().__init__(groups, **settings, fp32_grads=spec.fp32_grads)
        if self._shards.group is None:
            for weight in self.split_weights.values():
                weight.weight.register_post_accumulate_grad_hook(_taker(weight))

    def _split(self, params: Mapping[str, nn.Parameter]) -> Iterator[SplitWeight]:
        chosen = [
            (target.name, target.shape, params[target.name]) for target in self.targets if target.update == "split"
        ]
        if self.method.parametrization == "drift":
            found = load_or_split(chosen, svd=self.method.svd, folder=self._folder, total=len(chosen))
            for (name, _, param), (bases, bases_id) in zip(chosen, found, strict=True):
                yield DriftWeight(name, param, bases, bases_id)
        else:
            splits = split_factors_of([(name, shape, local(param)) for name, shape, param in chosen], self._shards)
            for (name, shape, param), split in zip(chosen, splits, strict=True):
                yield FactoredWeight(name, shape, param, split, self._shards)

    def _trained(self, name: str, param: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
        """What is trained in place of a parameter of the model."""
        if (weight := self.split_weights.get(name)) is not None:
            parts = weight.params
            return [(name if len(parts) == 1 else f"{name}.{part}", own) for part, own in parts.items()]
        if not isinstance(param, DTensor):
            return [(name, param)]
        own = nn.Parameter(local(param))
        self._sharded[own] = param
        return [(name, own)]

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """The split weights in fp32, before they are rounded to the model's dtype; of a DTensor, its local rows."""
        return ((name, weight.master()) for name, weight in self.split_weights.items())

    @torch.no_grad()
    def next_task(self) -> None:
        """Begin a new task with the current weights: split them again and forget all moments.

        To resume within the new task, save the model here: the optimizer's state holds changes of these weights.
        """
        for new in self._split({name: weight.weight for name, weight in self.split_weights.items()}):
            self.split_weights[new.name].restart(new)
        for param in (p for group in self.param_groups for p in group["params"]):
            lo = self.state.pop(param, {}).get("lo")
            if lo is not None:  # it is a part of the weight
                moments = {name: torch.zeros_like(param, dtype=torch.float32) for name in self.state_names}
                self.state[param] = {"step": 0, **moments, "lo": lo}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in (*self._sharded.values(), *(weight.weight for weight in self.split_weights.values())):
            param.grad = None
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """With DTensor weights: of this process alone."""
        return {**super().state_dict(), "osft": {name: w.saved() for name, w in self.split_weights.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also writes the split weights. Construct the optimizer with the weights that the run, or its task, began
        with.
        """
        saved = state_dict.get("osft", {})
        if other := sorted(saved.keys() ^ self.split_weights.keys()):
            raise BadFile(
                f"the saved state splits other weights than this optimizer: {len(other)} differ, such as {other[0]}. "
                "Use the OSFT settings that it was saved with."
            )
        for name, weight in self.split_weights.items():
            weight.require_loadable(saved[name], self._folder)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "osft"})
        for name, weight in self.split_weights.items():
            weight.load(saved[name])
            if any(self.state.get(p) for p in weight.params.values()):
                weight.merge()

    # The parts of `reference.Optimizer.step`.

    def _collect(self) -> dict[Tensor, Tensor | None]:
        if self._shards.group is not None:
            self._require_own()
            for weight in self.split_weights.values():
                weight.take()
            for own, param in self._sharded.items():
                own.grad, param.grad = local_gradient(param), None
        factored = self._factored()
        self._shards.sum_all([weight.s.grad for weight in factored if weight.s.grad is not None])
        if self.method.variant == "peft":
            self._project({p: p.grad for weight in factored for p in weight.params.values()})
        grads = super()._collect()
        # A step consumes these gradients: the model's zero_grad does not see them.
        for own in (*self._sharded, *(p for weight in self.split_weights.values() for p in weight.params.values())):
            own.grad = None
        return grads

    def _require_own(self) -> None:
        """Refuse sharded weights that others wrote. All processes must agree to look: that gathers."""
        weights = list(self.split_weights.values())
        if not weights:
            return
        written = self._shards.anywhere([not weight.is_own for weight in weights], weights[0].weight.device)
        for weight, is_written in zip(weights, written, strict=True):
            if is_written:
                weight.require_own()

    def _measure(self, grads: dict[Tensor, Tensor | None]) -> Tensor:
        if self._shards.group is None:
            return super()._measure(grads)
        found = {p: g.double().square().sum() for p, g in grads.items() if g is not None}
        is_whole = {weight.s for weight in self._factored()}
        device = next((g.device for g in found.values()), torch.device("cpu"))
        sharded, whole = torch.zeros(2, dtype=torch.float64, device=device).unbind()
        for p, square in found.items():
            (whole if p in is_whole else sharded).add_(square)
        self._shards.sum_all([sharded])
        return (sharded + whole).sqrt()

    def _update_all(self, grads: dict[Tensor, Tensor | None], clip: float) -> None:
        if self.method.variant == "mini_trainer":
            self._project(grads)
        super()._update_all(grads, clip)
        if self.method.variant == "mini_trainer":
            self._project({p: p.detach() for weight in self._factored() for p in weight.params.values()})
        for weight in self.split_weights.values():
            if any(grads.get(p) is not None for p in weight.params.values()):
                weight.merge()

    def _project(self, values: Mapping[Tensor, Tensor | None]) -> None:
        """Make gradients or values of U and V orthogonal to the frozen directions, in place."""
        left = [(u, weight.frozen_u) for weight in self._factored() if (u := values[weight.u]) is not None]
        project_u([u for u, _ in left], [frozen for _, frozen in left], self._shards)
        for weight in self._factored():
            if (v := values[weight.v]) is not None:
                project_v(v, weight.frozen_v, weight.shape.frozen_rank, self._shards)

    def _update(self, p: Tensor, grad: Tensor, clip: float, group: dict[str, Any]) -> None:
        """By the engine's kernels, which compute the same bits."""
        if not all(t.is_contiguous() for t in (p, grad, *self.state[p].values()) if isinstance(t, Tensor)):
            return super()._update(p, grad, clip, group)
        state = self._next_state(p)
        weight, gradient, *moments = (t.detach().view(-1) for t in (p, grad, *(state[n] for n in self.state_names)))
        lo = state["lo"].view(-1) if "lo" in state else None
        numbers = adamw.RULE.numbers(group, state["step"])
        scratch_bytes = adamw.RULE.layout.scratch_bytes(max(len(weight), 1))
        scratch = Scratch(torch.empty(scratch_bytes, dtype=torch.uint8, device=p.device))
        update(adamw.RULE, weight, lo, moments, gradient, numbers=numbers, clip=clip, scratch=scratch)

    def _factored(self) -> list[FactoredWeight]:
        return [weight for weight in self.split_weights.values() if isinstance(weight, FactoredWeight)]


def _require_values(params: Mapping[str, Tensor]) -> None:
    for name, param in params.items():
        if param.is_meta or is_unmaterialized(param):
            raise ModelUnsupported(
                f"OSFT: {name} has no values yet (it is on meta, or still in a file). Load the weights first, as "
                "from_pretrained does, or use outsize.prepare."
            )


def _taker(weight: SplitWeight) -> Callable[[Tensor], None]:
    """Weak: a discarded optimizer must not take the gradient from the next one."""
    taken = weakref.WeakMethod(weight.take)

    def take(_: Tensor) -> None:
        if (alive := taken()) is not None:
            alive()

    return take


def _shards_of(params: Mapping[str, Tensor], method: OSFT) -> RowShards:
    """How trained DTensor parameters are sharded. Refuses all but rows over one mesh, with or without replicas."""
    sharded = {name: p for name, p in params.items() if isinstance(p, DTensor)}
    if not sharded:
        return RowShards()
    first, param = next(iter(sharded.items()))
    if method.parametrization == "drift":
        raise ModelUnsupported(
            f"OSFT: {first} is a DTensor, and parametrization='drift' splits whole weights alone. Use "
            "parametrization='factors', or do not shard the model."
        )
    mesh, placements = param.device_mesh, param.placements
    for name, p in sharded.items():
        if tuple(p.placements) not in ((Shard(0),), (Replicate(), Shard(0))) or p.device_mesh != mesh:
            raise ModelUnsupported(
                f"OSFT: {name} is placed as {tuple(p.placements)} on {p.device_mesh}; only rows that are sharded over "
                "one mesh, with or without replicas, can be split. Shard all parameters alike, as fully_shard does."
            )
    if plain := sorted(params.keys() - sharded.keys()):
        raise ModelUnsupported(
            f"OSFT: {plain[0]} is not sharded, but {first} is. Shard all trained parameters alike, as fully_shard does "
            "without ignored_params, or freeze it."
        )
    replicas = mesh.get_group(0) if len(placements) == 2 else None
    return RowShards(mesh.get_group(len(placements) - 1), replicas)
