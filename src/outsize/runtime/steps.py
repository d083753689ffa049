"""Steps: when and with what a step updates the weights.

*After step* (the default): gradients wait for `step()`, which fixes the hyperparameters and the clipping factor, issues
the updates and returns. *In backward*: inside `last_backward()` chunks are updated as their gradients land or soon
after (schedule.py says which when), and `step()` only confirms it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from outsize.base.errors import EngineMisuse, NonFiniteGradient, UpdateFailed
from outsize.base.log import log
from outsize.optim.clip import clip_factor
from outsize.optim.spec import OptimizerSpec
from outsize.runtime.plan_runtime import RuntimeHolder
from outsize.runtime.updates import Step


class Steps:
    def __init__(self, spec: OptimizerSpec, holder: RuntimeHolder, drain: Callable[[], None]):
        self._spec, self._holder, self._drain = spec, holder, drain
        self._declared = False
        self._made: dict[int, Step] = {}
        """Chunks that a declared backward has updated, until `step()` confirms it."""
        self._step: Step | None = None
        self._clip_at: float | None = None
        """What `clip_grad_norm_` was called with. The gradients are clipped when somebody looks at them, or by the
        step.
        """
        self._broke_in: str | None = None
        """The block in which a declared backward broke off after it had updated some weights."""
        self._failed: str | None = None
        """What went wrong in an update: some weights are new, some old."""
        self._not_finite: Callable[[], list[str]] = list
        """Of the last step that was made in its backward: looked at when the next one is, so that nothing waits
        for it.
        """
        self.num_made = 0
        self.num_skipped = 0

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # Clipping and skipping need all gradients before the first update: then `step()` does the work, to the same
        # bits.
        self._declared = self._spec.max_grad_norm is None and self._clip_at is None and self._spec.nonfinite == "raise"
        try:
            yield
        finally:
            self._declared = False

    def begin_backward(self) -> bool:
        """Whether the backward that begins updates as it goes."""
        self.apply_clipping()
        if not self._declared and not self._holder.runtime.plan.step_config.hold_gradients:
            raise EngineMisuse(
                "A backward ran outside of last_backward(), but this plan keeps no gradients, so it must update "
                "weights in every backward. Wrap the backward in `with engine.last_backward():`, or prepare with "
                "accumulate=2 or update='after_step'."
            )
        return self._declared

    def update_work(self, chunk: int, in_backward: bool) -> Callable[[], None]:
        """The update of one chunk, with everything it needs fixed now: it may run later, on another thread."""
        runtime = self._holder.runtime
        if in_backward:
            accumulated = {piece.name for piece in runtime.place.chunk(chunk).pieces} & runtime.gradients.accumulated
            self._made[chunk] = runtime.updates.plan_step(accumulated, 1.0)
        step = self._made[chunk] if in_backward else self._step
        assert step is not None
        updates, pieces = runtime.updates, runtime.place.chunk(chunk).pieces

        def work() -> None:
            try:
                updates.update_chunk(chunk, step)
            except BaseException as error:
                reason = f"{type(error).__name__}: {error}".rstrip().removesuffix(".")
                self._failed = (
                    f"The update of chunk {chunk} ({pieces[0].name} and {len(pieces) - 1} more) failed with {reason}. "
                    "Load weights and optimizer state from the last checkpoint."
                )
                if not isinstance(error, Exception):
                    raise  # Ctrl-C stays what it is; it leaves half a chunk new all the same
                raise UpdateFailed(self._failed) from None

        return work

    def step(self) -> bool:
        """Update with what has accumulated; False if the step was skipped. Returns once the updates are issued."""
        runtime = self._holder.runtime
        if not self._made:
            runtime.gradients.make_zeros()
        if not self._made and not runtime.gradients.accumulated:
            raise EngineMisuse(
                "step: no gradient has arrived since the last zero_grad(), so there is nothing to apply. Call "
                "loss.backward() before step()."
            )
        clip_at = self._take_clipping()
        total = runtime.gradients.norm()
        if self._made:
            for made in self._made.values():
                runtime.updates.count(made)
            self._made = {}
            self._not_finite = runtime.gradients.not_finite()
            runtime.gradients.discard()
            runtime.gradients.is_consumed = True
        else:
            norm = float(total)
            if norm - norm != 0.0:  # infinite or NaN
                error = runtime.gradients.error(
                    runtime.gradients.not_finite()() or sorted(runtime.gradients.accumulated)
                )
                runtime.gradients.discard()
                if self._spec.nonfinite == "raise":
                    raise error
                self.num_skipped += 1
                log.warning("step %d skipped: %s", self.num_made, str(error))
                return False
            self._step = runtime.updates.plan_step(runtime.gradients.accumulated, clip_factor(norm, clip_at))
            runtime.updates.count(self._step)
            runtime.executor.update()
            runtime.gradients.is_applied = True
        self.num_made += 1
        return True

    def clip(self, max_norm: float) -> Tensor:
        """Clip the coming step; returns the norm of what has accumulated."""
        if self._made and not math.isinf(max_norm):
            raise EngineMisuse(
                "Gradients cannot be clipped after a backward inside last_backward(): it has already updated weights. "
                "Give the optimizer in prepare a max_grad_norm, or leave last_backward() out."
            )
        self.apply_clipping()
        self._clip_at = None if math.isinf(max_norm) else max_norm
        return self._holder.runtime.gradients.norm().clone()

    def _take_clipping(self) -> float | None:
        """The norm at which the step clips. Of clipping that was asked for and the optimizer's own, the smaller is the
        result of both.
        """
        asked, own = self._clip_at, self._spec.max_grad_norm
        if asked is not None and own is not None and asked > own:
            self.apply_clipping()
            return own
        self._clip_at = None
        return own if asked is None else asked

    def apply_clipping(self) -> None:
        """Clip the gradients in place, if that was asked for and not done."""
        max_norm, self._clip_at = self._clip_at, None
        gradients = self._holder.runtime.gradients
        if max_norm is None or not gradients.accumulated:
            return
        norm = float(gradients.norm())
        factor = clip_factor(norm, max_norm) if math.isfinite(norm) else (0.0 if math.isinf(norm) else math.nan)
        if factor != 1.0:
            self._drain()
            gradients.scale(factor)

    def forget_clipping(self) -> None:
        self._clip_at = None

    def before_grad_access(self) -> None:
        """`p.grad` is about to be read or written: gradients must still be there, and clipped if clipping was asked
        for.
        """
        gradients = self._holder.runtime.gradients
        if self._made or gradients.is_consumed:
            raise EngineMisuse(
                "p.grad: the backward inside last_backward() has used the gradients to update weights and kept none. "
                "Leave last_backward() out (prepare with update='after_step') to read or change gradients."
            )
        self.apply_clipping()

    @property
    def is_half_updated(self) -> bool:
        return self._broke_in is not None

    def backward_broke(self, where: str) -> None:
        """Weights that a declared backward updated before it broke off cannot be taken back."""
        if self._made:
            self._broke_in = where
        self._made = {}

    def abandon(self) -> None:
        """The engine ends with a backward's updates unconfirmed: the weights are as they are."""
        self._made, self._not_finite = {}, list

    def require_usable(self) -> None:
        if self._failed is not None:
            raise UpdateFailed(self._failed)

    def state_was_loaded(self) -> None:
        """Weights and optimizer are whole again."""
        self._failed, self._broke_in, self._not_finite, self._clip_at = None, None, list, None
        # What a declared backward has made since is of the state that was there before.
        self._made, self._step = {}, None

    def require_confirmed(self, found: str) -> None:
        if self._made:
            raise EngineMisuse(
                f"step() is missing after a backward inside last_backward(): {found} first. "
                "Call engine.optimizer.step() before it: the weights are already updated."
            )

    def warn_if_spoilt(self) -> None:
        """For those who only read: they may want to look at what a non-finite gradient has done."""
        if error := self._look_back():
            log.warning("%s", error)

    def _look_back(self) -> NonFiniteGradient | None:
        """Whether the last step, made in its backward, was made with gradients that are not finite. Told once; nothing
        can be trained or saved after it.
        """
        if self._failed is not None or not (names := self._not_finite()):
            return None
        error = self._holder.runtime.gradients.error(
            names, "The last step was made with it: load weights and optimizer state from the last checkpoint"
        )
        self._failed = str(error)
        return error

    def require_whole(self, verb: str) -> None:
        """No half-made gradients, no half-made update, none with numbers that are none."""
        if error := self._look_back():
            raise error
        broken = self._holder.runtime.gradients.broken
        if self._broke_in is not None:
            raise EngineMisuse(
                f"{verb}() needs a complete backward, and the last one failed in {self._broke_in} after it had updated "
                "some weights. Load weights and optimizer state from the last checkpoint."
            )
        if broken is not None:
            raise EngineMisuse(
                f"{verb}() needs a complete backward, and the last one failed in {broken}. Call zero_grad(); weights "
                "and optimizer are as they were before it."
            )
