"""Engine: what a user holds of a prepared model.

`attach` turns a plain model into a prepared one under a plan, `release` turns it back; a re-plan is one after the
other, with the optimizer's state and pending gradients carried over by parameter name.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
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
from outsize.model.batch import Call, arguments_of, fits, positional_names
from outsize.model.discover import Layer
from outsize.model.graph import BlockGraph
from outsize.model.tensors import named_tensors
from outsize.model.weights import Weights, convert, is_finite
from outsize.optim.spec import OptimizerSpec
from outsize.runtime import process_hooks
from outsize.runtime.executor import Stage
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.plan_runtime import PlannedModel, PlanRuntime, RuntimeHolder
from outsize.runtime.report import StepReport
from outsize.runtime.retry import with_retries
from outsize.runtime.steps import Steps
from outsize.runtime.training_hooks import TrainingHooks
from outsize.schedule.plan import Plan, StepConfig

T = TypeVar("T")
PlanFunction = Callable[[nn.Module, Any, StepConfig], PlannedModel]
"""Plans a model for a batch: profile, search, check. `setup/planner.py` provides it, so that runtime does not import
the planner.
"""


class Engine:
    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        planned: PlannedModel,
        *,
        device: Device,
        optimizer: OptimizerSpec,
        planner: PlanFunction,
        weights: Weights | None = None,
        given_dtypes: Mapping[str, torch.dtype] | None = None,
        takes_all_memory: bool = False,
    ):
        """`weights`: where the values of unmaterialized parameters are read from, once, into their homes.
        `given_dtypes`: see `detach`. `takes_all_memory`: no gpu_memory was given."""
        self.given_dtypes = dict(given_dtypes or {})
        """Of parameters that are trained in another dtype than the model came with, by name."""
        self.model, self.device, self.takes_all_memory = model, device, takes_all_memory
        self.optimizer = EngineOptimizer(self, optimizer.param_groups(model.named_parameters()), optimizer)
        self.optimizer.close_groups()
        self._planner = planner
        self._names = positional_names(model)
        self._holder = RuntimeHolder()
        self._steps = Steps(optimizer, self._holder, self.drain)
        self._hooks = TrainingHooks(
            model, layers, device, self._holder, self._steps, fit=self._fit, beside=lambda: self._calibration.reset()
        )
        self._checkpoints = Checkpoints()
        self._started = time.perf_counter()
        # An engine that is dropped without detach() frees its memory, and the device takes back its budget.
        weakref.finalize(self, device.forget, id(self)).atexit = False
        weakref.finalize(self, process_hooks.uninstall).atexit = False
        self._attach(planned, weights, check_finite=True)

    # Life.

    def _attach(self, planned: PlannedModel, weights: Weights | None = None, *, check_finite: bool = False) -> None:
        self.device.open(id(self), planned.plan.gpu_budget_bytes)
        try:
            self._holder.attached = PlanRuntime(
                planned,
                self.model,
                self.device,
                self.optimizer,
                weights,
                update_chunk=self._steps.update_work,
                drain=self._drain_before_read,
                before_write=self.finish_saving,
                before_grad=self._steps.before_grad_access,
                zero_grad=self.zero_grad,
                check_finite=check_finite,
            )
        except BaseException:
            self.device.close(id(self))
            raise
        self.runtime.updates.wait_written = self._checkpoints.wait_written
        executor = self.runtime.executor
        self._calibration = StepCalibration(
            self.plan, executor.place, executor.schedule, self.device, sees_calls=executor.sees_calls
        )
        self._hooks.attach()
        process_hooks.install(self)

    def _release(self) -> dict[str, dict[str, Tensor]]:
        """Back to a plain model; returns the optimizer's state by parameter name. What lived on the host is handed
        over, not copied.
        """
        self.finish_saving()
        self.drain()
        self._calibration.end()
        with self.device.on_host():
            state = {name: self.runtime.updates.state_to_keep(name) for name in self.runtime.updates.steps}
        process_hooks.uninstall(self)
        self._hooks.detach()
        self.runtime.release()
        self._holder.attached = None
        self.device.close(id(self))
        return state

    def detach(self, *, as_trained: bool = False) -> dict[str, Any]:
        """End the engine: the model is a plain one on the CPU again. Returns the optimizer's state dict. A save in the
        background is waited for.

        Parameters have the dtypes that they came with: what came in fp16 was trained in fp32 and is rounded once, here.
        With `as_trained` they stay in fp32.
        """
        self._require_idle("detach")
        self._steps.require_confirmed("detach() was called")
        self._steps.warn_if_spoilt()
        saved = self.optimizer.state_dict()
        by_name = self._release()
        saved["state"] = {i: by_name[name] for i, name in enumerate(self.optimizer.names) if i in saved["state"]}
        if self.given_dtypes and not as_trained:
            log.info(
                "%d trained parameters are rounded from fp32 to fp16, as the model came; detach(as_trained=True) "
                "keeps fp32",
                len(self.given_dtypes),
            )
            convert(self.model, self.given_dtypes)
            if lost := [
                name
                for name, param in self.model.named_parameters()
                if name in self.given_dtypes and not is_finite(param)
            ]:
                log.warning(
                    "%s: %d of the parameters have values beyond the range of fp16, which are infinite now",
                    lost[0],
                    len(lost),
                )
        return saved

    def give_way(self, reason: str) -> None:
        """End the engine for another one: the model is a plain one with its trained weights, what was under way is
        dropped. `reason` is for errors.
        """
        self.forget_pass()
        self._steps.abandon()
        self._release()
        self._holder.ended = reason

    def close(self) -> None:
        """End the engine without giving the model back: its parameters are unmaterialized after this, and all memory is
        free. For the end of a run.
        """
        try:
            self.finish_saving()
            self.drain()
        finally:
            self._calibration.end()
            if self.runtime.executor.stage is not Stage.IDLE:
                self._hooks.roll_back()
            process_hooks.uninstall(self)
            self._hooks.detach()
            self.runtime.release(keep=False)
            convert(self.model, self.given_dtypes)
            self._holder.attached = None
            self.device.close(id(self))

    @property
    def runtime(self) -> PlanRuntime:
        """Everything that exists under the present plan."""
        return self._holder.runtime

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def graph(self) -> BlockGraph:
        return self.runtime.planned.graph

    @property
    def layout(self) -> ChunkLayout:
        return self.runtime.planned.layout

    # Steps. `engine.optimizer` is their usual door.

    def last_backward(self) -> AbstractContextManager[None]:
        """Declare that the backward inside is followed by `step()`: chunks may be updated as soon as their gradient has
        accumulated.
        """
        return self._steps.last_backward()

    def step(self) -> None:
        self._checkpoints.raise_if_failed()
        self._hooks.end_forward()
        self._steps.require_usable()
        self._steps.require_whole("step")
        self._require_idle("step")
        self.optimizer.spec.require_valid_groups(self.optimizer.param_groups)
        self.runtime.access.apply_user_writes()
        self._steps.step()
        if not self.device.keeps_guard and os.environ.get("OUTSIZE_GUARD") != "1":
            self.runtime.drop_guard()
        self._calibration.step_made(self.num_steps)

    def retrying(self, work: Callable[[], T], batch: Any) -> T:
        """Run a forward with `batch` and its backward; if device memory runs out, plan again and make it again, to the
        same bits. Twice at most.

        It raises, and says what to do, where that cannot be: in the backward of a second micro-batch, and once updates
        in backward have begun. `work` is not kept for later micro-batches: a closure in a loop would make the wrong
        batch again.
        """
        return with_retries(self, work, batch)

    @property
    def is_half_updated(self) -> bool:
        """A declared backward broke off after it had updated some weights."""
        return self._steps.is_half_updated

    def backward_failed(self) -> None:
        """A backward raised: if it was this model's, roll it back, so that what is read next is right."""
        if self._holder.attached is not None and self.runtime.executor.stage is Stage.BACKWARD:
            self._hooks.check_profile()
            self._hooks.roll_back()

    def forget_pass(self) -> None:
        """Roll back a pass that broke off. Weights and optimizer are as before it; sums of gradients are not, if its
        backward had begun.
        """
        if self.runtime.executor.stage is not Stage.IDLE:
            self._hooks.roll_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard pending gradients, or make them zero. Never waits."""
        if self.runtime.executor.stage is Stage.BACKWARD:
            self._hooks.roll_back()
        self._steps.require_confirmed("zero_grad() was called")
        self._steps.forget_clipping()
        self.runtime.gradients.discard(to_zero=not set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the coming step's gradients, as torch.nn.utils.clip_grad_norm_ does for a plain model. Returns
        the norm.
        """
        self._hooks.end_forward()
        self._steps.require_whole("clip_grad_norm_")
        return self._steps.clip(max_norm)

    @property
    def grad_norm(self) -> Tensor:
        """The global gradient norm of the last step, before clipping: a float64 scalar on the device. No
        synchronisation.
        """
        return self.runtime.gradients.total.detach().clone()

    @property
    def num_steps(self) -> int:
        return self._steps.num_made

    @property
    def num_skipped(self) -> int:
        return self._steps.num_skipped

    def report(self) -> StepReport:
        """Where a run stands. Never waits; steps that were timed are in it once the device is done with them."""
        self._calibration.poll()
        seconds = time.perf_counter() - self._started
        return StepReport.of(
            self.plan,
            self.device,
            self._calibration.timing,
            num_steps=self.num_steps,
            seconds=seconds,
            slow_kernels=self.runtime.updates.slow_kernels(),
        )

    # Reading and writing.

    def drain(self) -> None:
        """Until everything issued is done; what is read after this is the sequential algorithm's."""
        try:
            self.device.synchronize()
        finally:
            self._calibration.reset()

    def _drain_before_read(self) -> None:
        self.drain()
        self._steps.warn_if_spoilt()

    @contextmanager
    def gathered(self, *names: str) -> Iterator[dict[str, Tensor]]:
        """Values of parameters (all by default) as ordinary CPU tensors; what is changed in them is written back."""
        self._require_idle("gathered")
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
        # An update that failed is no reason not to load: that is what its error asks for.
        with suppress(UpdateFailed):
            self.drain()
        self.runtime.executor.drained()

    def state_was_loaded(self) -> None:
        """The optimizer's state was loaded: a run that broke off in an update may go on from it. Load the weights
        first.
        """
        self.runtime.gradients.discard()
        self._steps.state_was_loaded()

    def _require_idle(self, verb: str) -> None:
        stage = self._hooks.end_forward()
        if stage is not Stage.IDLE:
            raise EngineMisuse(
                f"{verb} is only possible between steps, and the engine is {stage.value}. Finish the backward first, "
                "or drop its outputs."
            )

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
        """Write a checkpoint: the model's files as `save_pretrained` lays them out, and the optimizer's state. It is
        there whole, or not at all.

        Weights are written in the dtype that they are trained in: fp32 where they came in fp16.

        Args:
            folder: does not exist yet, unless `replace`.
            background: return as soon as what lives on the device is written; the rest follows while training goes on.
            `finish_saving` waits.
            only_model: leave the optimizer's state out; one cannot go on from it.
            extra: writes more files into the folder before it is published.
            then: called when it is published, perhaps from another thread.
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
        """Until a save in the background is complete. Raises SaveFailed if it is not; what was saved before is then as
        it was.
        """
        self._checkpoints.finish()

    def load(self, folder: str | Path, *, only_model: bool = False) -> None:
        """Weights, optimizer state and settings of a checkpoint, saved under whatever plan. A checkpoint that does not
        fit changes nothing.

        Args:
            only_model: take the weights alone; optimizer state and settings stay as they are.
        """
        self._drain_before_load()
        self._require_idle("load")
        self.finish_saving()
        num_steps = self._checkpoints.load(Path(folder), self._trained_model(), only_model=only_model)
        if not only_model:
            self._steps.num_made = num_steps
            self.state_was_loaded()

    def export(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """A plain Hugging Face folder (of a PEFT model: its adapter), for `from_pretrained`. Streamed: no copy of the
        model is made. Dtypes as in `save`.
        """
        self._require_saveable("export")
        with self.runtime.patches.caches_as_given():
            self._checkpoints.export(Path(folder), self._trained_model(), tokenizer=tokenizer)

    def _trained_model(self) -> TrainedModel:
        now, groups = self.runtime, self.optimizer.param_groups
        return TrainedModel(self.model, now.store, now.updates.steps, groups, now.plan.loss_chunk)

    def _require_saveable(self, verb: str) -> None:
        self._require_idle(verb)
        self._steps.require_usable()
        self._steps.require_whole(verb)
        self._steps.require_confirmed(f"{verb}() was called")
        if self.runtime.gradients.waiting:
            raise EngineMisuse(
                f"{verb}() is only possible between steps, and gradients have accumulated since the last one. Call it "
                "after step(), or drop the gradients with zero_grad()."
            )
        self.finish_saving()
        self.drain()

    def name_of(self, param: nn.Parameter) -> str | None:
        return next((name for name, own in self.runtime.store.params.items() if own is param), None)

    # Another batch than planned, or other parameters.

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Re-plan before a batch that the plan does not hold for (see [Note: When a batch fits] in model/batch.py), and
        when parameters were unfrozen.
        """
        call = Call(args, kwargs)
        arguments = arguments_of(call, self._names)
        _require_nonempty(arguments)
        unfrozen = self.runtime.unfrozen()
        if unfrozen:
            self._require_trainable(unfrozen)
            log.info("%s and %d more parameters were unfrozen: planning again", unfrozen[0], len(unfrozen) - 1)
            self.replan(call, self.plan.step_config)
        elif not fits(self.runtime.planned.signatures(self._names), arguments):
            shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(arguments)}
            log.info("the plan for %s does not hold for a batch of %s: planning again", self.plan.inputs, shapes)
            self.replan(call, self.plan.step_config)

    def _require_trainable(self, names: list[str]) -> None:
        for name in names:
            if self.graph.param[name].dtype not in ("bfloat16", "float32"):
                raise EngineMisuse(
                    f"{name} was unfrozen, but it is {self.graph.param[name].dtype}, which is trained in float32: its "
                    "dtype must change. "
                    "Call engine.detach() and prepare the model again."
                )

    def replan(self, batch: Any, step_config: StepConfig) -> None:
        """Plan again for a batch, or a call of the model, and go on from the same state. If nothing fits, the old plan
        stays and PlanInfeasible says so.
        """
        self._require_idle("replan")
        old = self.runtime.planned
        self.drain()
        gradients = self.runtime.gradients
        self._steps.apply_clipping()
        gradients.make_zeros()
        gradients.pull_assigned()
        with self.device.on_host():
            pending = {name: gradients.pending(name).detach().cpu().clone() for name in gradients.accumulated}
            total, was = (
                gradients.total.detach().cpu().clone(),
                (gradients.broken, gradients.is_applied, gradients.is_consumed),
            )
        state = self._release()
        planned = old
        with _requiring_grad(self.model, set(self.optimizer.names)):
            try:
                made = self._planner(self.model, batch, step_config)
                self.optimizer.join_groups(self.model.named_parameters())
                planned = made
            finally:
                self._attach(planned)
                for name, values in state.items():
                    self.runtime.updates.load_state(name, values)
                self.runtime.gradients.restore(pending)
                self.runtime.gradients.total.copy_(total)
                self.runtime.gradients.broken, self.runtime.gradients.is_applied, self.runtime.gradients.is_consumed = (
                    was
                )


@contextmanager
def _requiring_grad(model: nn.Module, names: set[str]) -> Iterator[None]:
    """What the optimizer has state of stays in the plan, though it may be frozen now."""
    frozen = [param for name, param in model.named_parameters() if name in names and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def _require_nonempty(arguments: dict[str, Any]) -> None:
    """Models break off in many ways at a batch of nothing. Beside text, anything may be missing: the boxes of a page,
    the images of a row.
    """
    given = {name: tensor for name, tensor in named_tensors(arguments) if tensor.dim()}
    batch = {"input_ids": given["input_ids"]} if "input_ids" in given else given
    if batch and not any(tensor.numel() for tensor in batch.values()):
        found = "; ".join(
            f"{f'argument {name}' if name.isdigit() else name} is {' × '.join(map(str, tensor.shape))}"
            for name, tensor in batch.items()
        )
        raise EngineMisuse(
            f"The batch is empty: {found}. Skip empty batches; check the dataset and the collator, which made this one."
        )
