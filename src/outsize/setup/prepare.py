"""`outsize.prepare`, and other ways to plan for a model that is present."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from outsize.base.errors import PlanInfeasible
from outsize.base.log import log
from outsize.device.device import Device
from outsize.device.rng import host_rng_untouched
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.parts import distinct_tables
from outsize.model.strategies import TILE_TOKENS
from outsize.model.weights import Weights
from outsize.optim.method import MethodSpec
from outsize.optim.names import default_spec
from outsize.optim.spec import OptimizerSpec
from outsize.profile.calling import Loss
from outsize.runtime.engine import Engine, PlannedModel
from outsize.runtime.process_hooks import attached_engines
from outsize.schedule.pins import Pins
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.setup.batches import pad_to_shape
from outsize.setup.micro_batch import Choice, Split, Traced, fastest
from outsize.setup.model_checks import note_fp32_adapters
from outsize.setup.planner import Planner
from outsize.setup.request import PrepareRequest


def prepare(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: OptimizerSpec | None = None,
    method: MethodSpec | None = None,
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
    tile_tokens: int = TILE_TOKENS,
) -> Engine:
    """Make a model trainable under a memory budget. It stays the user's object and trains to the same bits, except with
    `chunked_loss` and fp16.

    Trainable fp16 weights are trained in fp32, which holds their values exactly; `engine.detach()` rounds them back.
    Frozen fp16 weights stay fp16.

    Args:
        model: an nn.Module on the CPU; or on meta, with `weights`.
        batch: one real batch: a mapping for `model(**batch)`, a tuple or list for `model(*batch)`. If the forward
            cannot be called like that, and for anything else (a tensor, a dataclass): `model(batch)`. Inputs may be
            nested. A batch that costs more than the measured ones re-plans.
        optimizer: settings of the optimizer; `engine.optimizer` is the torch optimizer with these settings.
        method: trains some weights in coordinates, as `outsize.OSFT(...)` does. Default: the weights themselves.
        gpu_memory: maximum GPU memory, such as "24GiB", CUDA context included. Default: what is free.
        host_memory: maximum host memory. Default: what is free within the container's limit, less a tenth.
        device: "cuda", "cpu" or `"sim:<catalog name, .yaml file or size>"`. Default: the GPU if there is one.
        blocks: paths of the lists of layers, to override their discovery. Empty: the model is one block.
        accumulate: backward passes per step that the plan is for. A hint: any loop stays correct.
        max_shape: (rows, tokens) of the largest batch; the plan is for it. A larger one re-plans.
        pins: parts of the plan to fix.
        plan: a whole plan (or its file) to use as it is.
        chunk_bytes: maximum size of a chunk.
        weights: a folder of safetensors for a model on meta. Weights are read from it directly into their homes.
        loss: `loss(model, batch)`, if the loop computes its own loss from the model's outputs. The plan then includes
            its memory and time.
        chunked_loss: compute the model's own loss in chunks of tokens, so that all logits never exist at once;
            `outputs.logits` is then not available in training. Default: if the batch is larger than a chunk, the model
            allows it and `loss` is not given; the plan says which. False: never. True: always, or raise.
        tile_tokens: rows of more than twice as many tokens run through MLPs and norms tile by tile, which saves most of
            their memory (docs/long-context.md). Changes bits, by the rounding of these modules' weight gradients. 0:
            never.
    """
    return prepare_as(
        model,
        batch,
        PrepareRequest(
            optimizer=optimizer or default_spec(),
            method=method,
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
            tile_tokens=tile_tokens,
        ),
    )


@host_rng_untouched()
def prepare_as(model: nn.Module, batch: Any, request: PrepareRequest) -> Engine:
    """`prepare`, with its settings as one record."""
    _end_earlier_engine(model)
    note_fp32_adapters(model)
    planner = Planner(model, request)
    try:
        planned = planner.plan(model, batch, planner.step_config)
        engine = Engine(
            model,
            planner.layers,
            planned,
            device=planner.device,
            optimizer=request.optimizer,
            planner=planner.plan,
            method=planner.method,
            weights=planner.weights,
            given_dtypes=planner.given_dtypes,
            takes_all_memory=request.gpu_memory is None,
            frozen=planner.frozen,
        )
    except BaseException:
        planner.undo()
        raise
    if planner.weights is not None:
        planner.weights.close()
    return engine


def _end_earlier_engine(model: nn.Module) -> None:
    """Detach an engine that holds this model: a notebook cell that is run twice prepares its model twice."""
    for engine in attached_engines():
        if engine.model is model:
            log.warning(
                "the model is prepared already: its engine is detached, its weights stay, its optimizer state is new"
            )
            engine.end("outsize.prepare was called again for its model")


def preview(model: nn.Module, batch: Any, **settings: Any) -> PlannedModel:
    """The plan that `prepare` would make with the same arguments."""
    return preview_as(model, batch, PrepareRequest(**settings))


@host_rng_untouched()
def preview_as(model: nn.Module, batch: Any, request: PrepareRequest) -> PlannedModel:
    """The plan that `prepare_as` would make. Only the profiling run allocates memory."""
    planner = Planner(model, request)
    with planner.restored():
        return planner.plan(model, batch, planner.step_config)


@host_rng_untouched()
def choose_micro_batch(
    model: nn.Module,
    splits: Sequence[Split],
    request: PrepareRequest,
    *,
    batch_of: Callable[[int], Any],
    optimizer_for: Callable[[Split], OptimizerSpec],
) -> Choice[PlannedModel]:
    """Find the split of a batch that trains fastest on this device. The model is not changed.

    Args:
        request: its optimizer, accumulate and max_shape are ignored.
        batch_of: makes a batch of so many rows to plan for.
        optimizer_for: the optimizer for a split: whether it updates in backward may depend on it.
    """

    def requested(split: Split) -> PrepareRequest:
        return replace(request, optimizer=optimizer_for(split), accumulate=split.passes, max_shape=None)

    planner = Planner(model, requested(splits[0]))

    def solve(found: Traced, split: Split) -> PlannedModel:
        return planner.solve(found, requested(split).step_config)

    with planner.restored():
        return fastest(splits, lambda rows: planner.measure(batch_of(rows), None), solve)


# Models that only run forward beside the trained one: reference models and reward models.

_FORWARD_ONLY_SHARE = 0.25
"""Of gpu_memory that such a model may use, unless it needs more."""


@host_rng_untouched()
def prepare_forward_only(
    model: nn.Module,
    batch: Any,
    run: Callable[[nn.Module, Any], object],
    request: PrepareRequest,
    *,
    least: bool = False,
    only_weights: bool = False,
) -> Engine:
    """Prepare a model without trainable parameters for forward passes alone. What does not fit is streamed.

    Args:
        run: calls the model with a batch, as the training loop does.
        request: that of the trained model. Both together may use its memory.
        least: use as little GPU memory as possible. Default: at most a quarter of `gpu_memory`, or the minimum if that
            is more.
        only_weights: budget the weights alone. The plan of the trained model includes its activations.
    """

    def loss(model: nn.Module, batch: Any) -> None:
        run(model, batch)

    own = PrepareRequest(
        gpu_memory=request.gpu_memory,
        host_memory=request.host_memory,
        device=request.device,
        chunk_bytes=request.chunk_bytes,
        chunked_loss=False,
        loss=loss,
    )
    planner = Planner(model, own)
    total = planner.gpu_bytes
    found = planner.measure(pad_to_shape(batch, request.max_shape), None)

    def plan(num_bytes: int) -> PlannedModel:
        return planner.solve(found, planner.step_config, gpu_bytes=num_bytes)

    try:
        planned = plan(1 if least else int(total * _FORWARD_ONLY_SHARE))
    except PlanInfeasible as error:
        if error.resource != "gpu" or error.needed_bytes > total:
            raise
        needed = error.needed_bytes
        planned = plan(needed)
    # The trained model gets what this one does not need.
    made = planned.plan
    budget = made.estimate.gpu_bytes
    if only_weights:
        place = Placement(planned.graph, planned.layout, made.decision, made.step_config, made.work, made.shared)
        constants = (*model.buffers(), *distinct_tables(model))
        budget = sum(place.gpu.values()) + sum(tensor.nbytes for tensor in constants)
    planned = replace(planned, plan=replace(made, gpu_budget_bytes=budget))
    return Engine(model, planner.layers, planned, device=planner.device, optimizer=own.optimizer, planner=planner.plan)
