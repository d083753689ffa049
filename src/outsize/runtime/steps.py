"""Steps: when a step updates the weights, and with which hyperparameters.

*After step* (the default): gradients are kept until `step()`, which fixes the hyperparameters and the clipping factor,
issues the updates and returns. *In backward*: inside `last_backward()` chunks are updated once their gradients are
complete or soon after (schedule.py defines when), and `step()` only counts them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from outsize.base.errors import EngineMisuse, NonFiniteGradient, UpdateFailed
from outsize.base.log import log
from outsize.optim.clip import clip_factor
from outsize.optim.spec import OptimizerSpec
from outsize.runtime.plan_runtime import RuntimeOwner
from outsize.runtime.updates import StepSettings


class Steps:
    def __init__(self, spec: OptimizerSpec, engine: RuntimeOwner):
        self._spec, self._engine, self._state = spec, engine, engine.state
        self._updates_in_backward = False
        """Inside `last_backward()`, under settings that allow updates in backward."""
        self._updated: dict[int, StepSettings] = {}
        """The updates that a backward has made, by chunk, until `step()` counts them."""
        self._step: StepSettings | None = None
        self._clip_at: float | None = None
        """The argument of `clip_grad_norm_`. The gradients are clipped when they are read, or by the step."""

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # Clipping and skipping need all gradients before the first update: then `step()` updates, to the same bits.
        self._updates_in_backward = (
            self._spec.max_grad_norm is None and self._clip_at is None and self._spec.nonfinite == "raise"
        )
        try:
            yield
        finally:
            self._updates_in_backward = False

    def begin_backward(self) -> bool:
        """A backward begins. Returns whether it updates weights."""
        self.apply_clipping()
        if self._updates_in_backward:
            self._state.require("last_backward")
        elif not self._engine.runtime.plan.step_config.hold_gradients:
            raise EngineMisuse(
                "A backward ran outside of last_backward(), but this plan keeps no gradients, so it must update "
                "weights in every backward. Wrap the backward in `with engine.last_backward():`, or prepare with "
                "accumulate=2 or update='after_step'."
            )
        return self._updates_in_backward

    def update_work(self, chunk: int, in_backward: bool) -> Callable[[], None]:
        """The work of updating one chunk, with its hyperparameters fixed now: it may run later, on another thread."""
        runtime = self._engine.runtime
        if in_backward:
            accumulated = {piece.name for piece in runtime.place.chunk(chunk).pieces} & runtime.gradients.accumulated
            self._state.update_in_backward()
            self._updated[chunk] = runtime.updates.fix_settings(accumulated, 1.0)
        step = self._updated[chunk] if in_backward else self._step
        assert step is not None
        state, updates, pieces = self._state, runtime.updates, runtime.place.chunk(chunk).pieces

        def work() -> None:
            try:
                updates.update_chunk(chunk, step)
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}".rstrip().removesuffix(".")
                failure = (
                    f"The update of chunk {chunk} ({pieces[0].name} and {len(pieces) - 1} more) failed with {reason}. "
                    "Load weights and optimizer state from the last checkpoint."
                )
                state.fail(failure)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C too leaves a chunk half updated
                raise UpdateFailed(failure) from None

        return work

    def step(self) -> None:
        """Update with the accumulated gradients, or count the updates that a backward has made. Returns once the
        updates are issued.
        """
        runtime, state = self._engine.runtime, self._state
        gradients = runtime.gradients
        if not self._updated:
            gradients.make_zeros()
            if not gradients.accumulated:
                raise EngineMisuse(
                    "step: no gradient has arrived since the last zero_grad(), so there is nothing to apply. Call "
                    "loss.backward() before step()."
                )
        clip_at = self._take_clipping()
        total = gradients.norm()
        if self._updated:
            runtime.updates.count(*self._updated.values())
            self._updated = {}
            not_finite = gradients.not_finite()
            state.confirm_updates(lambda: self._nonfinite_error(not_finite))
            gradients.discard()
            gradients.is_consumed = True
            return
        norm = float(total)
        if not math.isfinite(norm):
            error = gradients.error(gradients.not_finite()() or sorted(gradients.accumulated))
            gradients.discard()
            if self._spec.nonfinite == "raise":
                raise error
            state.skip_step()
            log.warning("step %d skipped: %s", state.num_steps, str(error))
            return
        self._step = runtime.updates.fix_settings(gradients.accumulated, clip_factor(norm, clip_at))
        runtime.updates.count(self._step)
        runtime.executor.update()
        gradients.is_applied = True
        state.make_step()

    def _nonfinite_error(self, not_finite: Callable[[], list[str]]) -> NonFiniteGradient | None:
        if not (names := not_finite()):
            return None
        return self._engine.runtime.gradients.error(
            names, "The last step was made with it: load weights and optimizer state from the last checkpoint"
        )

    def clip(self, max_norm: float) -> Tensor:
        """Clip the coming step. Returns the norm of the accumulated gradients."""
        if self._updated and not math.isinf(max_norm):
            raise EngineMisuse(
                "Gradients cannot be clipped after a backward inside last_backward(): it has already updated weights. "
                "Give the optimizer in prepare a max_grad_norm, or leave last_backward() out."
            )
        self.apply_clipping()
        self._clip_at = None if math.isinf(max_norm) else max_norm
        return self._engine.runtime.gradients.norm().clone()

    def _take_clipping(self) -> float | None:
        """The norm at which the step clips: the smaller of `clip_grad_norm_`'s and the optimizer's own."""
        given, own = self._clip_at, self._spec.max_grad_norm
        if given is not None and own is not None and given > own:
            self.apply_clipping()
            return own
        self._clip_at = None
        return own if given is None else given

    def apply_clipping(self) -> None:
        """Clip the gradients in place, if `clip_grad_norm_` was called and they are not clipped yet."""
        max_norm, self._clip_at = self._clip_at, None
        gradients = self._engine.runtime.gradients
        if max_norm is None or not gradients.accumulated:
            return
        norm = float(gradients.norm())
        factor = clip_factor(norm, max_norm) if math.isfinite(norm) else (0.0 if math.isinf(norm) else math.nan)
        if factor != 1.0:
            self._engine.drain()
            gradients.scale(factor)

    def forget_clipping(self) -> None:
        self._clip_at = None

    def before_grad_access(self) -> None:
        """Before `p.grad` is read or written: refuse it if updates have used up the gradients, and clip them."""
        if self._updated or self._engine.runtime.gradients.is_consumed:
            raise EngineMisuse(
                "p.grad: the backward inside last_backward() has used the gradients to update weights and kept none. "
                "Leave last_backward() out (prepare with update='after_step') to read or change gradients."
            )
        self.apply_clipping()

    def roll_back(self) -> None:
        """Forget the updates of a backward that failed."""
        self._updated = {}

    def restore(self) -> None:
        """Weights and optimizer state were loaded: forget everything that belongs to the earlier ones."""
        self._updated, self._step, self._clip_at = {}, None, None
        self._state.restore()
