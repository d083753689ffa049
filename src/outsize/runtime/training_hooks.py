"""TrainingHooks: turns the events of BlockTracker into calls of CallPath, StateMachine and Executor.

A forward with grad is a training pass: it follows the schedule and keeps its activations for one backward. Any other
forward (evaluation, generation, a reference pass) may run between any two of these. A pass that failed or was abandoned
is rolled back by the next call.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.strategies import RUN
from outsize.activation.user_checkpointing import is_in_backward, rerun_in_backward
from outsize.base.cache_folder import drop_profiles
from outsize.base.errors import DeviceOutOfMemory, EngineMisuse, OrderMismatch
from outsize.compat import without_torch_function
from outsize.model.arguments import MovedArguments
from outsize.model.block_tracker import BlockTracker
from outsize.model.discover import Layer, layers_in_graph
from outsize.model.parts import own_parts
from outsize.model.strategies import STRATEGY
from outsize.model.tensors import with_grad
from outsize.runtime.plan_runtime import PlanRuntime, RuntimeOwner
from outsize.runtime.state import RULES, EngineState
from outsize.runtime.steps import Steps
from outsize.transfer.offloaded_tensors import OffloadedTensors


class TrainingHooks:
    def __init__(
        self,
        engine: RuntimeOwner,
        layers: tuple[Layer, ...],
        steps: Steps,
        *,
        fit: Callable[[tuple[Any, ...], dict[str, Any]], None],
        before_evaluation: Callable[[], None],
    ):
        """`fit(args, kwargs)` is called before a training forward and may re-plan for a larger batch."""
        self._engine, self._state, self._steps = engine, engine.state, steps
        self._fit, self._before_evaluation = fit, before_evaluation
        self._model, self._device = engine.model, engine.device
        self._found, self._layers = layers, layers
        """All layers of the module tree, and those that are blocks of the plan. They differ if the profiling run has
        shown that a list is no stack.
        """
        self._tracker = BlockTracker(self._model, self)
        self._non_layer_hooks: list[Any] = []
        self._training = False
        self._alive: Callable[[], _Alive | None] = lambda: None
        self._has_outputs = True
        """The last training forward returned a tensor with a graph, or wrote one into its arguments."""
        self._autocast_cache: bool | None = None
        self._arguments: MovedArguments | None = None
        """The arguments of the running forward."""

    @property
    def _runtime(self) -> PlanRuntime:
        return self._engine.runtime

    def require(self, call: str, name: str = "") -> None:
        """Roll back an abandoned pass and raise if a public call is illegal now (RULES in state.py)."""
        state = self._state.pass_state
        if state in RULES[call].rolls_back and not (state is EngineState.HELD and self._outputs_are_held()):
            self.roll_back()
        self._state.require(call, name)

    def attach(self) -> None:
        if not self._runtime.executor.sees_calls:
            self._tracker.attach(())
            return
        graph = self._runtime.planned.graph
        self._layers = layers_in_graph(self._found, {block.name for block in graph.blocks})
        # Modules outside layers load their own weights when they are called outside the model's forward (an encoder by
        # itself).
        inside = {id(m) for layer in self._layers for m in layer.module.modules()}
        non_layer = (
            m
            for m in self._model.modules()
            if id(m) not in inside and any(p is not None for p in m._parameters.values())
        )
        self._non_layer_hooks = [module.register_forward_pre_hook(self._non_layer_module_runs) for module in non_layer]
        # Layers that the profiling run did not run, in lists of layers that it ran: no call loads their weights.
        stacks = {layer.stack for layer in self._layers}
        for layer in self._found:
            if layer.stack in stacks and not inside.intersection(map(id, layer.module.modules())):
                refuse = partial(self._unplanned_layer_runs, layer.name)
                self._non_layer_hooks.append(layer.module.register_forward_pre_hook(refuse))
        self._tracker.attach(self._layers, finds_side_outputs=bool(graph.side_outputs))

    def detach(self) -> None:
        self._tracker.detach()
        for handle in self._non_layer_hooks:
            handle.remove()
        self._non_layer_hooks = []

    # Forward. model/block_tracker.py describes the events.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        store = self._runtime.store
        for name in store.replaced_data():
            raise EngineMisuse(
                f"{name}.data was replaced after prepare, which had set it to a view of its own memory. Write values "
                "with load_state_dict or inside `with engine.gathered(name)`."
            )
        with without_torch_function():
            self._training = torch.is_grad_enabled() and any(p.requires_grad for p in store.params.values())
        if self._training:
            self._require_training_forward()
            del store  # `fit` may re-plan, and a new plan has no memory for the old one's buffers
            self._fit(args, kwargs)
        else:
            if torch.is_grad_enabled() and with_grad((args, kwargs)):
                raise EngineMisuse(
                    "No parameter of the prepared model requires grad, but an input does: gradients through a model "
                    "that is not trained are not supported. "
                    "Call it under torch.no_grad(), or detach its inputs."
                )
            self._before_evaluation()
            self.require("evaluate")
        runtime = self._runtime
        runtime.access.begin_pass()
        # The cache keeps a cast of every block's weights alive, and would return those of another chunk in the slot.
        self._autocast_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._device.watching(True)
        runtime.begin_forward()
        self._arguments = moved = MovedArguments(self._device.put, args, kwargs)
        runtime.path.begin_forward()
        if self._training:
            self._state.begin_forward(self._tracker.forward_id)
            runtime.executor.begin_forward()
        else:
            runtime.executor.begin_evaluation()
        return moved.args, moved.kwargs

    def _require_training_forward(self) -> None:
        if (name := self._runtime.store.replaced()) is not None:
            raise EngineMisuse(
                f"{name} is not the parameter that the model was prepared with. Call engine.detach(), change the "
                "model, and prepare it again."
            )
        if is_in_backward() and self._state.pass_state is not EngineState.IDLE:
            raise EngineMisuse(rerun_in_backward("The model"))
        self.require("forward", f"Training forward {self._tracker.forward_id}")

    def call_of_layer(self, layer: int, after: int) -> int:
        runtime, name = self._runtime, self._layers[layer].name
        if not self._training:
            return runtime.path.call_of_layer_without_grad(name)
        call = runtime.path.call_of_layer(name)
        runtime.guard_new_path()
        return call

    def call_of_module(self, module: nn.Module, call: int) -> int:
        if not self._training:
            return call
        runtime = self._runtime
        call = runtime.path.call_of_module(module)
        runtime.guard_new_path()
        return call

    def forward_enters(self, call: int, layer: int | None) -> None:
        runtime = self._runtime
        name = self._layers[layer].name if layer is not None else None
        if name is not None and call < 0:
            if is_in_backward():
                raise EngineMisuse(rerun_in_backward(name))
            if torch.is_grad_enabled():
                raise EngineMisuse(
                    f"{name} was called outside of the model's forward with gradients enabled. Call the prepared model "
                    "itself; for inference use torch.no_grad()."
                )
            runtime.access.apply_user_writes()
            runtime.executor.enter_unscheduled(runtime.path.chunks_of_layer(name))
        elif self._training:
            if runtime.executor.sees_calls:
                runtime.path.enter(call, name)
            runtime.executor.enter(call)
        else:
            runtime.executor.enter_evaluation(call, runtime.path.enter_without_grad(call, name))

    def _unplanned_layer_runs(self, name: str, module: nn.Module, args: Any) -> None:
        if self._tracker.is_open and self._training:
            raise OrderMismatch(
                f"{name} runs, but it did not run in the profiling run of prepare, so the plan has no call of it. "
                "Prepare the model with a batch that runs all layers."
            )

    def _non_layer_module_runs(self, module: nn.Module, args: Any) -> None:
        # Inside a forward without grad too: it may read weights that no training forward reads.
        if not torch.is_grad_enabled() and not (self._tracker.is_open and self._training):
            runtime = self._runtime
            if not self._tracker.is_open:
                runtime.access.apply_user_writes()
            runtime.executor.enter_unscheduled(runtime.store.chunks_with(part for _, part in own_parts(module)))

    def run_layer(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._training or call < 0:
            return forward(*args, **kwargs)
        runtime = self._runtime
        strategy = runtime.plan.decision.strategies[call]
        if not torch.is_grad_enabled():
            if STRATEGY[strategy].sends:
                runtime.executor.runs_without_grad(call)
            return forward(*args, **kwargs)
        offloaded = runtime.executor.offloaded(call) if STRATEGY[strategy].sends else OffloadedTensors()
        return RUN[strategy](forward, args, kwargs, offloaded, runtime.is_static, self._layers[layer].module)

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        runtime, arguments, self._arguments = self._runtime, self._arguments, None
        if arguments is not None and not failed:
            arguments.write_back()
        if self._autocast_cache is not None:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            self._autocast_cache = None
            runtime.end_forward()
        try:
            if not self._training:
                runtime.executor.leave_unscheduled()
                if not failed and runtime.executor.sees_calls:
                    runtime.path.end_without_grad()
            elif failed:
                self._forward_failed()
            else:
                self._end_training_forward(outputs)
        finally:
            self._device.watching(False)
            runtime.access.end_pass()

    def _end_training_forward(self, outputs: list[Tensor]) -> None:
        executor = self._runtime.executor
        try:
            if executor.sees_calls:
                self._runtime.path.end_forward()
            executor.end_forward()
        except OrderMismatch:
            self._forward_failed()
            raise
        self._state.end_forward()
        self._alive = _mark_graph(outputs)
        self._has_outputs = self._alive() is not None
        if not self._has_outputs:
            self.roll_back()

    def _forward_failed(self) -> None:
        self.check_profile()
        # In another state the forward was refused before it began, and an earlier one keeps its activations.
        if self._state.pass_state is EngineState.FORWARD:
            self.roll_back()

    # Backward.

    def backward_enters(self, call: int, forward_id: int) -> None:
        runtime, state = self._runtime, self._state
        gradients, executor = runtime.gradients, runtime.executor
        if state.pass_state is EngineState.HELD and forward_id == state.forward_id:
            update = self._steps.begin_backward()
            if gradients.has_assigned:
                self._device.synchronize()
                gradients.pull_assigned()
            if gradients.has_handed_out:
                self._device.synchronize()  # before copies read what operators have written to gradients on the host
            self._device.watching(True)
            runtime.access.begin_pass()
            state.begin_backward()
            executor.begin_backward(pending=gradients.begin_backward(), update=update)
        elif state.pass_state is not EngineState.BACKWARD:
            where = runtime.planned.graph.call_name(call) if executor.sees_calls else "the model"
            if forward_id == state.forward_id and not self._has_outputs:
                raise EngineMisuse(
                    f"A backward reaches {where}, but the forward returned no tensor with grad that outsize found, "
                    "and its activations are gone. Return the "
                    "tensors that a loss is made of in a tuple, list, dict, dataclass or in attributes of an object."
                )
            raise EngineMisuse(
                f"A backward reaches {where} after the activations of its forward were freed: each forward has one "
                "backward. Run the forward again; retain_graph is not supported."
            )
        if call != executor.current_call:
            gradients.require_complete(call)
            executor.enter(call)
            gradients.enters(call)

    def backward_ends(self) -> None:
        runtime = self._runtime
        runtime.gradients.require_complete(-1)
        runtime.executor.end_backward()
        self._state.end_backward()
        self._device.watching(False)
        runtime.access.end_pass()
        if runtime.gradients.has_assigned:
            self._device.synchronize()
            runtime.gradients.push_assigned()

    def backward_failed(self) -> None:
        """A backward raised: if it was this model's, roll it back, so that later reads of weights are right."""
        if self._state.pass_state is EngineState.BACKWARD:
            self.check_profile()
            self.roll_back()

    # Between passes.

    def check_profile(self) -> None:
        """A pass has failed. If it ran out of memory or took another path than planned, the cached profile may be of
        other code: delete it.
        """
        if isinstance(sys.exc_info()[1], (torch.OutOfMemoryError, DeviceOutOfMemory, OrderMismatch)):
            drop_profiles(self._runtime.plan.profile_keys)

    def roll_back(self) -> None:
        """Drop a pass that failed or was abandoned, if there is one."""
        if self._state.pass_state is EngineState.IDLE:
            return
        runtime = self._runtime
        self._state.roll_back(failed_in=runtime.executor.call_text())
        self._steps.roll_back()
        runtime.gradients.forget_early()
        try:
            runtime.executor.roll_back()  # raises if an update has failed
        finally:
            self._device.watching(False)
            runtime.access.end_pass()

    def _outputs_are_held(self) -> bool:
        return self._alive() is not None


class _Alive:
    """Exists as long as the autograd graph that refers to it."""


def _mark_graph(tensors: list[Tensor]) -> "Callable[[], _Alive | None]":
    """A reference that is dead once the graphs of these tensors are freed. The tensors may be freed before, when a loss
    was made of them."""
    mark = _Alive()
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata["outsize"] = mark  # type: ignore[index]
    return weakref.ref(mark)
