"""TrainingHooks: what the engine does as the model runs. Listens to the model's tracker and drives the executor.

A forward with grad is a training pass and follows the schedule; it waits for its backward. Any other forward
(evaluation, generation, a reference pass) loads what it needs as it goes and may come between any two of these. What
breaks off is rolled back by whoever comes next.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.offloaded_tensors import OffloadedTensors
from outsize.activation.strategies import RUN
from outsize.activation.user_checkpointing import is_in_backward, rerun_in_backward
from outsize.base.cache_folder import drop_profiles
from outsize.base.errors import SEVERAL_FORWARDS, DeviceOutOfMemory, EngineMisuse, OrderMismatch
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.model.arguments import MovedArguments
from outsize.model.block_tracker import BlockTracker
from outsize.model.discover import Layer, layers_in_graph
from outsize.model.strategies import STRATEGY
from outsize.model.tensors import with_grad
from outsize.runtime.executor import ALL_CALLS, Stage
from outsize.runtime.plan_runtime import RuntimeHolder
from outsize.runtime.steps import Steps


class TrainingHooks:
    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        device: Device,
        holder: RuntimeHolder,
        steps: Steps,
        *,
        fit: Callable[[tuple[Any, ...], dict[str, Any]], None],
        beside: Callable[[], None],
    ):
        """`fit(args, kwargs)` is called before a training forward and may re-plan for a larger batch, `beside()` before
        any other.
        """
        self._model, self._device, self._holder, self._steps, self._fit, self._beside = (
            model,
            device,
            holder,
            steps,
            fit,
            beside,
        )
        self._found, self._layers = layers, layers
        """Those of the module tree, and of them those that the plan knows as such: the trial run may have seen that a
        list is no stack.
        """
        self._tracker = BlockTracker(model, self)
        self._non_layer_hooks: list[Any] = []
        self._training = False
        self._forward_number = 0
        """Of the training forward that the next backward belongs to."""
        self._free_call = 0
        """Where a forward without grad is."""
        self._alive: Callable[[], _Alive | None] = lambda: None
        self._has_outputs = True
        """A tensor with a graph was found in what the last training forward returned, or left in its arguments."""
        self._autocast_cache: bool | None = None
        self._arguments: MovedArguments | None = None
        """Of the forward that is under way."""

    def attach(self) -> None:
        if not self._holder.runtime.executor.sees_calls:
            self._tracker.attach(())
            return
        self._layers = layers_in_graph(self._found, {block.name for block in self._holder.runtime.planned.graph.blocks})
        # Modules outside layers that own weights open themselves when they are called outside the model's forward (an
        # encoder by itself).
        inside = {id(m) for layer in self._layers for m in layer.module.modules()}
        non_layer = (
            m
            for m in self._model.modules()
            if id(m) not in inside and any(p is not None for p in m._parameters.values())
        )
        self._non_layer_hooks = [module.register_forward_pre_hook(self._non_layer_module_runs) for module in non_layer]
        self._tracker.attach(self._layers, finds_side_outputs=bool(self._holder.runtime.planned.graph.side_outputs))

    def detach(self) -> None:
        self._tracker.detach()
        for handle in self._non_layer_hooks:
            handle.remove()
        self._non_layer_hooks = []

    # Forward. See model/block_tracker.py for who calls these when.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        runtime = self._holder.runtime
        for name in runtime.store.replaced_data():
            raise EngineMisuse(
                f"{name}.data was replaced after prepare, which had set it to a view of its own memory. Write values "
                "with load_state_dict or inside `with engine.gathered(name)`."
            )
        with without_torch_function():
            self._training = torch.is_grad_enabled() and any(p.requires_grad for p in runtime.store.params.values())
        self._free_call = 0
        if self._training:
            del runtime  # a new plan may come, and has no room beside the old one
            self._begin_training()
            self._fit(args, kwargs)
        else:
            if torch.is_grad_enabled() and with_grad((args, kwargs)):
                raise EngineMisuse(
                    "No parameter of the prepared model requires grad, but an input does: gradients through a model "
                    "that is not trained are not supported. "
                    "Call it under torch.no_grad(), or detach its inputs."
                )
            self._beside()
            if runtime.executor.stage in (Stage.FORWARD, Stage.BACKWARD):
                self.roll_back()
        self._holder.runtime.access.begin_pass()
        # The cache keeps a cast of every block's weights alive, and would serve those of a slot's earlier owner.
        self._autocast_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._device.watching(True)
        self._holder.runtime.begin_forward()
        self._arguments = moved = MovedArguments(self._device.put, args, kwargs)
        if self._training:
            self._forward_number = self._tracker.forward_id
            self._holder.runtime.executor.begin_forward()
        else:
            self._holder.runtime.executor.begin_evaluation()
        return moved.args, moved.kwargs

    def _begin_training(self) -> None:
        if (name := self._holder.runtime.store.replaced()) is not None:
            raise EngineMisuse(
                f"{name} is not the parameter that the model was prepared with. Call engine.detach(), change the "
                "model, and prepare it again."
            )
        executor = self._holder.runtime.executor
        self._steps.require_usable()
        self._steps.require_confirmed("another forward began")
        if is_in_backward() and executor.stage is not Stage.IDLE:
            raise EngineMisuse(rerun_in_backward("The model"))
        if executor.stage is Stage.WAITING and self._outputs_are_held():
            raise EngineMisuse(
                f"Training forward {self._tracker.forward_id} begins before the backward of forward "
                f"{self._forward_number}, whose outputs are still held: the plan "
                f"keeps the activations of one. {SEVERAL_FORWARDS} Run forwards that need no backward under "
                "torch.no_grad(), "
                "and drop outputs that are not used (`del out`)."
            )
        if executor.stage is not Stage.IDLE:
            self.roll_back()

    def call_of_layer(self, layer: int, after: int) -> int:
        runtime, name = self._holder.runtime, self._layers[layer].name
        if not self._training:
            return runtime.path.next_call_without_grad(name, after)
        call = runtime.path.next_call(name, after)
        runtime.guard_new_path()
        return call

    def call_of_module(self, module: nn.Module, call: int) -> int:
        if not self._training:
            return call
        runtime = self._holder.runtime
        call = runtime.path.reading_call(module, call)
        runtime.guard_new_path()
        return call

    def forward_enters(self, call: int, layer: int | None) -> None:
        runtime = self._holder.runtime
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
            runtime.executor.enter_forward(call, name)
        else:
            self._free_call = call
            chunks = runtime.path.chunks_of_call(call) if name is None else runtime.path.chunks_of_layer(name)
            runtime.executor.enter_evaluation(call, chunks)

    def _non_layer_module_runs(self, module: nn.Module, args: Any) -> None:
        # Inside a forward without grad, too: it may read what no training forward reads.
        if not torch.is_grad_enabled() and not (self._tracker.is_open and self._training):
            runtime = self._holder.runtime
            if not self._tracker.is_open:
                runtime.access.apply_user_writes()
            runtime.executor.enter_unscheduled(runtime.store.chunks_with(module._parameters.values()))

    def run_layer(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._training or call < 0:
            return forward(*args, **kwargs)
        runtime = self._holder.runtime
        strategy = runtime.plan.decision.strategies[call]
        if not torch.is_grad_enabled():
            if STRATEGY[strategy].sends:
                runtime.executor.runs_without_grad(call)
            return forward(*args, **kwargs)
        offloaded = runtime.executor.offloaded(call) if STRATEGY[strategy].sends else OffloadedTensors()
        return RUN[strategy](forward, args, kwargs, offloaded, runtime.is_static)

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None and not failed:
            arguments.write_back()
        if self._autocast_cache is not None:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            self._autocast_cache = None
            self._holder.runtime.end_forward()
        executor = self._holder.runtime.executor
        try:
            if not self._training:
                executor.leave_unscheduled()
                if not failed and executor.sees_calls:
                    runtime = self._holder.runtime
                    runtime.path.require_seen(self._free_call, len(runtime.planned.graph.calls))
            elif failed:
                self.check_profile()
                if (
                    executor.stage is Stage.FORWARD
                ):  # else it was refused before it began, and an earlier one still waits
                    executor.roll_back()
            else:
                try:
                    executor.end_forward()
                except OrderMismatch:
                    self.check_profile()
                    executor.roll_back()
                    raise
                self._alive = _mark_graph(outputs)
                self._has_outputs = self._alive() is not None
                if not self._has_outputs:
                    executor.roll_back()
        finally:
            self._device.watching(False)
            self._holder.runtime.access.end_pass()

    # Backward.

    def backward_enters(self, call: int, forward_id: int) -> None:
        runtime = self._holder.runtime
        executor = runtime.executor
        if executor.stage is Stage.WAITING and forward_id == self._forward_number:
            update = self._steps.begin_backward()
            if runtime.gradients.has_assigned:
                self._device.synchronize()
                runtime.gradients.pull_assigned()
            self._device.watching(True)
            runtime.access.begin_pass()
            executor.begin_backward(pending=runtime.gradients.begin_backward(), update=update)
        elif executor.stage is not Stage.BACKWARD:
            where = runtime.planned.graph.call_name(call) if executor.sees_calls else "the model"
            if forward_id == self._forward_number and not self._has_outputs:
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
            runtime.gradients.require_complete(call)
            executor.enter_backward(call)
            runtime.gradients.enters(call)

    def backward_ends(self) -> None:
        runtime = self._holder.runtime
        runtime.gradients.require_complete(-1)
        runtime.executor.end_backward()
        self._device.watching(False)
        runtime.access.end_pass()
        if runtime.gradients.has_assigned:
            self._device.synchronize()
            runtime.gradients.push_assigned()

    # Between passes.

    def check_profile(self) -> None:
        """A pass has just failed. If it ran out of memory or took another path than planned, the cached profile may be
        of other code: delete it.
        """
        if isinstance(sys.exc_info()[1], (torch.OutOfMemoryError, DeviceOutOfMemory, OrderMismatch)):
            drop_profiles(self._holder.runtime.plan.profile_keys)

    def roll_back(self) -> None:
        """Forget a pass that broke off or was abandoned."""
        runtime = self._holder.runtime
        if runtime.executor.stage is Stage.BACKWARD:
            call = runtime.executor.current_call
            where = (
                "its first block"
                if call is None
                else "the model"
                if call == ALL_CALLS
                else runtime.planned.graph.call_name(call)
            )
            runtime.gradients.broken = where
            self._steps.backward_broke(where)
        runtime.gradients.forget_early()
        runtime.executor.roll_back()
        self._device.watching(False)
        runtime.access.end_pass()

    def end_forward(self) -> Stage:
        """Where training is, once what broke off or was abandoned is rolled back."""
        executor = self._holder.runtime.executor
        if executor.stage is Stage.BACKWARD or (executor.stage is Stage.WAITING and not self._outputs_are_held()):
            self.roll_back()
        return executor.stage

    def _outputs_are_held(self) -> bool:
        return self._alive() is not None


class _Alive:
    """Lives as long as the graph it was put on."""


def _mark_graph(tensors: list[Tensor]) -> "Callable[[], _Alive | None]":
    """Tells whether any of these tensors' graphs is still there: the tensors themselves may be gone into a loss."""
    mark = _Alive()
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata["outsize"] = mark  # type: ignore[index]
    return weakref.ref(mark)
