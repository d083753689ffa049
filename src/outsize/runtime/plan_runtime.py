"""PlanRuntime: everything that exists under one plan. A re-plan releases it and makes another."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.activation.tiles import Tiling
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.device.observer import push_mode, remove_mode
from outsize.layout.chunks import ChunkLayout
from outsize.model.batch import Measured, Signature, cut_into_tiles, of_unknown_kind
from outsize.model.graph import BlockGraph
from outsize.model.parts import share_tables
from outsize.model.weights import Weights
from outsize.optim.method import Method
from outsize.runtime.access import ParameterAccess
from outsize.runtime.call_path import CallPath
from outsize.runtime.coordinates import CoordinateTraining, KeptConstants
from outsize.runtime.executor import Executor
from outsize.runtime.gradients import Gradients
from outsize.runtime.guard import Guard
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.patches import Patches
from outsize.runtime.state import StateMachine
from outsize.runtime.store import Store
from outsize.runtime.updates import Updates
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.schedule.schedule import compile_schedule


class ModelLoss(Protocol):
    """How the model computes its loss under a plan."""

    def attach(self) -> None: ...
    def detach(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A plan, with the model and batches that it is for."""

    graph: BlockGraph
    layout: ChunkLayout
    plan: Plan
    loss: ModelLoss | None = None
    """None: the model computes it itself."""
    measured: tuple[Measured, ...] = ()
    """The batches that the plan holds for. Empty: only the plan's inputs are known."""

    def signatures(self, names: tuple[str, ...]) -> list[Signature]:
        """The calls of the model that the plan holds for. `names`: the arguments of the model's forward."""
        return [call for one in self.measured for call in one.signatures] or [self._inputs(names)]

    def batches(self) -> list[Signature]:
        """The batches that the plan holds for, in loops whose loss uses more than the model's arguments."""
        return [one.batch for one in self.measured] or [self._inputs(())]

    def _inputs(self, names: tuple[str, ...]) -> Signature:
        return cut_into_tiles(of_unknown_kind(self.plan.inputs, names), self.plan.tile_tokens)


class PlanRuntime:
    def __init__(
        self,
        engine: "RuntimeOwner",
        planned: PlannedModel,
        weights: Weights | None,
        *,
        update_work: Callable[[int, bool], Callable[[], None]],
        before_grad: Callable[[], None],
        method: Method | None,
        constants: Mapping[str, KeptConstants] | None,
        check_finite: bool = False,
    ):
        """`constants`: of coordinates, from the plan before. None: computed from the weights."""
        graph, layout, plan = planned.graph, planned.layout, planned.plan
        model, device, optimizer, state = engine.model, engine.device, engine.optimizer, engine.state
        self.planned, self.device = planned, device
        self.place = Placement(graph, layout, plan.decision, plan.step_config, plan.work, plan.shared)
        self.store = Store(model, self.place, device, weights, check_finite=check_finite)
        try:
            coordinates = self.coordinates = CoordinateTraining(self.store, method, constants)
        except BaseException:
            self.store.release()
            raise
        self._buffers = [(b, b.data) for b in model.buffers()]
        for buffer, data in self._buffers:
            buffer.data = device.keep(data)
        tables, self._restore_tables = share_tables(model, device.keep)
        # Parameters of an added group are trained from the next re-plan on.
        group_of = {
            name: i
            for i, group in enumerate(optimizer.param_groups)
            for name in group["param_names"]
            if self.place.is_updated(layout.location[name][0])
        }
        self.updates = Updates(self.store, optimizer.rule, lambda: optimizer.param_groups, group_of)
        self._frozen = [(name, param) for name, param in self.store.params.items() if name not in group_of]
        # No closure here refers to `self`, so that device memory is freed with the last reference, not by the garbage
        # collector.
        me = weakref.ref(self)

        def add_work(chunk: int) -> Callable[[], None]:
            runtime = me()
            assert runtime is not None
            return runtime.gradients.add(chunk)

        schedule = compile_schedule(self.place)
        executor = self.executor = Executor(
            self.place,
            schedule,
            self.store,
            device,
            update_work=update_work,
            add_work=add_work,
            merge_work=coordinates.merge,
        )
        self.gradients = Gradients(self.store, list(group_of), lambda: executor.current_call, coordinates)
        self.access = ParameterAccess(
            self.store,
            self.gradients,
            pass_state=lambda: state.pass_state,
            drain=engine.drain_before_read,
            before_write=engine.finish_saving,
            before_grad=before_grad,
        )
        self.patches = Patches(
            model, self.store, drain=engine.drain_before_read, export=self.access.export, zero_grad=engine.zero_grad
        )
        self._guard = Guard(self.store)
        # If the engine is dropped without detach(), remove its dispatch mode.
        weakref.finalize(self.store, remove_mode, self._guard).atexit = False
        self._is_guarded = False
        # Under a dispatch mode, autograd sums the gradients of a parameter with several uses out of place. A plan that
        # was measured without a mode has no memory for that.
        adds_up = any(len(layout.chunks[chunk].calls) > 1 for chunk in self.place.updated)
        self._guards_backward = device.observes_by_mode or not adds_up
        self._arm_guard()
        resident = (*self.store.gpu.values(), *(b.data for b in model.buffers()), *tables)
        static = {t.untyped_storage().data_ptr() for t in resident}
        self.is_static: Callable[[Tensor], bool] = lambda t: t.untyped_storage().data_ptr() in static
        self.path = CallPath(self.place, self.store.params)
        if planned.loss is not None:
            planned.loss.attach()
        self._tiling = Tiling(model, plan.tile_tokens, plan.tiled)
        self._tiling.attach()
        self.access.end_pass()

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def unfrozen(self) -> list[str]:
        """Parameters that require grad now and did not when the plan was made."""
        with without_torch_function():
            return [name for name, param in self._frozen if param.requires_grad]

    def guard_new_path(self) -> None:
        """Guard the rest of the step, like the first step, if the forward takes a new path."""
        if self.path.is_new and not self._is_guarded:
            self._arm_guard()
            self.begin_forward()
        self.path.is_new = False

    def _arm_guard(self) -> None:
        self._is_guarded = True
        if self._guards_backward:
            push_mode(self._guard)

    def begin_forward(self) -> None:
        """Guard the forward, if backwards are not guarded."""
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
        """Make the model a plain one on the CPU again; without `keep`, an unmaterialized one."""
        self.drop_guard()
        self.access.release()
        self._tiling.detach()
        if self.planned.loss is not None:
            self.planned.loss.detach()
        self.patches.undo()
        self.gradients.detach()
        self.store.release(keep=keep)
        self._restore_tables()
        for buffer, data in self._buffers:
            buffer.data = data if torch.equal(data, buffer.data.to(data.device)) else data.copy_(buffer.data)


class RuntimeOwner(Protocol):
    """The part of an engine that its components use. Components that outlive a plan read `runtime` at each use."""

    model: nn.Module
    device: Device
    optimizer: EngineOptimizer
    state: StateMachine

    @property
    def runtime(self) -> PlanRuntime: ...
    def drain(self) -> None: ...
    def drain_before_read(self) -> None: ...
    def finish_saving(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
