"""Engine: a prepared model. Listens to the model's course, drives the executor, and answers the user.

`attach` turns a plain model into a prepared one under a plan, `release` turns it back; a re-plan is one after the other with the optimizer's
state carried over by parameter name. Everything a plan allocates hangs on one `_Attached`, so nothing of an old plan can live on in a new one.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.parcel import Parcel
from outsize.activation.strategies import RUN, SENDS
from outsize.base.errors import EngineMisuse, OutsizeError, PlanInfeasible, UpdateFailed, tell
from outsize.base.log import log
from outsize.device.device import Device
from outsize.device.observer import push_mode, remove_mode
from outsize.layout.chunks import ChunkLayout
from outsize.model.course import Course
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.model.tensors import map_tensors, tensors_in, with_grad
from outsize.optim.clip import clip_factor
from outsize.plan.placement import Placement
from outsize.plan.plan import Plan, Terms
from outsize.plan.schedule import compile_schedule
from outsize.runtime.executor import Executor, Stage
from outsize.runtime.gradients import Gradients
from outsize.runtime.guard import Guard
from outsize.runtime.optimizer import AdamW, EngineOptimizer
from outsize.runtime.patches import Patches
from outsize.runtime.report import StepReport
from outsize.runtime.store import Store
from outsize.runtime.updates import Step, Updates


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it speaks of."""

    graph: BlockGraph
    layout: ChunkLayout
    plan: Plan


Planner = Callable[[nn.Module, Any, Terms], Planned]
"""Plans a model on the CPU for a batch: profile, search, check. Given by train/build.py; runtime and planner never meet."""


class _Attached:
    """Everything that exists under one plan."""

    def __init__(self, engine: "Engine", planned: Planned):
        graph, layout, plan = planned.graph, planned.layout, planned.plan
        device = engine.device
        self.planned = planned
        self.place = Placement(graph, layout, plan.decision, plan.terms, plan.work, plan.shared)
        device.open(plan.gpu_budget_bytes)
        self.buffers = [(b, b.data) for b in engine.model.buffers()]
        for buffer, data in self.buffers:
            buffer.data = device.keep(data)
        self.store = Store(engine.model, self.place, device)
        group_of = {name: i for i, group in enumerate(engine.optimizer.param_groups) for name in group["param_names"]}
        self.updates = Updates(self.store, lambda: engine.optimizer.param_groups, group_of)
        executor = self.executor = Executor(self.place, compile_schedule(self.place), self.store, device, update_chunk=engine._update_work)
        # No closure here refers to `self`: device memory must go when the engine lets go, not when the garbage collector comes.
        self.gradients = Gradients(self.store, engine.optimizer.names, lambda: executor.current_visit)
        self.patches = Patches(engine.model, self.store, drain=engine.drain, zero_grad=engine.zero_grad)
        self.guard: Guard | None = Guard(self.store)
        push_mode(self.guard)
        static = {t.untyped_storage().data_ptr() for t in (*self.store.gpu.values(), *(b.data for b in engine.model.buffers()))}
        self.is_static: Callable[[Tensor], bool] = lambda t: t.untyped_storage().data_ptr() in static
        self.region_after = _regions(graph, engine.layers)
        self.chunks_of = {graph.visit_name(v): layout.used_by(v) for v in range(len(graph.visits))}

    def drop_guard(self) -> None:
        if self.guard is not None:
            remove_mode(self.guard)
            self.guard = None

    def release(self, device: Device) -> None:
        """A plain model on the CPU again."""
        self.drop_guard()
        self.patches.undo()
        self.gradients.detach()
        self.store.move_out()
        for buffer, data in self.buffers:
            buffer.data = data.copy_(buffer.data) if data.device != buffer.device or data.data_ptr() != buffer.data_ptr() else data
        device.close()


def _regions(graph: BlockGraph, layers: tuple[Layer, ...]) -> dict[str | None, int]:
    """Which region follows a layer (None: the start), for forwards that the schedule does not know."""
    regions: dict[str | None, int] = {None: 0}
    for visit in range(1, len(graph.visits)):
        if graph.blocks[graph.visits[visit]].kind != "layer":
            regions.setdefault(graph.visit_name(visit - 1), visit)
    return regions


class Engine:
    def __init__(self, model: nn.Module, layers: tuple[Layer, ...], planned: Planned, *, device: Device, optimizer: AdamW, planner: Planner):
        self.model, self.layers, self.device = model, layers, device
        self._spec, self._planner = optimizer, planner
        self.optimizer = EngineOptimizer(self, optimizer.param_groups(model.named_parameters()), optimizer)
        self.optimizer.close_groups()
        self._course = Course(model, layers, self)
        self._declared = False
        """Inside `last_backward`: the coming backward updates as it goes."""
        self._stepping: dict[int, Step] = {}
        """Chunks updated by a declared backward, until `step()` confirms it."""
        self._step: Step | None = None
        self._clip_at = optimizer.max_grad_norm
        self._training = False
        self._forward_number = 0
        """Of the training forward that the next backward belongs to."""
        self._last_layer: str | None = None
        self._outputs: list[weakref.ref[Tensor]] = []
        self._autocast_cache = True
        self._updated_before_break = False
        self.num_steps = 0
        self.num_skipped = 0
        self._started = time.perf_counter()
        self._attached: _Attached | None = None
        self.attach(planned)

    # Life.

    def attach(self, planned: Planned) -> None:
        self.device.promised[id(self)] = planned.plan.gpu_budget_bytes
        self._attached = _Attached(self, planned)
        for module in self._loose_modules():
            self._loose.append(module.register_forward_pre_hook(self._loose_opens))
        self._course.attach()

    _loose: list[Any]

    def _loose_modules(self) -> Iterator[nn.Module]:
        """Modules outside layers that own weights. Called outside the model's forward (an encoder by itself), they open themselves."""
        self._loose = []
        inside = {id(m) for layer in self.layers for m in layer.module.modules()}
        return (m for m in self.model.modules() if id(m) not in inside and any(p is not None for p in m._parameters.values()))

    def _release(self) -> dict[str, dict[str, Tensor]]:
        """Back to a plain model; returns the optimizer's state by parameter name."""
        now = self.now
        self.drain()
        state = {name: {k: v.detach().cpu().clone() for k, v in now.updates.state(name).items()} for name in self.optimizer.names}
        self._course.detach()
        for handle in self._loose:
            handle.remove()
        now.release(self.device)
        self._attached = None
        self.device.promised.pop(id(self), None)
        return state

    def detach(self) -> dict[str, Any]:
        """End the engine: the model is a plain one on the CPU again. Returns the optimizer's state dict."""
        self._require_idle("detach")
        saved = self.optimizer.state_dict()
        saved["state"] = {i: {k: v.detach().cpu().clone() for k, v in s.items()} for i, s in saved["state"].items()}
        self._release()
        return saved

    @property
    def now(self) -> _Attached:
        if self._attached is None:
            raise EngineMisuse(tell("the engine holds its model", "it was detached", "Call outsize.prepare again"))
        return self._attached

    @property
    def plan(self) -> Plan:
        return self.now.planned.plan

    @property
    def graph(self) -> BlockGraph:
        return self.now.planned.graph

    @property
    def layout(self) -> ChunkLayout:
        return self.now.planned.layout

    # The model's course. See model/course.py for who calls these when.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        now = self.now
        for name in now.store.rebound():
            do = "Write values with load_state_dict or inside `with engine.gathered(name)`"
            raise EngineMisuse(tell(f"{name}.data is the view that prepare set", "somebody has replaced it", do))
        self._training = torch.is_grad_enabled() and any(p.requires_grad for p in now.store.params.values())
        self._last_layer = None
        if self._training:
            self._require_no_open_pass()
            self._fit(args, kwargs)
            now = self.now
        elif now.executor.stage in (Stage.FORWARD, Stage.BACKWARD):
            self._roll_back()
        self._autocast_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.device.watching(True)
        args, kwargs = map_tensors(self.device.put, args), map_tensors(self.device.put, kwargs)
        if self._training:
            self._forward_number = self._course.number
            now.executor.begin_forward()
        return args, kwargs

    def forward_enters(self, visit: int, layer: int | None) -> None:
        executor = self.now.executor
        if layer is not None and visit < 0:
            if torch.is_grad_enabled():
                name = self.layers[layer].name
                do = "Call the prepared model itself; for inference use torch.no_grad()"
                raise EngineMisuse(tell(f"{name} runs inside the model's forward when it is trained", "it was called by itself", do))
            executor.ensure(self.now.chunks_of.get(self.layers[layer].name, ()))
        elif self._training:
            executor.enter_forward(visit, self.layers[layer].name if layer is not None else None)
        elif layer is not None:
            self._last_layer = self.layers[layer].name
            executor.enter_unscheduled(self.now.chunks_of.get(self._last_layer, ()))
        else:
            region = self.now.region_after.get(self._last_layer)
            executor.enter_unscheduled(self.layout.used_by(region) if region is not None else ())

    def _loose_opens(self, module: nn.Module, args: Any) -> None:
        if self._course.is_open or torch.is_grad_enabled():
            return
        names = {id(p): name for name, p in self.now.store.params.items()}
        self.now.executor.ensure(tuple({self.layout.place[names[id(p)]][0] for p in module._parameters.values() if p is not None}))

    def runs(self, visit: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._training or visit < 0:
            return forward(*args, **kwargs)
        strategy = self.plan.decision.strategies[visit]
        parcel = self.now.executor.parcel(visit) if strategy in SENDS else Parcel()
        return RUN[strategy](forward, args, kwargs, parcel, self.now.is_static)

    def forward_ends(self, outputs: Any, *, failed: bool) -> None:
        torch.set_autocast_cache_enabled(self._autocast_cache)
        executor = self.now.executor
        try:
            if not self._training:
                executor.leave_unscheduled()
            elif failed:
                executor.roll_back()
            else:
                executor.end_forward()
                self._outputs = [weakref.ref(t) for t in with_grad(outputs)]
                if not self._outputs:
                    executor.roll_back()
        finally:
            self.device.watching(False)

    def backward_enters(self, visit: int, course: int) -> None:
        executor = self.now.executor
        if executor.stage is Stage.WAITING and course == self._forward_number:
            self.device.watching(True)
            executor.begin_backward(pending=bool(self.now.gradients.landed), update=self._begin_declared())
        elif executor.stage is not Stage.BACKWARD:
            name = self.graph.visit_name(visit)
            found = f"another one reaches {name}; its activations are gone"
            raise EngineMisuse(tell("one backward follows each forward of a prepared model", found, "Run the forward again; retain_graph is not supported"))
        if visit != executor.current_visit:
            executor.enter_backward(visit)

    def _begin_declared(self) -> bool:
        if not self._declared and not self.plan.terms.hold_gradients:
            do = "Wrap it in `with engine.last_backward():`, or prepare with accumulate=2 or AdamW(update='after_step')"
            raise EngineMisuse(tell("this plan keeps no gradients, so every backward is declared to be the last before step()", "this one is not", do))
        return self._declared

    def backward_ends(self) -> None:
        self.now.executor.end_backward()
        self.device.watching(False)

    # Steps.

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Declare that the backward inside is followed by `step()`: chunks are updated as soon as their gradient has landed."""
        if self._clip_at is not None or self._spec.nonfinite == "skip":
            return (yield)  # clipping and skipping need all gradients first: the step after it does the same work
        self._declared = True
        try:
            yield
        finally:
            self._declared = False

    def _update_work(self, chunk: int, in_backward: bool) -> Callable[[], None]:
        now = self.now
        if in_backward:
            now.gradients.check_finite(chunk)
            landed = {piece.name for piece in now.place.chunk(chunk).pieces} & now.gradients.landed
            self._stepping[chunk] = now.updates.plan_step(landed, 1.0)
        step = self._stepping[chunk] if in_backward else self._step
        assert step is not None

        def work() -> None:
            try:
                now.updates.update_chunk(chunk, step)
            except Exception as error:
                first, *rest = (piece.name for piece in now.place.chunk(chunk).pieces)
                found = f"chunk {chunk} ({first} and {len(rest)} more) failed with {type(error).__name__}: {error}"
                raise UpdateFailed(tell("every update completes", found, "Resume from the last checkpoint")) from None

        return work

    def step(self) -> None:
        now = self.now
        self._require_whole("step")
        total = now.gradients.norm()
        if self._stepping:
            for made in self._stepping.values():
                now.updates.count(made)
            self._stepping = {}
        elif now.gradients.landed:
            norm = float(total)
            if norm - norm != 0.0:  # inf or nan
                names = now.gradients.not_finite()
                error = now.gradients.error(names or sorted(now.gradients.landed))
                now.gradients.discard()
                if self._spec.nonfinite == "raise":
                    raise error
                self.num_skipped += 1
                log.warning("step %d skipped: %s", self.num_steps, error)
                return
            self._step = now.updates.plan_step(now.gradients.landed, clip_factor(norm, self._clip_at))
            now.updates.count(self._step)
            now.executor.update()
        now.gradients.discard()
        self._clip_at = self._spec.max_grad_norm
        self.num_steps += 1
        if now.guard is not None and self.device.kind == "cuda" and os.environ.get("OUTSIZE_GUARD") != "1":
            now.drop_guard()

    def zero_grad(self) -> None:
        """Discard pending gradients. Never waits."""
        if self._stepping:
            found = "zero_grad() was called before it"
            raise EngineMisuse(tell("a backward inside last_backward() is followed by step()", found, "Call step() first: the weights are already updated"))
        if self.now.executor.stage is Stage.BACKWARD:
            self._roll_back()
        self.now.gradients.discard()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the coming step's gradients, as torch.nn.utils.clip_grad_norm_ does for a plain model. Returns the norm."""
        self._require_whole("clip_grad_norm_")
        self._clip_at = max_norm
        return self.now.gradients.norm().clone()

    @property
    def grad_norm(self) -> Tensor:
        """The global gradient norm of the last step, before clipping: a float64 scalar on the device. No synchronisation."""
        return self.now.gradients.total.detach().clone()

    # Reading and writing.

    def drain(self) -> None:
        """Until everything issued is done; what is read after this is the sequential algorithm's."""
        self.device.synchronize()

    @contextmanager
    def gathered(self, *names: str) -> Iterator[dict[str, Tensor]]:
        """Values of parameters (all by default) as ordinary CPU tensors; what is changed in them is written back."""
        self._require_idle("gathered")
        self.drain()
        store = self.now.store
        with torch.no_grad(), self.device.on_host():
            before = {name: store.read(name).cpu() for name in names or store.params}
            values = {name: value.clone() for name, value in before.items()}
        yield values
        with torch.no_grad(), self.device.on_host():
            for name, value in values.items():
                if not torch.equal(value, store.read(name).cpu()):
                    store.write(name, value)

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        self.drain()
        return self.now.updates.state(name)

    def load_optimizer_state(self, name: str, state: dict[str, Tensor]) -> None:
        self.drain()
        missing = self.now.store.state_views(name).keys() - state.keys()
        if float(state["step"]) == 0:
            state = {"step": state["step"], **{key: torch.zeros(()) for key in missing}}
        elif missing:
            raise EngineMisuse(tell(f"the state of {name} has {', '.join(sorted(missing))}", "it is missing", "Load a state that outsize saved"))
        self.now.updates.load_state(name, state)

    def report(self) -> StepReport:
        return StepReport.of(self.plan, self.device, num_steps=self.num_steps, seconds=time.perf_counter() - self._started)

    # What is not allowed when.

    def _require_no_open_pass(self) -> None:
        now = self.now
        if self._stepping:
            raise EngineMisuse(tell("a backward inside last_backward() is followed by step()", "another forward began", "Call engine.optimizer.step() after it"))
        if now.executor.stage is Stage.WAITING and any(ref() is not None for ref in self._outputs):
            found = f"forward {self._course.number} begins before the backward of forward {self._forward_number}, whose outputs are still held"
            do = "Run backward first, or drop the outputs (`del out`); for evaluation use torch.no_grad()"
            raise EngineMisuse(tell("each training forward of a prepared model is followed by its backward", found, do))
        if now.executor.stage is not Stage.IDLE:
            self._roll_back()

    def _roll_back(self) -> None:
        now = self.now
        if now.executor.stage is Stage.BACKWARD:
            visit = now.executor.current_visit
            now.gradients.broken = self.graph.visit_name(visit) if visit is not None else "its first block"
            if self._stepping:
                self._stepping = {}
                self._updated_before_break = True
        now.executor.roll_back()
        self.device.watching(False)

    def _require_whole(self, verb: str) -> None:
        """No half-made gradients."""
        now = self.now
        if now.executor.stage is Stage.BACKWARD:
            self._roll_back()
        if self._updated_before_break:
            found = f"the backward broke off in {now.gradients.broken} after some weights were updated"
            raise EngineMisuse(tell(f"{verb}() follows a complete backward", found, "Resume from the last checkpoint"))
        if now.gradients.broken is not None:
            found = f"the last one broke off in {now.gradients.broken}"
            raise EngineMisuse(tell(f"{verb}() follows a complete backward", found, "Call zero_grad(); weights and optimizer are as before it"))
        self._require_idle(verb)

    def _require_idle(self, verb: str) -> None:
        executor = self.now.executor
        if executor.stage is Stage.WAITING and not any(ref() is not None for ref in self._outputs):
            executor.roll_back()
        if executor.stage is not Stage.IDLE:
            raise EngineMisuse(tell(f"{verb} comes between steps", f"the engine is {executor.stage.value}", "Finish the backward first, or drop its outputs"))

    # Another batch than planned.

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Re-plan before a batch that is larger than any planned for."""
        shapes = {**{str(i): t for i, t in enumerate(args)}, **kwargs}
        planned = self.plan.inputs
        sizes = {name: t.numel() for name, t in shapes.items() if isinstance(t, Tensor)}
        limit = {name: int(torch.Size(shape).numel()) for name, shape in planned.items()}
        if all(size <= limit.get(name, max(limit.values(), default=0)) for name, size in sizes.items()):
            return
        batch: Any = kwargs if not args else args
        log.info("batch %s is larger than the plan's %s: planning again", {n: tuple(shapes[n].shape) for n in sizes}, planned)
        self.replan(batch, self.plan.terms)

    def replan(self, batch: Any, terms: Terms) -> None:
        """Plan again for a batch and go on from the same state. If nothing fits, the old plan stays and PlanInfeasible says so."""
        self._require_idle("replan")
        old = self.now.planned
        pending = self._pending_gradients()
        total = self.now.gradients.total.detach().cpu().clone()
        state = self._release()
        try:
            planned = self._planner(self.model, batch, terms)
        except OutsizeError:
            self._restore(old, state, pending, total)
            raise
        self._restore(planned, state, pending, total)

    def _restore(self, planned: Planned, state: dict[str, dict[str, Tensor]], pending: dict[str, Tensor], total: Tensor) -> None:
        self.attach(planned)
        for name, values in state.items():
            self.now.updates.load_state(name, values)
        self.now.gradients.restore(pending)
        self.now.gradients.total.copy_(total)

    def _pending_gradients(self) -> dict[str, Tensor]:
        self.drain()
        with torch.no_grad(), self.device.on_host():
            return {name: self.now.gradients.pending(name).detach().cpu().clone() for name in self.now.gradients.landed}
