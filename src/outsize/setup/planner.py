"""Planner: profiles a model with a batch, searches a plan (planner/search.py), and plans again for batches that a plan
does not cover.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.base.errors import ConfigError, ModelUnsupported, OutsizeError
from outsize.base.log import log
from outsize.base.units import exact_bytes, is_count, parse_bytes, show_bytes
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.host import free_host_bytes
from outsize.layout.chunks import pack
from outsize.loss.chunked_loss import ChosenLoss, trace_with_loss
from outsize.model.batch import (
    Measured,
    ModelCall,
    Signature,
    arguments_of,
    as_call,
    cannot_be_called,
    cut_into_tiles,
    positional_names,
    signature,
)
from outsize.model.discover import Layer, find_layers
from outsize.model.graph import BlockGraph
from outsize.model.own_checkpointing import turn_checkpointing_off
from outsize.model.parts import quant_state_of
from outsize.model.tensors import tensors_in
from outsize.model.weights import FileWeights, Weights, convert, is_unmaterialized, unmaterialize
from outsize.planner.search import search
from outsize.profile.cache import traced
from outsize.profile.calling import Loss
from outsize.profile.counted import counted_trace
from outsize.profile.lengths import lengths_of_change
from outsize.profile.trace import ModelTrace
from outsize.runtime.engine import PlannedModel
from outsize.runtime.process_hooks import attached_engines
from outsize.schedule.check import check, load
from outsize.schedule.pins import Pins
from outsize.schedule.plan import Plan, StepConfig
from outsize.setup.batches import detached, num_rows, require_nonempty
from outsize.setup.budgeted_profile import profile_within_budget
from outsize.setup.micro_batch import Traced
from outsize.setup.model_checks import require_supported
from outsize.setup.planned_batches import PlannedBatches, recording, reserving
from outsize.setup.request import PrepareRequest


class Planner:
    """Plans one model on one device under one request.

    Creating it changes the model: parameters on meta become unmaterialized ones, the model's own gradient checkpointing
    is turned off, a method freezes parameters, and trainable fp16 parameters become fp32. `undo` reverts the last two.
    """

    def __init__(self, model: nn.Module, request: PrepareRequest):
        self.model, self.request, self.step_config = model, request, request.step_config
        self._names = positional_names(model)  # before an engine wraps the forward
        if not is_count(self.step_config.accumulate):
            raise ConfigError(
                f"accumulate must be a whole number from 1, not {request.accumulate!r}. Set it to the number of "
                "backward passes of an optimizer step."
            )
        self.device = choose_device(request.device)
        require_supported(model)
        self.weights = _weights_of(model, request.weights)
        """Where unmaterialized parameters get their values."""
        _disable_own_checkpointing(model)
        _cast_biases(model)
        layers = find_layers(model, request.blocks)
        if request.blocks is None:  # both ways to cut the model; the profiling run decides between them
            whole = find_layers(model, in_sequentials=False)
            layers = tuple({layer.name: layer for layer in (*whole, *layers)}.values())
        self.layers = layers
        self.gpu_bytes = requested_gpu_bytes(request.gpu_memory, self.device)
        host = request.host_memory
        self.host_bytes = int(free_host_bytes() * 0.9) if host is None else parse_bytes(host, name="host_memory")
        self._chunk_bytes = parse_bytes(request.chunk_bytes, name="chunk_bytes")
        self._given = load(Path(request.plan)) if isinstance(request.plan, (str, Path)) else request.plan
        self._chunked_loss = request.chunked_loss
        trained = [param for param in model.parameters() if param.requires_grad]
        try:  # last: a refusal leaves what the model trains, and its dtypes, as they were
            self.method = None if request.method is None else request.method.bind(model)
            self._coordinates = {} if self.method is None else self.method.coordinates
            if self._given is not None:
                self._require_same_settings(self._given)
                self._chunked_loss = self._given.loss_chunk > 0
            self.given_dtypes = _adopt_dtypes(model)
            """The original dtypes of parameters that were converted for training, by name."""
        except BaseException:
            for param in trained:
                param.requires_grad_(True)
            raise
        own = {id(param) for param in trained}
        self.frozen = {n for n, param in model.named_parameters() if id(param) in own and not param.requires_grad}
        """The parameters that the method has frozen."""
        has_loss = request.loss is not None
        self._batches = PlannedBatches(model, self.measure, self.solve, max_shape=request.max_shape, has_loss=has_loss)

    def plan(self, model: nn.Module, batch: Any, step_config: StepConfig) -> PlannedModel:
        """Plan for this batch at its largest, and for as many earlier ones as fit with it."""
        return self._batches.plan(model, batch, step_config)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo the changes to the model and the process afterwards. For code that only plans."""
        try:
            yield
        finally:
            self.undo()

    def undo(self) -> None:
        """Restore the model's dtypes, what it trains, and the process's memory limit."""
        convert(self.model, self.given_dtypes)
        for name, param in self.model.named_parameters():
            if name in self.frozen:
                param.requires_grad_(True)
        self.device.lift_limit()

    # Profile.

    def measure(self, batch: Any, before: ChosenLoss | None) -> Traced:
        """Profile the model with this batch. `before`: how the loss was computed so far; it stays chunked."""
        batch = detached(batch)
        require_nonempty(batch)
        # A call that the loss does not make is measured by itself.
        loss = self.request.loss if not isinstance(batch, ModelCall) else None
        call = as_call(self.model, batch) if loss is None else ModelCall()
        signatures: list[Signature] = [signature(arguments_of(call, self._names))] if loss is None else []
        try:
            (graph, trace), chosen = self._trace_blocks(batch, recording(loss, signatures), before)
            self.device.expect(trace.process_overhead)
        except RuntimeError as error:
            if self._mixes_fp16(batch) and not isinstance(error, (OutsizeError, torch.OutOfMemoryError)):
                raise _mixed_dtypes(next(iter(self.given_dtypes)), error) from error
            raise
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            if call.instead_because:  # the forward's arguments do not match the batch, so it was passed whole
                why = f"{call.instead_because}, and model(batch) fails with {type(error).__name__}: {error}"
                raise cannot_be_called(self.model, batch, why) from error
            raise
        finally:
            self.device.limit(self.gpu_bytes)
        tile = trace.tile_tokens
        calls = tuple(cut_into_tiles(call, tile) for call in signatures)
        measured = Measured(cut_into_tiles(signature(batch), tile), calls)
        return reserving(Traced(rows=num_rows(batch) or 1, graph=graph, trace=trace, loss=chosen, measured=measured))

    def _trace_blocks(
        self, batch: Any, loss: Loss | None, before: ChosenLoss | None
    ) -> tuple[tuple[BlockGraph, ModelTrace], ChosenLoss]:
        """Trace with the layers found now (parameters may have been unfrozen). A Sequential that cannot be run in parts
        becomes one block.
        """
        blocks = self.request.blocks
        layers = find_layers(self.model, blocks)
        try:
            return self._trace(batch, layers, loss, before)
        except ModelUnsupported as error:
            fewer = find_layers(self.model, in_sequentials=False) if blocks is None else layers
            if {layer.name for layer in fewer} == {layer.name for layer in layers}:
                raise
            reason = error
        try:
            found = self._trace(batch, fewer, loss, before)
        except ModelUnsupported:
            raise reason from None
        log.warning("layers in nn.Sequential are not streamed one by one: %s", str(reason))
        return found

    def _trace(
        self, batch: Any, layers: tuple[Layer, ...], loss: Loss | None, before: ChosenLoss | None
    ) -> tuple[tuple[BlockGraph, ModelTrace], ChosenLoss]:
        def trace(chosen: ChosenLoss) -> tuple[BlockGraph, ModelTrace]:
            model_loss = chosen.text if chosen.in_chunks else ""
            config = getattr(self.model, "config", None)
            return profile_within_budget(
                lambda part: traced(
                    self.model,
                    part,
                    layers,
                    self.device,
                    self.weights,
                    loss,
                    model_loss=model_loss,
                    tile_tokens=self.request.tile_tokens,
                ),
                lambda part: counted_trace(
                    self.model, part, layers, self.device, loss, tile_tokens=self.request.tile_tokens
                ),
                batch,
                device=self.device,
                budget_bytes=self.gpu_bytes,
                changes=lengths_of_change(
                    config, rows=num_rows(batch) or 1, loss_chunk=chosen.chunk, tile_tokens=self.request.tile_tokens
                ),
                needs_count=loss is not None,
            )

        is_custom = self.request.loss is not None
        return trace_with_loss(self.model, batch, trace, wanted=self._chunked_loss, is_custom=is_custom, before=before)

    def _mixes_fp16(self, batch: Any) -> bool:
        """Whether frozen weights or inputs are fp16 beside weights that were converted to fp32. Some models cast
        between them (PEFT's layers), most do not.
        """
        tensors = (*self.model.parameters(), *self.model.buffers(), *tensors_in(batch))
        return bool(self.given_dtypes) and any(tensor.dtype == torch.float16 for tensor in tensors)

    # Search.

    def solve(self, found: Traced, step_config: StepConfig, *, gpu_bytes: int | None = None) -> PlannedModel:
        """Search the fastest plan for what was measured. `gpu_bytes`: instead of the request's."""
        graph, trace, chosen, given = found.graph, found.trace, found.loss, self._given
        chunk_bytes = given.chunk_bytes if given is not None else self._chunk_bytes
        layout = pack(graph, chunk_bytes, in_coordinates=self._coordinates)
        step_config = replace(step_config, coordinates=self._coordinates)
        if given is not None and given.inputs == trace.inputs:
            check(given, graph, layout)
            if (given.tile_tokens, given.tiled) != (trace.tile_tokens, trace.tiled):
                raise ConfigError(
                    f"plan: {len(given.tiled)} modules run over tiles of {given.tile_tokens} tokens, but here "
                    f"{len(trace.tiled)} over tiles of {trace.tile_tokens}. Make the plan again, or set tile_tokens."
                )
            if given.loss_chunk != chosen.chunk:
                raise ConfigError(f"plan: its loss is {given.loss}, but here it is {chosen.text}. Make the plan again.")
            return PlannedModel(graph, layout, given, chosen)
        total = self.gpu_bytes if gpu_bytes is None else gpu_bytes
        overhead = self.device.overhead_bytes
        share = self.device.spec.allocator_share if self.device.is_gpu else 0.0
        fixed = overhead - int(total * share) + self.device.oom_margin_bytes
        made = search(
            graph,
            layout,
            trace,
            self.device.spec,
            step_config,
            gpu=GpuBudget(total_bytes=total, fixed_bytes=fixed, share=share),
            host_bytes=self.host_bytes,
            pins=self.request.pins or Pins(),
        )
        check(made, graph, layout)
        made = replace(
            made,
            loss=chosen.text,
            loss_chunk=chosen.chunk,
            attention=trace.attention,
            process_overhead=trace.process_overhead,
            profile_keys=trace.profile_keys,
        )
        return PlannedModel(graph, layout, made, chosen)

    def _require_same_settings(self, given: Plan) -> None:
        """Refuse settings that contradict a given plan, which decides everything."""
        conflicts = [
            f"{name} is {theirs!r} in the plan and {ours!r} here"
            for name in ("update", "accumulate", "fp32_grads")
            if (theirs := getattr(given.step_config, name)) != (ours := getattr(self.step_config, name))
        ]
        if given.step_config.coordinates != self._coordinates:
            conflicts.append("its method, or its ranks, are others than here")
        conflicts += [
            f"it needs {show_bytes(needed)} of {name} and {show_bytes(allowed)} is allowed"
            for name, needed, allowed in (
                ("gpu_memory", given.estimate.gpu_bytes, self.gpu_bytes),
                ("host_memory", given.estimate.host_bytes, self.host_bytes),
            )
            if needed > allowed
        ]
        if self._chunked_loss not in (None, given.loss_chunk > 0):
            conflicts.append(f"its loss is {given.loss or 'from full logits'} and chunked_loss is {self._chunked_loss}")
        if self.request.pins is not None:
            conflicts.append(f"pins are given too ({self.request.pins})")
        if conflicts:
            raise ConfigError(
                f"plan: it contradicts the other arguments: {'; '.join(conflicts)}. Change one of them, or leave plan "
                "out."
            )


# The budget.


def requested_gpu_bytes(gpu_memory: str | int | None, device: Device) -> int:
    """GPU memory for this plan. Engines on one device share its memory."""
    device.count_anew()
    if device.budgets or device.overhead_bytes or not device.is_simulated:
        gc.collect()  # models and engines are reference cycles: without this, dropped ones still hold device memory
    free = device.free_bytes
    if gpu_memory is None and device.budgets and free <= 0:
        for engine in attached_engines():
            if engine.device is device and engine.takes_all_memory:
                log.warning(
                    "the engine of a %s holds all memory of %s and is detached: to train two models at once, give each "
                    "a gpu_memory",
                    type(engine.model).__name__,
                    device.spec.name,
                )
                engine.end(
                    "a later outsize.prepare took the device's memory; to train two models at once, give each prepare "
                    "a gpu_memory"
                )
        free = device.free_bytes
    taken = sum(device.budgets.values())
    if gpu_memory is None:
        if free <= 0:
            raise ConfigError(
                f"{device.spec.name} has no free memory: other engines hold {show_bytes(taken)}. Call detach() on one "
                "of them, or prepare it with a smaller gpu_memory."
            )
        return free
    requested = parse_bytes(gpu_memory, name="gpu_memory")
    if requested > free and not device.has_own_memory:
        raise ConfigError(
            f"gpu_memory {exact_bytes(requested)}: the run uses no GPU but the CPU, which has {show_bytes(free)} free. "
            "Leave gpu_memory out, or try a budget with device: sim:24GiB. `outsize doctor` says why there is no GPU."
        )
    if requested > free:
        others = f" (other engines hold {show_bytes(taken)})" if taken else ""
        raise ConfigError(
            f"gpu_memory {exact_bytes(requested)} is more than the {show_bytes(free)} that {device.spec.name} has free"
            f"{others}. Lower gpu_memory{', or detach another engine' if taken else ''}."
        )
    return requested


# The model.


def _weights_of(model: nn.Module, weights: "str | Path | Weights | None") -> Weights | None:
    """The source of the values of unmaterialized parameters. Parameters on meta become unmaterialized."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelUnsupported(
                f"{name} is a buffer on meta, and its values are unknown. Build the model inside "
                "accelerate.init_empty_weights(include_buffers=False), or with outsize.model.build.build_model."
            )
    on_meta = [name for name, param in model.named_parameters() if param.is_meta]
    if weights is not None and not on_meta and not any(is_unmaterialized(param) for param in model.parameters()):
        raise ConfigError("weights: this model has its weights already. Leave weights out, or build the model on meta.")
    if isinstance(weights, (str, Path)):
        weights = FileWeights(Path(weights), model)
        weights.require_whole()
        weights.fill_buffers(model)
    if on_meta and weights is None:
        raise ModelUnsupported(
            f"{on_meta[0]} is on meta, without values. Pass weights=folder with the model's safetensors files, or load "
            "the model on the CPU."
        )
    unmaterialize(model)
    return weights


def _cast_biases(model: nn.Module) -> None:
    """Convert biases of bitsandbytes' 4-bit modules to the dtype that they compute in. Their first forward would do so,
    by replacing the bias's memory.
    """
    dtypes = {}
    for path, module in model.named_modules():
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        dtype = getattr(module, "compute_dtype", None)
        if weight is not None and bias is not None and dtype is not None and quant_state_of(weight) is not None:
            dtypes[f"{path}.bias".lstrip(".")] = dtype
    convert(model, dtypes)


def _adopt_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Convert trainable fp16 parameters to fp32, which is exact; frozen ones stay fp16. Returns the dtypes that the
    converted ones had, by name.
    """
    params = dict(model.named_parameters())
    for name, param in params.items():
        if param.requires_grad and param.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ModelUnsupported(
                f"{name} is trainable and {param.dtype}; trainable parameters can be float16, bfloat16 or float32. "
                f"Convert it, or freeze it with {name}.requires_grad_(False)."
            )
    half = [name for name, param in params.items() if param.dtype == torch.float16]
    given = {name: torch.float16 for name in half if params[name].requires_grad}
    if given:
        log.info("%d trainable fp16 parameters are trained in fp32, which holds their values exactly", len(given))
        convert(model, dict.fromkeys(given, torch.float32))
    if num_frozen := len(half) - len(given):
        log.info("%d frozen parameters stay fp16", num_frozen)
    return given


def _mixed_dtypes(name: str, error: RuntimeError) -> ModelUnsupported:
    words = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ModelUnsupported(
        f"{name}: trainable fp16 weights are trained in fp32 beside others that stay fp16, and the profiling run of "
        f"the model failed: {words}. If the cause is its dtypes, convert the whole model first: "
        "model.to(torch.bfloat16) or model.float()."
    )


def _disable_own_checkpointing(model: nn.Module) -> None:
    if found := turn_checkpointing_off(model):
        where = f" in {found[0][0]}" if found[0][0] else ""
        log.warning("gradient checkpointing is turned off%s: the plan decides per block what is recomputed", where)
