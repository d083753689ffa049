"""The table of legal calls: every (call, state) pair is legal or raises with the state and the remedy."""

import itertools
from collections.abc import Callable

import cells
import pytest
import torch
import zoo
from cells import Cell

from outsize.base.errors import EngineMisuse, NonFiniteGradient, UpdateFailed
from outsize.runtime.engine import Engine
from outsize.runtime.state import RULES, EngineState, StateMachine

S = EngineState
FAULTS = (S.UPDATED_UNCONFIRMED, S.GRADIENTS_INCOMPLETE, S.HALF_UPDATED, S.FAILED)
SAYS = {
    S.DETACHED: ("no longer holds its model: it was detached", "outsize.prepare again"),
    S.FORWARD: ("in forward", "Finish the backward first"),
    S.HELD: ("between forward and backward", "drop its outputs"),
    S.BACKWARD: ("in backward", "Finish the backward first"),
    S.UPDATED_UNCONFIRMED: ("already updated the weights", "optimizer.step() first"),
    S.GRADIENTS_INCOMPLETE: ("last one failed in layers.1. Call", "zero_grad()"),
    S.HALF_UPDATED: ("after it had updated some weights", "last checkpoint"),
    S.FAILED: ("disk on fire", "last checkpoint"),
}
PATHS: dict[EngineState, Callable[[StateMachine], None]] = {
    S.DETACHED: lambda state: None,
    S.IDLE: lambda state: state.attach(),
    S.FORWARD: lambda state: (state.attach(), state.begin_forward(1)),
    S.HELD: lambda state: (state.attach(), state.begin_forward(1), state.end_forward()),
    S.BACKWARD: lambda state: (state.attach(), state.begin_forward(1), state.end_forward(), state.begin_backward()),
    S.UPDATED_UNCONFIRMED: lambda state: (PATHS[S.BACKWARD](state), state.update_in_backward(), state.end_backward()),
    S.GRADIENTS_INCOMPLETE: lambda state: (PATHS[S.BACKWARD](state), state.roll_back("layers.1")),
    S.HALF_UPDATED: lambda state: (PATHS[S.BACKWARD](state), state.update_in_backward(), state.roll_back("layers.1")),
    S.FAILED: lambda state: (state.attach(), state.fail("disk on fire. Load the last checkpoint.")),
}


def in_state(wanted: EngineState) -> StateMachine:
    state = StateMachine()
    PATHS[wanted](state)
    assert wanted in (state.pass_state, state.fault)
    return state


@pytest.mark.parametrize("call", RULES)
def test_every_call_is_legal_or_says_the_state_and_the_remedy(call: str) -> None:
    for found in S:
        state = in_state(found)
        if found in RULES[call].legal:
            state.require(call)
            continue
        with pytest.raises(UpdateFailed if found is S.FAILED else EngineMisuse) as error:
            state.require(call)
        says = ("keeps the activations of one", "del out") if (call, found) == ("forward", S.HELD) else SAYS[found]
        assert all(part in str(error.value) for part in says), error.value


def test_weights_that_only_a_checkpoint_restores_are_neither_trained_nor_saved() -> None:
    for found in (S.HALF_UPDATED, S.FAILED):
        legal = {call for call, rule in RULES.items() if found in rule.legal}
        assert legal == {"evaluate", "zero_grad", "gathered", "state_dict", "load", "detach"}
        state = in_state(found)
        state.restore()
        assert state.fault is None and state.pass_state is S.IDLE


def test_a_fault_and_an_open_pass_are_both_checked() -> None:
    state = in_state(S.GRADIENTS_INCOMPLETE)
    state.begin_forward(2)
    state.require("zero_grad")
    with pytest.raises(EngineMisuse, match="failed in layers"):
        state.require("last_backward")
    with pytest.raises(EngineMisuse, match="in forward"):
        state.require("replan")
    state.discard_gradients()
    state.require("last_backward")
    state.fail("Load the last checkpoint.")  # on another thread, during the forward
    with pytest.raises(UpdateFailed):
        state.require("step")


def test_transitions_start_in_their_own_states() -> None:
    transitions = {
        "attach": ((), {S.DETACHED}),
        "detach": ((), {S.IDLE}),
        "begin_forward": ((1,), {S.IDLE}),
        "end_forward": ((), {S.FORWARD}),
        "begin_backward": ((), {S.HELD}),
        "update_in_backward": ((), {S.BACKWARD}),
        "end_backward": ((), {S.BACKWARD}),
        "roll_back": (("layers.1",), {S.FORWARD, S.HELD, S.BACKWARD}),
        "confirm_updates": ((lambda: None,), {S.UPDATED_UNCONFIRMED}),
        "make_step": ((), {S.IDLE}),
        "skip_step": ((), {S.IDLE}),
    }
    for (name, (args, sources)), found in itertools.product(transitions.items(), S):
        state = in_state(found)
        if found in sources or (found in FAULTS and S.IDLE in sources):
            getattr(state, name)(*args)
        else:
            with pytest.raises(AssertionError):
                getattr(state, name)(*args)


def test_a_step_in_backward_that_was_not_finite_is_read_only_by_calls_that_need_it() -> None:
    reads = []

    def error() -> NonFiniteGradient:
        reads.append(1)
        return NonFiniteGradient("embed.weight: its gradient is not finite")

    for call, rule in RULES.items():
        state = in_state(S.UPDATED_UNCONFIRMED)
        state.confirm_updates(error)
        reads.clear()
        if rule.nonfinite == "raise":
            with pytest.raises(NonFiniteGradient):
                state.require(call)
        else:
            state.require(call)
        assert bool(reads) == (rule.nonfinite != "ignore") == (state.fault is S.FAILED)
    refusing = {call for call, rule in RULES.items() if rule.nonfinite == "raise"}
    assert refusing == {"step", "clip_grad_norm_", "save", "export", "next_task"}


def engine_with(**fields: str) -> Engine:
    return cells.prepare(Cell(kind="llama", dtype="fp32", weights="host", optimizer="host", **fields), "cpu")


def break_backward(engine: Engine, tensor: str) -> None:
    """`tensor`: whose gradient hook raises. The logits' runs before any update, the embedding's after some."""
    out = engine.model(**zoo.batch("llama"))
    hooked = out.logits if tensor == "logits" else next(engine.model.parameters())
    handle = hooked.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), engine.last_backward():
        out.loss.backward()
    handle.remove()


def test_an_engine_goes_through_the_states_of_a_step() -> None:
    with cells.closing(engine_with(update="after_step")) as engine:
        assert engine.state.pass_state is S.IDLE
        out = engine.model(**zoo.batch("llama"))
        assert engine.state.pass_state is S.HELD
        with pytest.raises(EngineMisuse, match="between forward and backward"):
            engine.optimizer.step()
        out.loss.backward()
        engine.optimizer.step()
        assert (engine.state.pass_state, engine.state.fault, engine.num_steps) == (S.IDLE, None, 1)
        saved = engine
    with pytest.raises(EngineMisuse, match="no longer holds its model"):
        saved.step()


def test_a_half_updated_model_is_not_trained_further() -> None:
    with cells.closing(engine_with(update="in_backward")) as engine:
        break_backward(engine, "embedding")
        assert engine.state.fault is S.HALF_UPDATED and engine.is_half_updated
        engine.optimizer.zero_grad()
        with pytest.raises(EngineMisuse, match=r"Training forward 2 needs .* updated some weights.*last checkpoint"):
            engine.model(**zoo.batch("llama"))
        with torch.no_grad():
            engine.model(**zoo.batch("llama"))
        assert engine.state.fault is S.HALF_UPDATED


def test_incomplete_gradients_are_not_used_by_updates_in_backward() -> None:
    with cells.closing(engine_with(update="after_step")) as engine:
        break_backward(engine, "logits")
        with pytest.raises(EngineMisuse, match=r"last_backward\(\) needs .*zero_grad"), engine.last_backward():
            engine.model(**zoo.batch("llama")).loss.backward()
        engine.optimizer.zero_grad()
        with engine.last_backward():
            engine.model(**zoo.batch("llama")).loss.backward()
        engine.optimizer.step()
