"""EngineState: the states of an engine, the table of calls that are legal in them, and the transitions between them.

[Note: Two parts of a state] Passes and updates overlap: an update on the host may fail while the next forward runs, and
gradients stay incomplete over further forwards. So an engine is in one state of its pass (DETACHED to BACKWARD) and in
at most one state of its weights and gradients (UPDATED_UNCONFIRMED to FAILED). A call must be legal in both.

    forward                 IDLE -> FORWARD -> HELD
    backward                HELD -> BACKWARD -> IDLE
    update in backward      none -> UPDATED_UNCONFIRMED, then step() -> none
    failed backward         BACKWARD -> IDLE, with GRADIENTS_INCOMPLETE or (from UPDATED_UNCONFIRMED) HALF_UPDATED
    re-plan                 IDLE -> DETACHED -> IDLE, under another plan
    retry                   FORWARD, HELD or BACKWARD -> IDLE (roll_back), then a re-plan and the same forward again
    skipped step            IDLE -> IDLE, gradients discarded

`close()` and `end()` roll back an open pass and end the engine in any state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from outsize.base.errors import SEVERAL_FORWARDS, EngineMisuse, NonFiniteGradient, OutsizeError, UpdateFailed
from outsize.base.log import log


class EngineState(Enum):
    # Of the pass.
    DETACHED = "detached"
    """No model: before prepare is complete, during a re-plan, and after detach. No device memory is held."""
    IDLE = "idle"
    """Between passes. Parameters read their homes. Slots keep the chunks that the last pass left in them; updates may
    still run on the host."""
    FORWARD = "in forward"
    """A training forward runs. Activations accumulate; slots hold the chunks of the open calls."""
    HELD = "between forward and backward"
    """The activations of one training forward are kept for its backward: the peak of device memory. A write to a weight
    would change the backward and is refused."""
    BACKWARD = "in backward"
    """The backward frees activations call by call. After an exception it stays in this state until the next call rolls
    it back."""
    # Of weights and gradients.
    UPDATED_UNCONFIRMED = "updated in backward"
    """A backward inside last_backward() has updated weights and used up its gradients; step() has yet to count it."""
    GRADIENTS_INCOMPLETE = "with incomplete gradients"
    """A backward failed: the gradients are partial sums. They keep their memory until zero_grad(). Weights are
    whole."""
    HALF_UPDATED = "half updated"
    """A backward inside last_backward() failed after it had updated some weights. Only a checkpoint restores them."""
    FAILED = "with a failed update"
    """An update failed, or used a gradient that is not finite. Only a checkpoint restores weights and optimizer."""


S = EngineState
PASSES = frozenset({S.IDLE, S.FORWARD, S.HELD, S.BACKWARD})
UNFINISHED = frozenset({S.HELD, S.BACKWARD})
UNUSABLE = frozenset({S.GRADIENTS_INCOMPLETE, S.HALF_UPDATED, S.FAILED})


@dataclass(frozen=True, slots=True)
class CallRule:
    legal: frozenset[EngineState]
    rolls_back: frozenset[EngineState] = UNFINISHED
    """Passes that the call rolls back before it is checked. HELD: only if the outputs of the forward were dropped."""
    nonfinite: Literal["raise", "warn", "ignore"] = "ignore"
    """What the call does if the last step, made in backward, used a gradient that is not finite. Only such calls read
    this from the device, so that no step waits for it."""


RULES = {
    "forward": CallRule(frozenset({S.IDLE, S.GRADIENTS_INCOMPLETE}), UNFINISHED | {S.FORWARD}),
    "evaluate": CallRule(PASSES | UNUSABLE | {S.UPDATED_UNCONFIRMED}, frozenset({S.FORWARD, S.BACKWARD})),
    "last_backward": CallRule(PASSES, frozenset()),
    "step": CallRule(frozenset({S.IDLE, S.UPDATED_UNCONFIRMED}), nonfinite="raise"),
    "clip_grad_norm_": CallRule(frozenset({S.IDLE, S.HELD, S.UPDATED_UNCONFIRMED}), nonfinite="raise"),
    "zero_grad": CallRule(PASSES | UNUSABLE, frozenset({S.BACKWARD})),
    "gathered": CallRule(UNUSABLE | {S.IDLE, S.UPDATED_UNCONFIRMED}),
    "state_dict": CallRule(PASSES | UNUSABLE | {S.UPDATED_UNCONFIRMED}, frozenset(), nonfinite="warn"),
    "save": CallRule(frozenset({S.IDLE}), nonfinite="raise"),
    "export": CallRule(frozenset({S.IDLE}), nonfinite="raise"),
    "next_task": CallRule(frozenset({S.IDLE}), nonfinite="raise"),
    "load": CallRule(UNUSABLE | {S.IDLE, S.UPDATED_UNCONFIRMED}),
    "replan": CallRule(frozenset({S.IDLE, S.GRADIENTS_INCOMPLETE})),
    "retrying": CallRule(frozenset({S.IDLE, S.GRADIENTS_INCOMPLETE})),
    "detach": CallRule(UNUSABLE | {S.IDLE}, nonfinite="warn"),
}
"""The states in which each public call is legal. `evaluate`: a forward without grad. `last_backward` is checked when
the backward inside it begins."""

REFUSALS = {
    S.DETACHED: "The engine no longer holds its model: {end}. Call outsize.prepare again.",
    S.HELD: "{name} begins before the backward of forward {held}, whose outputs are still held: the "
    f"plan keeps the activations of one. {SEVERAL_FORWARDS} Run forwards that need no backward under torch.no_grad(), "
    "and drop outputs that are not used (`del out`).",
    S.UPDATED_UNCONFIRMED: "{name}: step() is missing after a backward inside last_backward(), which has already "
    "updated the weights. Call engine.optimizer.step() first.",
    S.GRADIENTS_INCOMPLETE: "{name} needs a complete backward, and the last one failed in {block}. Call zero_grad(); "
    "weights and optimizer are as they were before it.",
    S.HALF_UPDATED: "{name} needs a complete backward, and the last one failed in {block} after it had updated some "
    "weights. Load weights and optimizer state from the last checkpoint.",
}
"""By state: the message of a refused call. FAILED has the message of the failure; HELD is for a training forward."""
BETWEEN_STEPS = (
    "{name} is only possible between steps, and the engine is {state}. Finish the backward first, or drop its outputs."
)


class StateMachine:
    """The state of one engine. It outlives re-plans."""

    def __init__(self) -> None:
        self.pass_state = S.DETACHED
        self.forward_id = 0
        """The training forward that the next backward belongs to."""
        self.num_steps = 0
        self.num_skipped = 0
        self._fault: EngineState | None = None
        self._failed_in = ""
        """The block call in which the last backward failed."""
        self._failure: str | None = None
        """Why an update failed. A field of its own: updates fail on other threads."""
        self._nonfinite_error: Callable[[], NonFiniteGradient | None] = lambda: None
        """Reads from the device whether the last step in backward used a gradient that is not finite."""
        self._end_reason = "it was detached"

    @property
    def fault(self) -> EngineState | None:
        """The state of weights and gradients. None: weights are whole, gradients complete or absent."""
        return S.FAILED if self._failure is not None else self._fault

    # Which call is legal.

    def require(self, call: str, name: str = "") -> None:
        """Raise if a call is illegal now. `name`: its name in the error."""
        rule, name = RULES[call], name or f"{call}()"
        is_attached = self.pass_state is not S.DETACHED
        if is_attached and rule.nonfinite == "raise" and (error := self._check_last_step()) is not None:
            raise error
        for state in (self.fault, self.pass_state) if is_attached else (self.pass_state,):
            if state is not None and state not in rule.legal:
                raise self.error(state, call, name)
        if rule.nonfinite == "warn" and (error := self._check_last_step()) is not None:
            log.warning("%s", error)

    def error(self, state: EngineState, call: str = "", name: str = "") -> OutsizeError:
        """The error of a call in a state in which it is illegal."""
        if state is S.FAILED:
            return UpdateFailed(self._failure)
        text = BETWEEN_STEPS if state is S.HELD and call != "forward" else REFUSALS.get(state, BETWEEN_STEPS)
        found = {"state": state.value, "end": self._end_reason, "held": self.forward_id, "block": self._failed_in}
        return EngineMisuse(text.format(name=name, **found))

    def _check_last_step(self) -> NonFiniteGradient | None:
        """The error of the last step if it used a gradient that is not finite. Returned once; the state is FAILED
        then.
        """
        if self._failure is not None or (error := self._nonfinite_error()) is None:
            return None
        self._failure = str(error)
        return error

    # Transitions.

    def _require_pass(self, *states: EngineState) -> None:
        if self.pass_state not in states:
            raise AssertionError(f"this transition starts in {[s.name for s in states]}, not in {self.pass_state.name}")

    def _move(self, source: EngineState, to: EngineState) -> None:
        self._require_pass(source)
        self.pass_state = to

    def attach(self) -> None:
        self._move(S.DETACHED, S.IDLE)

    def detach(self, reason: str = "it was detached") -> None:
        """The end of the engine, or the first half of a re-plan, which keeps the state of weights and gradients."""
        self._move(S.IDLE, S.DETACHED)
        self._end_reason = reason

    def begin_forward(self, forward_id: int) -> None:
        self._move(S.IDLE, S.FORWARD)
        self.forward_id = forward_id

    def end_forward(self) -> None:
        self._move(S.FORWARD, S.HELD)

    def begin_backward(self) -> None:
        self._move(S.HELD, S.BACKWARD)

    def end_backward(self) -> None:
        self._move(S.BACKWARD, S.IDLE)

    def update_in_backward(self) -> None:
        self._require_pass(S.BACKWARD)
        if self._fault not in (None, S.UPDATED_UNCONFIRMED):
            raise AssertionError(f"weights are updated in backward {self._fault.value}")
        self._fault = S.UPDATED_UNCONFIRMED

    def roll_back(self, failed_in: str) -> None:
        """End a pass that failed or was abandoned. `failed_in`: the call whose backward was open."""
        self._require_pass(S.FORWARD, S.HELD, S.BACKWARD)
        if self.pass_state is S.BACKWARD:
            self._failed_in = failed_in
            is_half_updated = self._fault in (S.UPDATED_UNCONFIRMED, S.HALF_UPDATED)
            self._fault = S.HALF_UPDATED if is_half_updated else S.GRADIENTS_INCOMPLETE
        self.pass_state = S.IDLE

    def discard_gradients(self) -> None:
        if self._fault is S.GRADIENTS_INCOMPLETE:
            self._fault = None

    def confirm_updates(self, nonfinite_error: Callable[[], NonFiniteGradient | None]) -> None:
        """step() after a backward that has updated the weights."""
        self._require_pass(S.IDLE)
        if self._fault is not S.UPDATED_UNCONFIRMED:
            raise AssertionError(f"no updates to confirm: {self._fault}")
        self._fault, self._nonfinite_error = None, nonfinite_error
        self.num_steps += 1

    def make_step(self) -> None:
        """step() has issued its updates."""
        self._require_pass(S.IDLE)
        self.num_steps += 1

    def skip_step(self) -> None:
        """step() has discarded gradients that are not finite."""
        self._require_pass(S.IDLE)
        self.num_skipped += 1

    def fail(self, reason: str) -> None:
        """An update failed, perhaps on another thread."""
        self._failure = reason

    def restore(self) -> None:
        """Weights and optimizer state were loaded, or the engine ends with those it has."""
        self._fault, self._failure, self._nonfinite_error = None, None, lambda: None
