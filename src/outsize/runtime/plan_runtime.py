"""PlanRuntime: everything that exists under one plan, so that nothing of an old plan can live on in a new one."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.device.observer import push_mode, remove_mode
from outsize.layout.chunks import ChunkLayout
from outsize.model.batch import Measured, Signature, of_unknown_kind
from outsize.model.graph import BlockGraph
from outsize.model.weights import Weights
from outsize.runtime.access import ParameterAccess
from outsize.runtime.call_path import CallPath
from outsize.runtime.executor import Executor
from outsize.runtime.gradients import Gradients
from outsize.runtime.guard import Guard
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.patches import Patches
from outsize.runtime.store import Store
from outsize.runtime.updates import Updates
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.schedule.schedule import compile_schedule


class ModelLoss(Protocol):
    """How the model makes its loss under a plan."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A plan and what it speaks of."""

    graph: BlockGraph
    layout: ChunkLayout
    plan: Plan
    loss: ModelLoss | None = None
    """None: in the model's own way."""
    measured: tuple[Measured, ...] = ()
    """The batches that the plan holds for. Empty: only the plan's inputs are known."""

    def signatures(self, names: tuple[str, ...]) -> list[Signature]:
        """The calls of the model that it holds for. `names`: those of the arguments of its forward."""
        return [call for one in self.measured for call in one.signatures] or [of_unknown_kind(self.plan.inputs, names)]

    def batches(self) -> list[Signature]:
        """The batches, where a loop makes its loss of more than the model's arguments."""
        return [one.batch for one in self.measured] or [of_unknown_kind(self.plan.inputs, ())]


class PlanRuntime:
    def __init__(
        self,
        planned: PlannedModel,
        model: nn.Module,
        device: Device,
        optimizer: EngineOptimizer,
        weights: Weights | None,
        *,
        update_chunk: Callable[[int, bool], Callable[[], None]],
        drain: Callable[[], None],
        before_write: Callable[[], None],
        before_grad: Callable[[], None],
        zero_grad: Callable[[bool], None],
        check_finite: bool = False,
    ):
        graph, layout, plan = planned.graph, planned.layout, planned.plan
        self.planned, self.device = planned, device
        self.place = Placement(graph, layout, plan.decision, plan.step_config, plan.work, plan.shared)
        self.store = Store(model, self.place, device, weights, check_finite=check_finite)
        self._buffers = [(b, b.data) for b in model.buffers()]
        for buffer, data in self._buffers:
            buffer.data = device.keep(data)
        # A group that was added waits for a plan that trains its parameters.
        group_of = {
            name: i
            for i, group in enumerate(optimizer.param_groups)
            for name in group["param_names"]
            if self.place.is_updated(layout.place[name][0])
        }
        self.updates = Updates(self.store, optimizer.rule, lambda: optimizer.param_groups, group_of)
        self._frozen = [(name, param) for name, param in self.store.params.items() if name not in group_of]
        # No closure here refers to `self`: device memory must go when the engine lets go, not when the garbage
        # collector comes.
        executor = self.executor = Executor(
            self.place, compile_schedule(self.place), self.store, device, update_chunk=update_chunk
        )
        self.gradients = Gradients(self.store, list(group_of), lambda: executor.current_call)
        self.access = ParameterAccess(
            self.store,
            self.gradients,
            stage=lambda: executor.stage,
            drain=drain,
            before_write=before_write,
            before_grad=before_grad,
        )
        self.patches = Patches(model, self.store, drain=drain, export=self.access.export, zero_grad=zero_grad)
        self._guard = Guard(self.store)
        weakref.finalize(
            self.store, remove_mode, self._guard
        ).atexit = False  # of an engine that is dropped without a word
        self._is_guarded = False
        # Under a mode, the gradients of a parameter with several uses are added up out of place. A plan that was
        # measured without one has no room for that.
        adds_up = any(len(layout.chunks[chunk].calls) > 1 for chunk in self.place.updated)
        self._guards_backward = device.observes_by_mode or not adds_up
        self._arm_guard()
        static = {
            t.untyped_storage().data_ptr() for t in (*self.store.gpu.values(), *(b.data for b in model.buffers()))
        }
        self.is_static: Callable[[Tensor], bool] = lambda t: t.untyped_storage().data_ptr() in static
        self.path = CallPath(graph, layout, self.store.params)
        if planned.loss is not None:
            planned.loss.attach()
        self.access.end_pass()

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def unfrozen(self) -> list[str]:
        """Parameters that require grad now, and did not when the plan was made."""
        with without_torch_function():
            return [name for name, param in self._frozen if param.requires_grad]

    def guard_new_path(self) -> None:
        """Guard the rest of the step, as the first step was, when a forward takes a path that none took before."""
        if self.path.is_new and not self._is_guarded:
            self._arm_guard()
            self.begin_forward()
        self.path.is_new = False

    def _arm_guard(self) -> None:
        self._is_guarded = True
        if self._guards_backward:
            push_mode(self._guard)

    def begin_forward(self) -> None:
        """Forwards are guarded also where backwards are not."""
        if self._is_guarded and not self._guards_backward:
            push_mode(self._guard)

    def end_forward(self) -> None:
        if self._is_guarded and not self._guards_backward:
            remove_mode(self._guard)

    def drop_guard(self) -> None:
        if self._is_guarded and self._guards_backward:
            remove_mode(self._guard)
        self._is_guarded = False

    def release(self, *, keep: bool = True) -> None:
        """A plain model on the CPU again; without `keep`, an unmaterialized one."""
        self.drop_guard()
        self.access.release()
        if self.planned.loss is not None:
            self.planned.loss.detach()
        self.patches.undo()
        self.gradients.detach()
        self.store.release(keep=keep)
        for buffer, data in self._buffers:
            buffer.data = data if torch.equal(data, buffer.data.to(data.device)) else data.copy_(buffer.data)


class RuntimeHolder:
    """Where the parts of an engine find what is attached now; a re-plan puts another one here."""

    def __init__(self) -> None:
        self.attached: PlanRuntime | None = None
        self.ended = "it was detached"
        """Why nothing is attached."""

    @property
    def runtime(self) -> PlanRuntime:
        if self.attached is None:
            raise EngineMisuse(f"The engine no longer holds its model: {self.ended}. Call outsize.prepare again.")
        return self.attached
