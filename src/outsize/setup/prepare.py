"""Wires the rooms in the order of the design: model, profile, layout, plan, engine. `prepare` and `plan` of the public
interface.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported, OutsizeError, PlanInfeasible, tell
from outsize.base.log import log
from outsize.base.units import exact_bytes, is_count, parse_bytes, show_bytes
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.device.rng import host_rng_untouched
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.host import free_host_bytes
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES, pack
from outsize.loss.chunked_loss import ChosenLoss, trace_with_loss
from outsize.model.batch import (
    Call,
    Measured,
    Signature,
    arguments_of,
    as_call,
    cannot_be_called,
    positional_names,
    signature,
)
from outsize.model.discover import Layer, find_layers
from outsize.model.tensors import tensors_in
from outsize.model.weights import FileWeights, Weights, convert, is_unmaterialized, unmaterialize
from outsize.plan.check import check, load
from outsize.plan.pins import Pins
from outsize.plan.placement import Placement
from outsize.plan.plan import Plan, StepConfig
from outsize.planner.search import search
from outsize.profile.cache import traced
from outsize.profile.calling import Loss
from outsize.runtime.access import owner_of
from outsize.runtime.engine import Engine, PlannedModel, Planner
from outsize.runtime.optimizer import AdamW
from outsize.runtime.process_hooks import attached_engines
from outsize.setup.aliases import require_own_memory
from outsize.setup.batches import detached, num_rows, pad_to_shape, require_nonempty
from outsize.setup.budgeted_profile import profile_within_budget
from outsize.setup.micro_batch import Choice, Split, Traced, fastest
from outsize.setup.plain_tensors import require_plain_tensors
from outsize.setup.planned_batches import PlannedBatches, recording, reserving


@host_rng_untouched()
def prepare(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: AdamW | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    device: str | Device | None = None,
    blocks: Sequence[str] | None = None,
    accumulate: int = 1,
    max_shape: tuple[int, int] | None = None,
    pins: Pins | None = None,
    plan: "Plan | str | Path | None" = None,
    chunk_bytes: str | int = DEFAULT_CHUNK_BYTES,
    weights: "str | Path | Weights | None" = None,
    loss: Loss | None = None,
    chunked_loss: bool | None = None,
) -> Engine:
    """Make a model trainable under a memory budget. The model stays the user's; its training bits do not change, but
    for `chunked_loss` and fp16.

    Trainable fp16 weights are trained in fp32, which holds their values exactly; `engine.detach()` rounds them back.
    Frozen ones stay fp16.

    Args:
        model: an nn.Module on the CPU; or on meta, with `weights`.
        batch: one real batch: a mapping for `model(**batch)`, a tuple or list for `model(*batch)`. Where the forward
            cannot be called so, and for anything else (a tensor, a dataclass), `model(batch)`. Inputs may be nested. A
            batch that costs more than the measured ones re-plans.
        optimizer: settings of the optimizer; `engine.optimizer` is the torch optimizer made of them.
        gpu_memory: most device memory to use, such as "24GiB", CUDA context included. Default: what is free.
        host_memory: most host memory to use. Default: what is free within the container's limit, less a tenth.
        device: "cuda", "cpu", "sim:<catalog name, .yaml file or size>". Default: the GPU if there is one.
        blocks: paths of the lists of layers, where discovery should not choose. An empty list: the model is one block.
        accumulate: backward passes per step the plan is made for. A hint: any loop stays correct.
        max_shape: (batch, tokens) of the largest batch; the plan is made for it. A larger one re-plans.
        pins: parts of the plan to fix.
        plan: a whole plan (or its file) to use as it is.
        chunk_bytes: upper bound of a chunk.
        weights: a folder of safetensors from which the weights of a model on meta are read, straight to where they
        live.
        loss: `loss(model, batch)`, where the loop makes its own out of the model's outputs: what that takes is then
        part of the plan.
        chunked_loss: make the model's own loss in chunks of tokens, never all logits at once; `outputs.logits` is not
        there in training then.
            Default: where the batch is larger than a chunk, the model allows it and `loss` is left out; the plan says
            which. False: never. True: or refuse.
    """
    _end_earlier_engine(model)
    ready = _get_ready(
        model,
        optimizer=optimizer or AdamW(),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        device=device,
        blocks=blocks,
        accumulate=accumulate,
        max_shape=max_shape,
        pins=pins,
        plan=plan,
        chunk_bytes=chunk_bytes,
        weights=weights,
        loss=loss,
        chunked_loss=chunked_loss,
    )
    try:
        planned = ready.planner(model, batch, ready.step_config)
        engine = Engine(
            model,
            ready.layers,
            planned,
            device=ready.device,
            optimizer=ready.optimizer,
            planner=ready.planner,
            weights=ready.weights,
            given_dtypes=ready.given_dtypes,
            takes_all_memory=gpu_memory is None,
        )
    except BaseException:
        convert(model, ready.given_dtypes)
        ready.device.lift_limit()
        raise
    if ready.weights is not None:
        ready.weights.close()
    return engine


@host_rng_untouched()
def preview(model: nn.Module, batch: Any, *, optimizer: AdamW | None = None, **settings: Any) -> PlannedModel:
    """The plan that `prepare` would make, with the same arguments. The model is not touched, and nothing is allocated
    for it but by the trial run.
    """
    ready = _get_ready(model, optimizer=optimizer or AdamW(), **settings)
    with ready.dtypes_given_back(model):
        return ready.planner(model, batch, ready.step_config)


@host_rng_untouched()
def choose_micro_batch(
    model: nn.Module,
    splits: Sequence[Split],
    *,
    batch_of: Callable[[int], Any],
    optimizer_for: Callable[[Split], AdamW],
    **settings: Any,
) -> Choice[PlannedModel]:
    """Which of the splits of a batch trains fastest here. The model is not touched.

    Args:
        batch_of: a batch to plan for, of so many rows.
        optimizer_for: the optimizer of a run that is split so: whether it updates in backward may depend on that.
        settings: the other arguments of `prepare`.
    """
    ready = _get_ready(model, optimizer=optimizer_for(splits[0]), **settings)

    def solve(found: Traced, split: Split) -> PlannedModel:
        optimizer = optimizer_for(split)
        return ready.solve(
            found, StepConfig(update=optimizer.update, accumulate=split.passes, fp32_grads=optimizer.fp32_grads)
        )

    with ready.dtypes_given_back(model):
        return fastest(splits, lambda rows: ready.measure(batch_of(rows), None), solve)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """Everything that is settled before the trial run."""

    layers: tuple[Layer, ...]
    device: Device
    optimizer: AdamW
    step_config: StepConfig
    weights: Weights | None
    measure: Callable[[Any, ChosenLoss | None], Traced]
    """Traces a batch, its loss made as before."""
    solve: Callable[[Traced, StepConfig], PlannedModel]
    planner: Planner
    """One after the other, for a batch at its largest."""
    given_dtypes: Mapping[str, torch.dtype]
    """Of parameters that were converted to be trained, by name."""

    @contextmanager
    def dtypes_given_back(self, model: nn.Module) -> Iterator[None]:
        """For code that only plans. Afterwards the model has its own dtypes, with the values it came with, and the
        process its memory limit.
        """
        try:
            yield
        finally:
            convert(model, self.given_dtypes)
            self.device.lift_limit()


def _get_ready(
    model: nn.Module,
    *,
    optimizer: AdamW,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    device: str | Device | None = None,
    blocks: Sequence[str] | None = None,
    accumulate: int = 1,
    max_shape: tuple[int, int] | None = None,
    pins: Pins | None = None,
    plan: "Plan | str | Path | None" = None,
    chunk_bytes: str | int = DEFAULT_CHUNK_BYTES,
    weights: "str | Path | Weights | None" = None,
    loss: Loss | None = None,
    chunked_loss: bool | None = None,
) -> _Ready:
    if not is_count(accumulate):
        raise ConfigError(
            tell(
                "accumulate is a whole number from 1",
                f"it is {accumulate!r}",
                "Give the backward passes of an optimizer step",
            )
        )
    where = choose_device(device)
    _require_one_process()
    _require_plain(model)
    require_plain_tensors(model)
    require_own_memory(model)
    source = _source(model, weights)
    _one_owner_of_recompute(model)
    layers = find_layers(model, blocks)
    if blocks is None:  # those of both ways to cut the model: the trial run says which of them are blocks
        layers = tuple({layer.name: layer for layer in (*find_layers(model, in_sequentials=False), *layers)}.values())
    step_config = StepConfig(update=optimizer.update, accumulate=accumulate, fp32_grads=optimizer.fp32_grads)
    gpu_budget = _gpu_budget(gpu_memory, where)
    host_budget = (
        parse_bytes(host_memory, name="host_memory") if host_memory is not None else int(free_host_bytes() * 0.9)
    )
    size = parse_bytes(chunk_bytes, name="chunk_bytes")
    given = load(Path(plan)) if isinstance(plan, (str, Path)) else plan
    if given is not None:
        _agree(given, step_config, gpu_budget, host_budget, pins, chunked_loss)
        chunked_loss = given.loss_chunk > 0
    given_dtypes = _adopt_dtypes(model)  # last: what is refused above leaves the model as it was

    names = positional_names(model)

    def measure(batch: Any, before: ChosenLoss | None) -> Traced:
        batch = detached(batch)
        require_nonempty(batch)
        has_loss = loss is not None and not isinstance(
            batch, Call
        )  # a call that the loss does not make is measured by itself
        call = as_call(model, batch) if not has_loss else Call()
        signatures: list[Signature] = [signature(arguments_of(call, names))] if not has_loss else []
        own = recording(loss, signatures) if has_loss else None

        def trace_of(layers: tuple[Layer, ...]) -> Any:
            return trace_with_loss(
                model,
                batch,
                lambda words: profile_within_budget(
                    lambda part: traced(model, part, layers, where, source, own, model_loss=words),
                    batch,
                    device=where,
                    budget_bytes=gpu_budget,
                ),
                wanted=chunked_loss,
                is_custom=loss is not None,
                before=before,
            )

        try:
            (graph, trace), chosen = _in_blocks(trace_of, model, blocks)
            where.expect(trace.process_overhead)
        except RuntimeError as error:
            # Frozen weights and activations in fp16 beside weights in fp32: some models cast between them (PEFT's
            # layers), most do not.
            is_half = any(
                tensor.dtype == torch.float16 for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch))
            )
            if given_dtypes and is_half and not isinstance(error, (OutsizeError, torch.OutOfMemoryError)):
                raise _refused_mix(next(iter(given_dtypes)), error) from error
            raise
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            if call.instead_because:  # the model was given the batch whole for want of another way
                raise cannot_be_called(
                    model, batch, f"{call.instead_because}, and model(batch) fails with {type(error).__name__}: {error}"
                ) from error
            raise
        finally:
            where.limit(gpu_budget)
        return reserving(
            Traced(
                rows=num_rows(batch) or 1,
                graph=graph,
                trace=trace,
                loss=chosen,
                measured=Measured(signature(batch), tuple(signatures)),
            )
        )

    def solve(found: Traced, step_config: StepConfig) -> PlannedModel:
        graph, trace, chosen = found.graph, found.trace, found.loss
        layout = pack(graph, given.chunk_bytes if given is not None else size)
        if given is not None and given.inputs == trace.inputs:
            check(given, graph, layout)
            if given.loss_chunk != chosen.chunk:
                raise ConfigError(
                    tell(f"the plan's loss is {chosen.text}, as here", f"it is {given.loss}", "Make the plan again")
                )
            return PlannedModel(graph, layout, given, chosen)
        overhead = where.overhead_bytes
        share = where.spec.allocator_share if overhead else 0.0
        gpu = GpuBudget(
            total_bytes=gpu_budget, fixed_bytes=overhead - int(gpu_budget * share) + where.oom_margin_bytes, share=share
        )
        made = search(
            graph, layout, trace, where.spec, step_config, gpu=gpu, host_bytes=host_budget, pins=pins or Pins()
        )
        check(made, graph, layout)
        return PlannedModel(
            graph,
            layout,
            replace(
                made,
                loss=chosen.text,
                loss_chunk=chosen.chunk,
                process_overhead=trace.process_overhead,
                profile_keys=trace.profile_keys,
            ),
            chosen,
        )

    batches = PlannedBatches(model, measure, solve, max_shape=max_shape, has_loss=loss is not None)
    return _Ready(
        layers=layers,
        device=where,
        optimizer=optimizer,
        step_config=step_config,
        weights=source,
        measure=measure,
        solve=solve,
        planner=batches.plan,
        given_dtypes=given_dtypes,
    )


def _in_blocks(trace_of: Callable[[tuple[Layer, ...]], Any], model: nn.Module, blocks: Sequence[str] | None) -> Any:
    """The trace with the layers that are found now: parameters may have been unfrozen. A Sequential that cannot be run
    in parts is left whole.
    """
    layers = find_layers(model, blocks)
    try:
        return trace_of(layers)
    except ModelUnsupported as error:
        fewer = find_layers(model, in_sequentials=False) if blocks is None else layers
        if {layer.name for layer in fewer} == {layer.name for layer in layers}:
            raise
        reason = error
    try:
        found = trace_of(fewer)
    except ModelUnsupported:
        raise reason from None
    log.warning("layers in nn.Sequential are not streamed one by one: %s", str(reason))
    return found


def _agree(
    given: Plan,
    step_config: StepConfig,
    gpu_budget: int,
    host_budget: int,
    pins: Pins | None,
    chunked_loss: bool | None,
) -> None:
    """A whole plan leaves nothing to choose: what is asked for beside it must be what it says."""
    conflicts = [
        f"{name} is {theirs!r} in the plan and {mine!r} here"
        for name, theirs, mine in (
            ("update", given.step_config.update, step_config.update),
            ("accumulate", given.step_config.accumulate, step_config.accumulate),
            ("fp32_grads", given.step_config.fp32_grads, step_config.fp32_grads),
        )
        if theirs != mine
    ]
    for resource, needed, allowed in (
        ("gpu_memory", given.estimate.gpu_bytes, gpu_budget),
        ("host_memory", given.estimate.host_bytes, host_budget),
    ):
        if needed > allowed:
            conflicts.append(f"it needs {show_bytes(needed)} of {resource} and {show_bytes(allowed)} is allowed")
    if chunked_loss not in (None, given.loss_chunk > 0):
        conflicts.append(f"its loss is {given.loss or 'from full logits'} and chunked_loss is {chunked_loss}")
    if pins is not None:
        conflicts.append(f"pins are given too ({pins})")
    if conflicts:
        raise ConfigError(
            tell(
                "a plan and the other arguments of prepare agree",
                "; ".join(conflicts),
                "Change one of them, or let the plan be made",
            )
        )


def _end_earlier_engine(model: nn.Module) -> None:
    """A notebook cell that is run twice prepares its model twice: the new engine takes over."""
    for engine in attached_engines():
        if engine.model is model:
            log.warning(
                "the model is prepared already: that engine ends, and the model goes on from its present weights with "
                "a new optimizer state"
            )
            engine.give_way("outsize.prepare was called again for its model")


def _require_plain(model: nn.Module) -> None:
    held = [name for name, param in model.named_parameters() if owner_of(param) is not None]
    if held:
        raise EngineMisuse(
            f"{held[0]} belongs to a prepared model already. Call engine.detach() of the engine that holds it first."
        )
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise ModelUnsupported(
                f"{name or 'the model'} is compiled (torch.compile): the schedule needs the model's own layers. "
                "Prepare the model without torch.compile."
            )
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ModelUnsupported(
                f"{name or 'the model'} is a scripted or traced module (torch.jit), in which the use of weights "
                "cannot be followed. "
                "Prepare the model with the nn.Module that it was made of."
            )
        if any(
            kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
            for kind in type(module).__mro__
        ):
            raise ModelUnsupported(
                f"{name or 'the model'} is a {type(module).__name__}: pass the module inside it (.module) to "
                "outsize.prepare."
            )


def _require_one_process() -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (size := torch.distributed.get_world_size()) > 1
    ):
        raise EngineMisuse(
            f"torch.distributed is initialised with {size} processes, but outsize trains on one device: each process "
            "would train its own copy. "
            "Start one process, without a launcher."
        )


def _gpu_budget(gpu_memory: str | int | None, device: Device) -> int:
    """Engines on one device share it: what one has planned for, another does not get."""
    gc.collect()  # models and engines are reference cycles: without this, dropped ones still hold device memory
    free = device.free_bytes
    if gpu_memory is None and device.promised and free <= 0:
        for engine in attached_engines():
            if engine.device is device and engine.takes_all_memory:
                name = type(engine.model).__name__
                log.warning(
                    "the engine of a %s holds all memory of %s and ends: to train two models at once, give each a "
                    "gpu_memory",
                    name,
                    device.spec.name,
                )
                engine.give_way(
                    "a later outsize.prepare took the device's memory; to train two models at once, give each prepare "
                    "a gpu_memory"
                )
        free = device.free_bytes
    if gpu_memory is None:
        if free <= 0:
            held = show_bytes(sum(device.promised.values()))
            raise ConfigError(
                f"{device.spec.name} has no free memory: other engines hold {held}. Call detach() on one of them, or "
                "prepare it with a smaller gpu_memory."
            )
        return free
    asked = parse_bytes(gpu_memory, name="gpu_memory")
    if asked > free:
        taken = sum(device.promised.values())
        found = f"{exact_bytes(asked)} was asked for" + (
            f" while another engine has {show_bytes(taken)}" if taken else ""
        )
        do = "Ask for less, or detach the other engine"
        raise ConfigError(
            tell(f"gpu_memory is at most the {show_bytes(free)} that {device.spec.name} has free", found, do)
        )
    return asked


def _source(model: nn.Module, weights: "str | Path | Weights | None") -> Weights | None:
    """Where unmaterialized parameters get their values. A model on meta becomes an unmaterialized one."""
    on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        do = (
            "Build it inside accelerate.init_empty_weights(include_buffers=False), or with "
            "outsize.model.build.build_model"
        )
        raise ModelUnsupported(tell("buffers have their values", f"{lost[0]} is on meta", do))
    if weights is not None and not on_meta and not any(is_unmaterialized(param) for param in model.parameters()):
        raise ConfigError(
            tell(
                "weights= is for a model on meta",
                "this one has its weights already",
                "Leave it out, or build the model on meta",
            )
        )
    if isinstance(weights, (str, Path)):
        weights = FileWeights(Path(weights), model)
        weights.require_whole()
        weights.fill_buffers(model)
    if on_meta and weights is None:
        raise ModelUnsupported(
            tell(
                "the model is on the CPU, or weights= says where its weights are",
                f"{on_meta[0]} is on meta",
                "Give weights=folder",
            )
        )
    unmaterialize(model)
    return weights


def _adopt_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Convert trainable fp16 parameters to fp32, which is exact; frozen ones stay fp16. Returns the dtypes of those
    that were converted, by name.
    """
    params = dict(model.named_parameters())
    for name, param in params.items():
        if param.requires_grad and param.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            do = f"Convert it, or freeze it with {name}.requires_grad_(False)"
            raise ModelUnsupported(
                tell("trainable parameters are float16, bfloat16 or float32", f"{name} is {param.dtype}", do)
            )
    given = {
        name: param.dtype for name, param in params.items() if param.requires_grad and param.dtype == torch.float16
    }
    if given:
        log.info("%d trainable fp16 parameters are trained in fp32, which holds their values exactly", len(given))
        convert(model, dict.fromkeys(given, torch.float32))
    if num_frozen := sum(param.dtype == torch.float16 for param in params.values()):
        log.info("%d frozen parameters stay fp16", num_frozen)
    return given


def _refused_mix(name: str, error: RuntimeError) -> ModelUnsupported:
    """A sentence for a trial run that failed, probably since some fp16 weights were converted and others were not."""
    words = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ModelUnsupported(
        f"{name}: trainable fp16 weights are trained in fp32 beside others that stay fp16, and the trial run of the "
        f"model failed: {words}. "
        "If its dtypes do not go together, convert the whole model first: model.to(torch.bfloat16) or model.float()."
    )


def _one_owner_of_recompute(model: nn.Module) -> None:
    """Turn off checkpointing that the model does itself: transformers', also of a model inside a wrapper, diffusers',
    timm's.
    """
    found = []
    for name, module in model.named_modules():
        if getattr(module, "is_gradient_checkpointing", False) is True and hasattr(
            module, "gradient_checkpointing_disable"
        ):
            module.gradient_checkpointing_disable()
            found.append(name)
        for flag in ("gradient_checkpointing", "grad_checkpointing"):
            if vars(module).get(flag) is True:
                setattr(module, flag, False)
                found.append(name)
    if found:
        where = f" in {found[0]}" if found[0] else ""
        log.warning("gradient checkpointing is turned off%s: the plan decides per block what is recomputed", where)


# Models that only run forward beside the one that is trained: reference models and reward models.

_FORWARD_ONLY_SHARE = 0.25
"""Of gpu_memory that such a model may use, unless it needs more."""


@host_rng_untouched()
def prepare_forward_only(
    model: nn.Module,
    batch: Any,
    run: Callable[[nn.Module, Any], object],
    *,
    gpu_memory: str | int | None = None,
    device: str | Device | None = None,
    max_shape: tuple[int, int] | None = None,
    least: bool = False,
    only_weights: bool = False,
    **settings: Any,
) -> Engine:
    """Prepare a model without trainable parameters for forward passes alone. What does not fit is streamed.

    Args:
        run: calls the model with a batch, as the training loop does.
        gpu_memory: what this model and the one that is trained may use together.
        least: take as little GPU memory as possible. Default: a quarter of `gpu_memory` at most, or what it needs.
        only_weights: budget the weights alone. The plan of the model that is trained has room for its activations.
        settings: host_memory and chunk_bytes, as in `prepare`.
    """
    where = choose_device(device)
    total = _gpu_budget(gpu_memory, where)
    settings = {**settings, "optimizer": AdamW(), "device": where, "chunked_loss": False}

    def loss(model: nn.Module, batch: Any) -> None:
        run(model, batch)

    ready = _get_ready(model, gpu_memory=gpu_memory, loss=loss, **settings)
    found = ready.measure(pad_to_shape(batch, max_shape), None)

    def plan(num_bytes: int) -> PlannedModel:
        return _get_ready(model, gpu_memory=num_bytes, **settings).solve(found, ready.step_config)

    try:
        planned = plan(1 if least else int(total * _FORWARD_ONLY_SHARE))
    except PlanInfeasible as error:
        if error.resource != "gpu" or error.needed_bytes > total:
            raise
        needed = error.needed_bytes
        planned = plan(needed)
    # What it does not need is left to the model that is trained.
    made = planned.plan
    budget = made.estimate.gpu_bytes
    if only_weights:
        place = Placement(planned.graph, planned.layout, made.decision, made.step_config, made.work, made.shared)
        budget = sum(place.gpu.values()) + sum(buffer.nbytes for buffer in model.buffers())
    planned = replace(planned, plan=replace(made, gpu_budget_bytes=budget))
    return Engine(model, ready.layers, planned, device=where, optimizer=ready.optimizer, planner=ready.planner)
