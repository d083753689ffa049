"""Plans for one batch after another. Each plan also covers as many of the earlier batches as fit the memory.

Otherwise a loop with different batches would re-plan forever. A batch that is larger than planned in some dimensions
and smaller in others is planned at the maximum of every dimension, if that is not much larger than either. If it is,
both are measured, and the plan is for the maximum of both, block by block (profile/merge.py).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outsize.base.errors import DeviceOutOfMemory, EngineMisuse, OutsizeError, PlanInfeasible
from outsize.base.log import log
from outsize.loss.chunked_loss import ChosenLoss
from outsize.model.batch import (
    Measured,
    ModelCall,
    Signature,
    arguments_of,
    as_call,
    by_name,
    covers,
    fits,
    positional_names,
    signature,
    with_longer_offsets,
)
from outsize.model.tensors import map_tensors
from outsize.profile.calling import Loss
from outsize.profile.merge import merged, projected, with_reserve
from outsize.runtime.plan_runtime import PlannedModel
from outsize.schedule.plan import StepConfig
from outsize.setup.batches import Images, as_dict, joined, lead_shape, num_elements, pad_to_shape
from outsize.setup.micro_batch import Traced

_MOST_GROWTH = 2.0
"""Maximum growth, in elements, of a batch joined from two, over the larger of the two."""


class PlannedBatches:
    def __init__(
        self,
        model: nn.Module,
        measure: Callable[[Any, ChosenLoss | None], Traced],
        solve: Callable[[Traced, StepConfig], PlannedModel],
        *,
        max_shape: tuple[int, int] | None,
        has_loss: bool,
    ):
        """`has_loss`: the loop computes its own loss from a batch that includes the model's arguments."""
        self._model, self._measure, self._solve = model, measure, solve
        self._max_shape, self._has_loss = max_shape, has_loss
        self._held: list[Traced] = []
        """Measurements of the batches that the current plan covers, latest first."""
        self._loss: ChosenLoss | None = None
        self._images = Images()
        self._first: Any = None
        """The first batch, kept for a loss that needs more than the model's arguments."""

    def plan(self, _: nn.Module, batch: Any, step_config: StepConfig) -> PlannedModel:
        """`batch`: the argument of `prepare`, or a call of the model that the current plan does not cover."""
        if isinstance(batch, ModelCall):
            return self._plan_call(batch, step_config)
        batch = as_dict(batch)
        if self._has_loss and self._first is None:
            self._first = map_tensors(lambda t: t.detach().cpu().clone(), batch)
        return self._plan_batch(batch, step_config)

    def _plan_call(self, call: ModelCall, step_config: StepConfig) -> PlannedModel:
        names = positional_names(self._model)
        batch = by_name(call, names)
        if not self._has_loss:
            return self._plan_batch(batch, step_config)
        planned = None
        try:
            planned = self._plan_batch(batch, step_config) if not isinstance(batch, ModelCall) else None
        except OutsizeError:
            raise
        except Exception as error:
            log.debug("loss= cannot be computed from the model's arguments alone: %s", str(error))
        planned = planned or self._plan_filled(batch, step_config)
        given = signature(arguments_of(call, names))
        if not covers((one for found in planned.measured for one in found.signatures), given):
            planned = self._plan_with_loss_calls(call, given, step_config)
        return planned

    def _plan_with_loss_calls(self, call: ModelCall, given: Signature, step_config: StepConfig) -> PlannedModel:
        """Plan for a call that the loss does not make, together with those that it makes."""
        log.warning(
            "the loop calls the model with other arguments than loss= does (%s): planning for both", _text(given)
        )
        planned = self._plan_all(self._measure(call, self._loss), step_config)
        if planned is None:
            raise EngineMisuse(
                f"The loop calls the model with other arguments than loss= does ({_text(given)}), and the model then "
                "runs its blocks in another order: no plan covers both. Prepare the model with a loss= that calls it "
                "as the loop does."
            )
        return planned

    def _plan_filled(self, batch: Any, step_config: StepConfig) -> PlannedModel:
        """Plan for the first batch at the size of a call, for a loss that reads more than the model's arguments."""
        filled = pad_to_shape(self._first, lead_shape(batch))
        if isinstance(filled, dict) and isinstance(batch, dict):
            filled = {name: batch.get(name, value) for name, value in filled.items()}
        try:
            return self._plan_batch(filled, step_config)
        except OutsizeError:
            raise
        except Exception as error:
            raise EngineMisuse(
                f"This batch is larger than planned ({_text(signature(batch))}), and loss= failed in its profiling "
                f"run: {type(error).__name__}: {error}. "
                "Prepare the model with the largest batch, or with max_shape."
            ) from error

    def _plan_batch(self, batch: Any, step_config: StepConfig) -> PlannedModel:
        # The error must not be kept: its frames hold the activations of the failed run.
        if (both := self._images.added_to(batch)) is not None:
            try:
                return self._plan_one(both, step_config)
            except (PlanInfeasible, DeviceOutOfMemory) as error:
                log.warning(
                    "no plan covers this batch and the images of earlier ones: planning for this batch alone: %s",
                    str(error),
                )
        self._images.keep(batch)
        return self._plan_one(batch, step_config)

    def _plan_one(self, batch: Any, step_config: StepConfig) -> PlannedModel:
        longer = next((one for one in self._held if _is_too_short_for_tiles(batch, one)), None)
        larger, growth = self._joined(batch) if longer is None else (None, math.inf)
        is_near = growth <= _MOST_GROWTH
        if is_near and (planned := self._plan_larger(larger, step_config)) is not None:
            return planned
        if longer is None:
            found = self._trace(batch)
            if _is_too_short_for_tiles(batch, found):  # it was padded to max_shape
                longer, self._held = found, [found, *self._held]
        if longer is not None:
            found = self._trace_whole(batch, longer)
        if not self._held:
            return self._now(found, [], self._solve(found, step_config))
        try:
            planned = self._plan_all(found, step_config)
        except PlanInfeasible:
            planned = None
        if planned is None and not is_near:
            planned = self._plan_larger(larger, step_config)
        if planned is not None:
            return planned
        alone = self._solve(found, step_config)
        log.warning(
            "no plan covers this batch and earlier ones: planning for this batch alone; earlier ones re-plan if they "
            "return"
        )
        return self._now(found, [], alone)

    def _joined(self, batch: Any) -> tuple[Any, float]:
        """The batch joined with an earlier one, and its growth over the larger of both; infinite without one."""
        best: tuple[Any, float] = None, math.inf
        measured = [one.measured for one in self._held if one.measured is not None]
        if self._has_loss:
            arguments, others = batch, [one.batch for one in measured]
        else:
            arguments = by_name(as_call(self._model, batch), positional_names(self._model))
            others = [call for one in measured for call in one.signatures]
        if not isinstance(arguments, dict):
            return best
        for earlier in others:
            if (larger := joined(arguments, earlier)) is not None:
                growth = num_elements(larger) / max(num_elements(arguments), num_elements(earlier))
                best = (larger, growth) if growth < best[1] else best
        return best

    def _plan_larger(self, batch: Any, step_config: StepConfig) -> PlannedModel | None:
        """None if it does not fit, or the model cannot be called with it."""
        if batch is None:
            return None
        try:
            return self._plan_all(self._trace(batch), step_config)
        except Exception as error:
            log.debug("a batch joined from two cannot be planned: %s", str(error))
            return None

    def _trace(self, batch: Any) -> Traced:
        found = self._measure(pad_to_shape(batch, self._max_shape), self._loss)
        self._loss = found.loss
        return found

    def _trace_whole(self, batch: Any, longer: Traced) -> Traced:
        """Measure a batch whose rows are too short for tiles: at the longest such rows, which may need more memory than
        longer ones, unless the batch has more rows than the longer one."""
        rows, _ = lead_shape(batch) or (0, 0)
        if rows <= longer.rows:
            batch = pad_to_shape(batch, (longer.rows, 2 * longer.trace.tile_tokens))
        found = self._measure(batch, self._loss)
        self._loss = found.loss
        return found

    def _plan_all(self, found: Traced, step_config: StepConfig) -> PlannedModel | None:
        """Plan for this batch and the earlier ones. None if the model runs its blocks in another order for one."""
        kept = [
            one
            for one in self._held
            if one.measured is not None and not (found.measured is not None and found.measured.covers(one.measured))
        ]
        # Measurements with other trained parameters do not apply.
        kept = [one for one in kept if one.graph.params == found.graph.params]
        widest = max([found, *kept], key=lambda one: len(one.graph.calls))
        trace = widest.trace
        for one in (one for one in [found, *kept] if one is not widest):
            other = (
                one.trace
                if one.trace.graph == trace.graph
                else projected(one.trace, one.graph, widest.trace, widest.graph)
            )
            both = merged(trace, other) if other is not None else None
            if both is None:
                return None
            trace = both
        return self._now(found, kept, self._solve(replace(found, graph=widest.graph, trace=trace), step_config))

    def _now(self, found: Traced, kept: list[Traced], planned: PlannedModel) -> PlannedModel:
        self._held = [found, *kept]
        return replace(planned, measured=tuple(one.measured for one in self._held if one.measured is not None))


def _is_too_short_for_tiles(batch: Any, longer: Traced) -> bool:
    """Whether a batch has rows that are not cut into tiles, as those of the longer one are."""
    lead, tile = lead_shape(batch), longer.trace.tile_tokens
    inputs = longer.measured.batch.values() if longer.measured is not None and tile else ()
    longest = max((one.shape[1] for one in inputs if len(one.shape) > 1), default=0)
    return lead is not None and lead[1] <= 2 * tile < longest


def recording(loss: Loss | None, signatures: list[Signature]) -> Loss | None:
    """Wrap the loss to record the training calls that it makes of the model."""
    if loss is None:
        return None

    def run(model: nn.Module, batch: Any) -> Any:
        names = positional_names(model)

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = arguments_of(ModelCall(args, kwargs), names)
            if torch.is_grad_enabled() and not fits(signatures, arguments):
                signatures.append(signature(arguments))

        handle = model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
        try:
            return loss(model, batch)
        finally:
            handle.remove()

    return run


def reserving(found: Traced) -> Traced:
    """Add memory for offset lists that are longer than the batch's."""
    assert found.measured is not None
    batch, _ = with_longer_offsets(found.measured.batch)
    signatures = [with_longer_offsets(call) for call in found.measured.signatures]
    trace = with_reserve(found.trace, max((num_bytes for _, num_bytes in signatures), default=0))
    return replace(found, trace=trace, measured=Measured(batch, tuple(call for call, _ in signatures)))


def _text(inputs: Any) -> str:
    return ", ".join(f"{name} {' × '.join(map(str, one.shape))}" for name, one in inputs.items() if one.shape)
