"""PlanRuntime: everything that exists under one plan, so that nothing of an old plan can live on in a new one."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse, OrderMismatch, tell
from outsize.compat import without_torch_function
from outsize.device.device import Device
from outsize.device.observer import push_mode, remove_mode
from outsize.layout.chunks import ChunkLayout
from outsize.model.batch import Measured, Signature, of_unknown_kind
from outsize.model.graph import BlockGraph
from outsize.model.weights import Weights
from outsize.plan.placement import Placement
from outsize.plan.plan import Plan
from outsize.plan.schedule import compile_schedule
from outsize.runtime.access import ParameterAccess
from outsize.runtime.executor import Executor
from outsize.runtime.gradients import Gradients
from outsize.runtime.guard import Guard
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.patches import Patches
from outsize.runtime.store import Store
from outsize.runtime.updates import Updates


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
            if graph.param[name].trainable
        }
        self.updates = Updates(self.store, lambda: optimizer.param_groups, group_of)
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
        adds_up = any(chunk.trainable and len(chunk.calls) > 1 for chunk in layout.chunks)
        self._guards_backward = device.observes_by_mode or not adds_up
        self._arm_guard()
        static = {
            t.untyped_storage().data_ptr() for t in (*self.store.gpu.values(), *(b.data for b in model.buffers()))
        }
        self.is_static: Callable[[Tensor], bool] = lambda t: t.untyped_storage().data_ptr() in static
        self._chunks_of = {graph.call_name(v): layout.used_by(v) for v in range(len(graph.calls))}
        self._calls_of: dict[str, list[int]] = {}
        for call in range(len(graph.calls)):
            self._calls_of.setdefault(graph.call_name(call), []).append(call)
        self._jumps: set[tuple[int, int]] = set()
        """From which call to which forwards have gone that left out what is between."""
        self._readers: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """By id of a module: the calls that read all of its own parameters that are read at all, and those that read
        any.
        """
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

    def layer_chunks(self, name: str) -> tuple[int, ...]:
        return self._chunks_of.get(name, ())

    def region_chunks(self, call: int) -> tuple[int, ...]:
        """For forwards that the schedule does not know, and that may be elsewhere."""
        return self.planned.layout.used_by(call) if call < len(self.planned.graph.calls) else ()

    def next_call(self, layer: str, after: int) -> int:
        """The plan's next call of a layer: what lies between is left out of this forward. Without one, the next call at
        all, which is another layer's.
        """
        return self._jumps_to(after, next((call for call in self._calls_of.get(layer, ()) if call > after), after + 1))

    def free_call(self, layer: str, after: int) -> int:
        """The same in a forward without grad, which may take any way but past the beginning of a region that nobody
        sees begin.
        """
        calls = self._calls_of.get(layer, ())
        call = next((call for call in calls if call > after), None)
        if call is None:
            return calls[0] if calls else after + 1
        self.require_seen(after, call)
        return call

    def require_seen(self, after: int, before: int) -> None:
        """That nothing is between two calls that reads weights outside of the modules that have them: it may have read
        them where they were not.
        """
        graph = self.planned.graph
        if passed := [call for call in graph.reads_outside_module if after < call < before]:
            wanted = (
                f"{graph.call_name(passed[0])}, where weights are read outside of their modules, comes after "
                f"{graph.call_name(passed[0] - 1)}"
            )
            do = "Leave neither out, or read the weights inside of the forward of their module"
            raise OrderMismatch(tell(wanted, "a forward without grad left one of these out", do))

    def reading_call(self, module: nn.Module, call: int) -> int:
        """Where the plan has this module, from a call on: later where a region's way in, the last layer of a list, was
        left out.
        """
        if id(module) not in self._readers:
            own = {id(param) for param in module._parameters.values()}
            users = [
                frozenset(self.planned.graph.users[name])
                for name, param in self.store.params.items()
                if id(param) in own
            ]
            used = [calls for calls in users if calls]
            self._readers[id(module)] = (
                (frozenset.intersection(*used), frozenset.union(*used)) if used else (frozenset(), frozenset())
            )
        common, any_of_it = self._readers[id(module)]
        if call in common:
            return call
        if not any_of_it or max(any_of_it) < call:  # the trial run did not see it read anything here
            self._guard_now()
        return self._jumps_to(call, min((reader for reader in common if reader > call), default=call))

    def _jumps_to(self, start: int, end: int) -> int:
        """The first time that blocks are left out, the rest of the step is guarded as the first step was: it is a way
        that nobody has seen.
        """
        if end > start + 1 and (start, end) not in self._jumps:
            self._jumps.add((start, end))
            self._guard_now()
        return end

    def _guard_now(self) -> None:
        """In the middle of a forward, until the step is made."""
        if not self._is_guarded:
            self._arm_guard()
            self.begin_forward()

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
