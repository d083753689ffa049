"""Engine: the user's handle of a prepared model.

`_attach` makes a plain model a prepared one under a plan, `_release` makes it plain again. A re-plan does one after the
other and carries over the optimizer's state and pending gradients by parameter name.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse, UpdateFailed
from outsize.base.log import log
from outsize.calibration.steps import StepCalibration
from outsize.checkpoint.checkpoints import Checkpoints
from outsize.checkpoint.parameter_store import TrainedModel
from outsize.device.device import Device
from outsize.layout.chunks import ChunkLayout
from outsize.model.batch import ModelCall, positional_names
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.model.weights import Weights, convert, is_finite
from outsize.optim.method import Method
from outsize.optim.spec import OptimizerSpec
from outsize.runtime import process_hooks
from outsize.runtime.coordinates import KeptConstants
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.plan_runtime import PlannedModel, PlanRuntime
from outsize.runtime.replan import CarriedGradients, needs_new_plan, requiring_grad
from outsize.runtime.report import StepReport
from outsize.runtime.retry import with_retries
from outsize.runtime.state import EngineState, StateMachine
from outsize.runtime.steps import Steps
from outsize.runtime.training_hooks import TrainingHooks
from outsize.schedule.plan import Plan, StepConfig

T = TypeVar("T")
PlanFunction = Callable[[nn.Module, Any, StepConfig], PlannedModel]
"""Profiles and plans a model for a batch. `setup/planner.py` provides it: runtime does not import the planner."""


class Engine:
    """A prepared model's memory, steps and files. `optimizer` is its torch optimizer."""

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        planned: PlannedModel,
        *,
        device: Device,
        optimizer: OptimizerSpec,
        planner: PlanFunction,
        method: Method | None = None,
        weights: Weights | None = None,
        given_dtypes: Mapping[str, torch.dtype] | None = None,
        takes_all_memory: bool = False,
        frozen: Iterable[str] = (),
    ):
        """`weights`: the files of unmaterialized parameters, read once into their homes. `given_dtypes`: the original
        dtypes, by name, of parameters that are trained in another one. `takes_all_memory`: no gpu_memory was given.
        `frozen`: parameters that the method has frozen, for as long as the engine exists."""
        self.given_dtypes = dict(given_dtypes or {})
        self.model, self.device, self.takes_all_memory = model, device, takes_all_memory
        self.optimizer = EngineOptimizer(self, optimizer.param_groups(model.named_parameters()), optimizer)
        self.optimizer.close_groups()
        self._planner, self._method, self._frozen = planner, method, tuple(frozen)
        self._names = positional_names(model)
        self._runtime: PlanRuntime | None = None
        self.state = StateMachine()
        self._steps = Steps(optimizer, self)
        self._hooks = TrainingHooks(
            self, layers, self._steps, fit=self._fit, before_evaluation=lambda: self._calibration.reset()
        )
        self._checkpoints = Checkpoints()
        self._started = time.perf_counter()
        # An engine that is dropped without detach() frees its memory and its budget.
        weakref.finalize(self, device.forget, id(self)).atexit = False
        weakref.finalize(self, process_hooks.uninstall).atexit = False
        self._attach(planned, weights, check_finite=True)

    # Attaching and detaching.

    def _attach(
        self,
        planned: PlannedModel,
        weights: Weights | None = None,
        *,
        constants: Mapping[str, KeptConstants] | None = None,
        check_finite: bool = False,
    ) -> None:
        self.device.open(id(self), planned.plan.gpu_budget_bytes)
        try:
            self._runtime = PlanRuntime(
                self,
                planned,
                weights,
                update_work=self._steps.update_work,
                before_grad=self._steps.before_grad_access,
                method=self._method,
                constants=constants,
                check_finite=check_finite,
            )
        except BaseException:
            self.device.close(id(self))
            raise
        self.state.attach()
        self.runtime.updates.wait_written = self._checkpoints.wait_written
        executor = self.runtime.executor
        self._calibration = StepCalibration(
            self.plan, executor.place, executor.schedule, self.device, sees_calls=executor.sees_calls
        )
        self._hooks.attach()
        process_hooks.install(self)

    def _release(self, reason: str = "it was detached") -> dict[str, dict[str, Tensor]]:
        """Make the model plain again. Returns the optimizer's state by parameter name; state on the host is not
        copied.
        """
        self.finish_saving()
        self.drain()
        self._calibration.end()
        with self.device.on_host():
            state = {name: self.runtime.updates.state_to_keep(name) for name in self.runtime.updates.steps}
        self._drop_runtime(reason)
        return state

    def _drop_runtime(self, reason: str, *, keep: bool = True) -> None:
        process_hooks.uninstall(self)
        self._hooks.detach()
        self.runtime.release(keep=keep)
        self.state.detach(reason)
        if not keep:
            convert(self.model, self.given_dtypes)
        self._runtime = None
        self.device.close(id(self))

    def detach(self, *, as_trained: bool = False) -> dict[str, Any]:
        """End the engine: the model is a plain one on the CPU again. Returns the optimizer's state dict. Waits for a
        background save.

        Parameters get their original dtypes: fp16 parameters, which are trained in fp32, are rounded once, here. With
        `as_trained` they stay in fp32.
        """
        self._hooks.require("detach")
        saved = self.optimizer.state_dict()
        by_name = self._release()
        self._unfreeze()
        saved["state"] = {i: by_name[name] for i, name in enumerate(self.optimizer.names) if i in saved["state"]}
        if self.given_dtypes and not as_trained:
            log.info("trained parameters are rounded from fp32 to fp16; detach(as_trained=True) keeps fp32")
            convert(self.model, self.given_dtypes)
            params = self.model.named_parameters()
            if lost := [name for name, param in params if name in self.given_dtypes and not is_finite(param)]:
                problem = "%s: %d of the parameters have values beyond the range of fp16, which are infinite now"
                log.warning(problem, lost[0], len(lost))
        return saved

    def end(self, reason: str) -> None:
        """End the engine for another one: the model is a plain one with its trained weights; an open pass is dropped.
        `reason`: for errors of later calls.
        """
        self.forget_pass()
        self._steps.restore()
        self._release(reason)
        self._unfreeze()

    def _unfreeze(self) -> None:
        """Let the parameters train that the method has frozen."""
        for name, param in self.model.named_parameters():
            if name in self._frozen:
                param.requires_grad_(True)

    def close(self) -> None:
        """End the engine and free all its memory. The model's parameters are unmaterialized after this."""
        try:
            self.finish_saving()
            self.drain()
        finally:
            self._calibration.end()
            self.forget_pass()
            self._drop_runtime("it was closed", keep=False)
            self._unfreeze()

    @property
    def runtime(self) -> PlanRuntime:
        """Everything that exists under the current plan."""
        if self._runtime is None:
            raise self.state.error(EngineState.DETACHED)
        return self._runtime

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def graph(self) -> BlockGraph:
        return self.runtime.planned.graph

    @property
    def layout(self) -> ChunkLayout:
        return self.runtime.planned.layout

    # Steps. Users call `engine.optimizer`, which calls these.

    def last_backward(self) -> AbstractContextManager[None]:
        """Declare that `step()` follows the backward inside, so that chunks are updated as soon as their gradients are
        complete.
        """
        return self._steps.last_backward()

    def step(self) -> None:
        self._checkpoints.raise_if_failed()
        self._hooks.require("step")
        self.optimizer.spec.require_valid_groups(self.optimizer.param_groups)
        self.runtime.access.apply_user_writes()
        self._steps.step()
        if not self.device.keeps_guard and os.environ.get("OUTSIZE_GUARD") != "1":
            self.runtime.drop_guard()
        self._calibration.step_made(self.num_steps)

    def retrying(self, work: Callable[[], T], batch: Any) -> T:
        """Run `work`, a forward with `batch` and its backward. If device memory runs out, re-plan and repeat it, to the
        same bits, at most twice. Raises if it cannot be repeated: in the backward of a second micro-batch, and once
        weights were updated in backward.
        """
        self._hooks.require("retrying")
        return with_retries(self, work, batch)

    @property
    def is_half_updated(self) -> bool:
        """A backward inside last_backward() failed after it had updated some weights."""
        return self.state.fault is EngineState.HALF_UPDATED

    def backward_failed(self) -> None:
        self._hooks.backward_failed()

    def forget_pass(self) -> None:
        """Roll back an open pass. Gradients are incomplete if its backward had begun."""
        self._hooks.roll_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard pending gradients, or make them zero. Does not synchronize."""
        self._hooks.require("zero_grad")
        self._steps.forget_clipping()
        self.state.discard_gradients()
        self.runtime.gradients.discard(to_zero=not set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of the coming step, like torch.nn.utils.clip_grad_norm_. Returns the norm."""
        self._hooks.require("clip_grad_norm_")
        return self._steps.clip(max_norm)

    @property
    def grad_norm(self) -> Tensor:
        """The global gradient norm of the last step, before clipping: a float64 scalar on the device."""
        return self.runtime.gradients.total.detach().clone()

    @property
    def num_steps(self) -> int:
        return self.state.num_steps

    @property
    def num_skipped(self) -> int:
        return self.state.num_skipped

    def report(self) -> StepReport:
        """Measurements of the run beside the plan's predictions. Does not synchronize: includes only the timed steps
        that the device has finished.
        """
        self._calibration.poll()
        seconds = time.perf_counter() - self._started
        return StepReport.of(self.runtime, self._calibration.timing, num_steps=self.num_steps, seconds=seconds)

    # Reading and writing.

    def drain(self) -> None:
        """Wait until all issued work is done. Memory then has the values of the sequential algorithm."""
        try:
            self.device.synchronize()
        finally:
            self._calibration.reset()

    def drain_before_read(self) -> None:
        """Wait as `drain` does, and warn if the last step used a gradient that is not finite."""
        self.drain()
        self._hooks.require("state_dict")

    @contextmanager
    def gathered(self, *names: str) -> Iterator[dict[str, Tensor]]:
        """Values of parameters (all by default) as ordinary CPU tensors. Changes are written back."""
        self._hooks.require("gathered")
        self.finish_saving()
        self.drain()
        store = self.runtime.store
        with torch.no_grad(), self.device.on_host():
            values = {name: store.value(name).cpu().clone() for name in names or store.params}
        given = {name: (value, value._version) for name, value in values.items()}
        yield values
        self.finish_saving()
        self.drain()
        with torch.no_grad(), self.device.on_host():
            written = {
                name: value
                for name, value in values.items()
                if given[name][0] is not value or given[name][1] != value._version
            }
            store.write({n: v for n, v in written.items() if not torch.equal(v, store.value(n).cpu())})

    def updated_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter's optimizer state: its own, or that of its coordinates."""
        return self.runtime.place.updated_shape(name)

    def constant_hashes(self) -> dict[str, list[str]]:
        """Hashes of the initial value and the constants of each weight that is trained in coordinates."""
        return {name: list(found) for name, found in self.runtime.coordinates.hashes().items()}

    def optimizer_state(self, name: str) -> dict[str, Tensor]:
        self.drain()
        return self.runtime.updates.state(name) if name in self.runtime.updates.steps else {"step": torch.tensor(0.0)}

    def load_optimizer_state(self, name: str, state: dict[str, Tensor]) -> None:
        self.finish_saving()
        self._drain_before_load()
        if name not in self.runtime.updates.steps:
            if float(state["step"]):
                raise EngineMisuse(
                    f"{name}: it was frozen when the model was prepared. Prepare the model with it unfrozen, then "
                    "load its optimizer state."
                )
            return
        missing = self.runtime.store.state_ranges(name).keys() - state.keys()
        if missing and float(state["step"]):
            raise EngineMisuse(
                f"{name}: its optimizer state lacks {', '.join(sorted(missing))}. Load a state that outsize saved."
            )
        self.runtime.updates.load_state(name, {**{key: torch.zeros(()) for key in missing}, **state})

    def _drain_before_load(self) -> None:
        # After a failed update, loading is the remedy.
        with suppress(UpdateFailed):
            self.drain()
        self.runtime.executor.lanes.reset()

    def merge_loaded(self) -> None:
        """Make weights from coordinates that were loaded with the optimizer's state."""
        if self.runtime.coordinates.names:
            self.runtime.executor.merge()
            self.drain()

    def state_was_loaded(self) -> None:
        """The optimizer's state was loaded, and the weights before it: training may continue after a failed update."""
        self.runtime.gradients.discard()
        self._steps.restore()

    # Saving and loading.

    def save(
        self,
        folder: str | Path,
        *,
        background: bool = False,
        replace: bool = False,
        only_model: bool = False,
        extra: Callable[[Path], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint: the model's files as `save_pretrained` lays them out, and the optimizer's state. The
        folder appears complete or not at all. Weights have the dtype of training: fp32 for a model that came in fp16.

        Args:
            folder: must not exist, unless `replace`.
            background: return once tensors on the device are written; a thread writes the rest during training.
                `finish_saving` waits for it.
            only_model: leave the optimizer's state out; training cannot be resumed from such a checkpoint.
            extra: writes more files into the folder before it is published.
            then: called when the folder is published, perhaps on another thread.
        """
        self._require_saveable("save")
        with self.runtime.patches.caches_as_given():
            self._checkpoints.save(
                Path(folder),
                self._trained_model(),
                num_steps=self.num_steps,
                background=background,
                replace=replace,
                only_model=only_model,
                extra=extra,
                then=then,
            )

    def finish_saving(self) -> None:
        """Wait for a background save. Raises SaveFailed if it failed; earlier checkpoints are then unchanged."""
        self._checkpoints.finish()

    def load(self, folder: str | Path, *, only_model: bool = False) -> None:
        """Load weights, optimizer state and settings of a checkpoint, which may come from any plan. A checkpoint of
        another model changes nothing.

        Args:
            only_model: load the weights alone.
        """
        self._drain_before_load()
        self._hooks.require("load")
        self.finish_saving()
        num_steps = self._checkpoints.load(Path(folder), self._trained_model(), only_model=only_model)
        if not only_model:
            self.state.num_steps = num_steps
            self.state_was_loaded()

    def export(self, folder: str | Path, *, tokenizer: Any = None, fp32: bool = False) -> None:
        """Write a plain Hugging Face folder (of a PEFT model: its adapter) for `from_pretrained`. Tensors are streamed,
        with dtypes as in `save`; with `fp32`, bf16 weights are written as their exact fp32 masters.
        """
        self._require_saveable("export")
        with self.runtime.patches.caches_as_given():
            self._checkpoints.export(Path(folder), self._trained_model(), tokenizer=tokenizer, fp32=fp32)

    def _trained_model(self) -> TrainedModel:
        runtime = self.runtime
        return TrainedModel(
            self.model,
            runtime.store,
            runtime.updates.steps,
            self.optimizer.param_groups,
            runtime.plan.loss_chunk,
            runtime.coordinates if runtime.coordinates.names else None,
        )

    def _require_saveable(self, verb: str) -> None:
        self._hooks.require(verb)
        if self.runtime.gradients.waiting:
            raise EngineMisuse(
                f"{verb}() is only possible between steps, and gradients have accumulated since the last one. Call it "
                "after step(), or drop the gradients with zero_grad()."
            )
        self.finish_saving()
        self.drain()

    def name_of(self, param: nn.Parameter) -> str | None:
        return next((name for name, own in self.runtime.store.params.items() if own is param), None)

    def next_task(self) -> None:
        """Begin another task with a method such as OSFT: the present weights become the initial ones, and the optimizer
        starts anew. Exact master weights of other parameters stay.
        """
        self._require_saveable("next_task")
        runtime = self.runtime
        if not runtime.coordinates.names:
            raise EngineMisuse("next_task: no method trains this model. Prepare it with method=outsize.OSFT(...).")
        runtime.coordinates.compute(then=lambda name: runtime.updates.reset([name]))
        runtime.updates.reset(runtime.updates.steps)
        self.state_was_loaded()

    # Re-planning.

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Re-plan before a batch that the plan does not hold for, and when parameters were unfrozen."""
        call = ModelCall(args, kwargs)
        if needs_new_plan(self.runtime, call, self._names):
            self.replan(call, self.plan.step_config)

    def replan(self, batch: Any, step_config: StepConfig) -> None:
        """Plan again for a batch, or a call of the model, and continue from the same state. Raises PlanInfeasible and
        keeps the old plan if no plan fits.
        """
        self._hooks.require("replan")
        planned = self.runtime.planned
        self.drain()
        self._steps.apply_clipping()
        gradients = CarriedGradients.of(self.runtime)
        with self.device.on_host():
            constants = self.runtime.coordinates.keep()
        state = self._release()
        with requiring_grad(self.model, set(self.optimizer.names)):
            try:
                new = self._planner(self.model, batch, step_config)
                self.optimizer.join_groups(self.model.named_parameters())
                planned = new
            finally:
                self._attach(planned, constants=constants)
                for name, values in state.items():
                    self.runtime.updates.load_state(name, values)
                gradients.restore(self.runtime)
