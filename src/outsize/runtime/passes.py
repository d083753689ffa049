"""Passes: what the engine does as the model runs. Listens to the model's course and drives the executor.

A forward with grad is a training pass and follows the schedule; it waits for its backward. Any other forward (evaluation, generation, a reference
pass) loads what it needs as it goes and may come between any two of these. What breaks off is rolled back by whoever comes next.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.checkpointed import is_in_backward, rerun_in_backward
from outsize.activation.parcel import Parcel
from outsize.activation.strategies import RUN, SENDS
from outsize.base.cache_folder import drop_profiles
from outsize.base.errors import SEVERAL_FORWARDS, DeviceOutOfMemory, EngineMisuse, OrderMismatch, tell
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.model.arguments import MovedArguments
from outsize.model.course import Course
from outsize.model.discover import Layer, layers_in_graph
from outsize.model.tensors import with_grad
from outsize.runtime.attached import Holder
from outsize.runtime.executor import ALL_VISITS, Stage
from outsize.runtime.steps import Steps


class Passes:
    def __init__(
        self, model: nn.Module, layers: tuple[Layer, ...], device: Device, holder: Holder, steps: Steps, *,
        fit: Callable[[tuple[Any, ...], dict[str, Any]], None], beside: Callable[[], None],
    ):  # fmt: skip
        """`fit(args, kwargs)` is called before a training forward and may re-plan for a larger batch, `beside()` before any other."""
        self._model, self._device, self._holder, self._steps, self._fit, self._beside = model, device, holder, steps, fit, beside
        self._found, self._layers = layers, layers
        """Those of the module tree, and of them those that the plan knows as such: the trial run may have seen that a list is no stack."""
        self._course = Course(model, self)
        self._loose: list[Any] = []
        self._training = False
        self._forward_number = 0
        """Of the training forward that the next backward belongs to."""
        self._free_visit = 0
        """Where a forward without grad is."""
        self._alive: Callable[[], _Alive | None] = lambda: None
        self._has_outputs = True
        """A tensor with a graph was found in what the last training forward returned, or left in its arguments."""
        self._autocast_cache: bool | None = None
        self._arguments: MovedArguments | None = None
        """Of the forward that is under way."""

    def attach(self) -> None:
        if not self._holder.now.executor.sees_visits:
            self._course.attach(())
            return
        self._layers = layers_in_graph(self._found, {block.name for block in self._holder.now.planned.graph.blocks})
        # Modules outside layers that own weights open themselves when they are called outside the model's forward (an encoder by itself).
        inside = {id(m) for layer in self._layers for m in layer.module.modules()}
        loose = (m for m in self._model.modules() if id(m) not in inside and any(p is not None for p in m._parameters.values()))
        self._loose = [module.register_forward_pre_hook(self._loose_opens) for module in loose]
        self._course.attach(self._layers, looks_around=bool(self._holder.now.planned.graph.detours))

    def detach(self) -> None:
        self._course.detach()
        for handle in self._loose:
            handle.remove()
        self._loose = []

    # Forward. See model/course.py for who calls these when.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        now = self._holder.now
        for name in now.store.rebound():
            do = "Write values with load_state_dict or inside `with engine.gathered(name)`"
            raise EngineMisuse(tell(f"{name}.data is the view that prepare set", "somebody has replaced it", do))
        with without_torch_function():
            self._training = torch.is_grad_enabled() and any(p.requires_grad for p in now.store.params.values())
        self._free_visit = 0
        if self._training:
            del now  # a new plan may come, and has no room beside the old one
            self._begin_training()
            self._fit(args, kwargs)
        else:
            if torch.is_grad_enabled() and with_grad((args, kwargs)):
                raise EngineMisuse(
                    "No parameter of the prepared model requires grad, but an input does: gradients through a model that is not trained are not supported. "
                    "Call it under torch.no_grad(), or detach its inputs."
                )
            self._beside()
            if now.executor.stage in (Stage.FORWARD, Stage.BACKWARD):
                self.roll_back()
        self._holder.now.access.begin_pass()
        # The cache keeps a cast of every block's weights alive, and would serve those of a slot's earlier owner.
        self._autocast_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._device.watching(True)
        self._holder.now.begin_forward()
        self._arguments = moved = MovedArguments(self._device.put, args, kwargs)
        if self._training:
            self._forward_number = self._course.number
            self._holder.now.executor.begin_forward()
        return moved.args, moved.kwargs

    def _begin_training(self) -> None:
        if (name := self._holder.now.store.replaced()) is not None:
            raise EngineMisuse(
                f"{name} is not the parameter that the model was prepared with. Call engine.detach(), change the model, and prepare it again."
            )
        executor = self._holder.now.executor
        self._steps.require_usable()
        self._steps.require_confirmed("another forward began")
        if is_in_backward() and executor.stage is not Stage.IDLE:
            raise EngineMisuse(rerun_in_backward("The model"))
        if executor.stage is Stage.WAITING and self._outputs_are_held():
            raise EngineMisuse(
                f"Training forward {self._course.number} begins before the backward of forward {self._forward_number}, whose outputs are still held: the plan "
                f"keeps the activations of one. {SEVERAL_FORWARDS} Run forwards that need no backward under torch.no_grad(), "
                "and drop outputs that are not used (`del out`)."
            )
        if executor.stage is not Stage.IDLE:
            self.roll_back()

    def finds(self, layer: int, after: int) -> int:
        now, name = self._holder.now, self._layers[layer].name
        return now.next_visit(name, after) if self._training else now.free_visit(name, after)

    def reads(self, module: nn.Module, visit: int) -> int:
        return self._holder.now.reading_visit(module, visit) if self._training else visit

    def forward_enters(self, visit: int, layer: int | None) -> None:
        now = self._holder.now
        name = self._layers[layer].name if layer is not None else None
        if name is not None and visit < 0:
            if is_in_backward():
                raise EngineMisuse(rerun_in_backward(name))
            if torch.is_grad_enabled():
                do = "Call the prepared model itself; for inference use torch.no_grad()"
                raise EngineMisuse(tell(f"{name} runs inside the model's forward when it is trained", "it was called by itself", do))
            now.access.settle()
            now.executor.enter_unscheduled(now.layer_chunks(name))
        elif self._training:
            now.executor.enter_forward(visit, name)
        else:
            self._free_visit = visit
            now.executor.enter_unscheduled(now.layer_chunks(name) if name is not None else now.region_chunks(visit))

    def _loose_opens(self, module: nn.Module, args: Any) -> None:
        # Inside a forward without grad, too: it may read what no training forward reads.
        if not torch.is_grad_enabled() and not (self._course.is_open and self._training):
            now = self._holder.now
            if not self._course.is_open:
                now.access.settle()
            now.executor.enter_unscheduled(now.store.chunks_with(module._parameters.values()))

    def runs(self, visit: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._training or visit < 0:
            return forward(*args, **kwargs)
        now = self._holder.now
        strategy = now.plan.decision.strategies[visit]
        if not torch.is_grad_enabled():
            if strategy in SENDS:
                now.executor.runs_without_grad(visit)
            return forward(*args, **kwargs)
        parcel = now.executor.parcel(visit) if strategy in SENDS else Parcel()
        return RUN[strategy](forward, args, kwargs, parcel, now.is_static)

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None and not failed:
            arguments.write_back()
        if self._autocast_cache is not None:
            torch.set_autocast_cache_enabled(self._autocast_cache)
            self._autocast_cache = None
            self._holder.now.end_forward()
        executor = self._holder.now.executor
        try:
            if not self._training:
                executor.leave_unscheduled()
                if not failed and executor.sees_visits:
                    self._holder.now.require_seen(self._free_visit, len(self._holder.now.planned.graph.visits))
            elif failed:
                self.check_profile()
                if executor.stage is Stage.FORWARD:  # else it was refused before it began, and an earlier one still waits
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
            self._holder.now.access.end_pass()

    # Backward.

    def backward_enters(self, visit: int, course: int) -> None:
        now = self._holder.now
        executor = now.executor
        if executor.stage is Stage.WAITING and course == self._forward_number:
            update = self._steps.begin_backward()
            if now.gradients.has_assigned:
                self._device.synchronize()
                now.gradients.pull_assigned()
            self._device.watching(True)
            now.access.begin_pass()
            now.gradients.forget_early()
            executor.begin_backward(pending=bool(now.gradients.landed), update=update)
        elif executor.stage is not Stage.BACKWARD:
            where = now.planned.graph.visit_name(visit) if executor.sees_visits else "the model"
            if course == self._forward_number and not self._has_outputs:
                raise EngineMisuse(
                    f"A backward reaches {where}, but the forward returned no tensor with grad that outsize found, and its activations are gone. Return the "
                    "tensors that a loss is made of in a tuple, list, dict, dataclass or in attributes of an object."
                )
            found = f"another one reaches {where}; its activations are gone"
            raise EngineMisuse(tell("one backward follows each forward of a prepared model", found, "Run the forward again; retain_graph is not supported"))
        if visit != executor.current_visit:
            now.gradients.require_landed(visit)
            executor.enter_backward(visit)
            now.gradients.enters(visit)

    def backward_ends(self) -> None:
        now = self._holder.now
        now.gradients.require_landed(-1)
        now.executor.end_backward()
        self._device.watching(False)
        now.access.end_pass()
        if now.gradients.has_assigned:
            self._device.synchronize()
            now.gradients.push_assigned()

    # Between passes.

    def check_profile(self) -> None:
        """A pass has just failed. If it ran out of memory or took another path than planned, the cached profile may be of other code: delete it."""
        if isinstance(sys.exc_info()[1], (torch.OutOfMemoryError, DeviceOutOfMemory, OrderMismatch)):
            drop_profiles(self._holder.now.plan.profile_keys)

    def roll_back(self) -> None:
        """Forget a pass that broke off or was abandoned."""
        now = self._holder.now
        if now.executor.stage is Stage.BACKWARD:
            visit = now.executor.current_visit
            where = "its first block" if visit is None else "the model" if visit == ALL_VISITS else now.planned.graph.visit_name(visit)
            now.gradients.broken = where
            self._steps.backward_broke(where)
        now.gradients.forget_early()
        now.executor.roll_back()
        self._device.watching(False)
        now.access.end_pass()

    def settle(self) -> Stage:
        """Where training is, once what broke off or was abandoned is rolled back."""
        executor = self._holder.now.executor
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
