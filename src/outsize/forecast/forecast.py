"""`outsize.plan`: memory and speed of a training run, from a model's config alone. No weights, no GPU, little memory.

The tracer and planner of `prepare` run on fake tensors. So bytes are counted, not estimated (of CPU operators, which
save the same tensors as CUDA's except for small ones), and seconds are a roofline of the given machine plus the CPU
time of kernel launches. A model that branches on the values of its weights (some routers do) is refused; `prepare`
measures it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.base.units import exact_bytes, is_count, parse_bytes, show_bytes
from outsize.device.rng import host_rng_untouched
from outsize.forecast.example import Images
from outsize.forecast.fake_trace import config_of, fake_trace
from outsize.hardware.catalog import CATALOG, DEFAULT_HARDWARE, lookup
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES, ChunkLayout, pack
from outsize.layout.coordinates import Coordinates
from outsize.model.adapter import Adapter
from outsize.model.build import overridden
from outsize.model.graph import BlockGraph
from outsize.model.quantized import quantization_of, quantization_section
from outsize.model.strategies import TILE_TOKENS
from outsize.optim.method import MethodSpec
from outsize.optim.names import default_spec
from outsize.optim.spec import OptimizerSpec
from outsize.planner.explain import Explanation, Problem, explain, what_if
from outsize.profile.trace import added_in_place
from outsize.quant.settings import Quantization, stored_quantization
from outsize.report.page import write_page
from outsize.report.step import describe, placement_of, step_of
from outsize.report.trace import write_trace
from outsize.schedule.check import check
from outsize.schedule.pins import Pins
from outsize.schedule.plan import Plan
from outsize.schedule.render import render
from outsize.setup.micro_batch import Split, Traced, fastest, splits_of
from outsize.setup.request import PlanRequest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRequest(PlanRequest):
    """Settings of a plan for a model and a machine that need not be present. `plan` describes them."""

    sequence_len: int = 2048
    micro_batch_size: int | None = None
    batch_size: int | None = None
    hardware: str | HardwareSpec = DEFAULT_HARDWARE
    dtype: str = "bfloat16"
    images: int | None = None
    image_size: int = 1024
    adapter: Adapter | None = None
    """None: all weights are trained."""
    quantization: Quantization | None = None
    """Of the linear layers below the adapter."""
    config_overrides: dict[str, Any] | None = None
    """Values of the model's config that replace the saved ones."""
    rope_parameters: dict[str, Any] | None = None
    """Values of its rotary embeddings that replace the saved ones."""
    attn_implementation: str | None = None
    """None: transformers' choice."""
    reserved_host_bytes: int = 0
    """Host memory for another model."""
    batch_of: Callable[[int], dict[str, Tensor]] | None = None
    """Makes the batch to plan for, by its number of rows. None: full rows without padding (forecast/example.py)."""

    def __post_init__(self) -> None:
        counts = ("sequence_len", "micro_batch_size", "batch_size", "accumulate")
        given = {name: getattr(self, name) for name in counts}
        wrong = [f"{name} is {value!r}" for name, value in given.items() if value is not None and not is_count(value)]
        wrong += [f"dtype is {self.dtype!r}"] if self.dtype not in DTYPES else []
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}. {', '.join(counts)} are whole numbers from 1, and dtype is bfloat16 or float32."
            )
        if self.quantization is not None and self.adapter is None:
            name = "load_in_4bit" if self.quantization.load_in_4bit else "load_in_8bit"
            raise ConfigError(
                f"{name}: only adapters are trained over quantized weights. Add adapter lora, or remove {name}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A plan for a machine that need not be present. Its text is the plan's table."""

    plan: Plan
    graph: BlockGraph
    layout: ChunkLayout
    problem: Problem
    """The inputs of the search, for further searches."""
    host_memory: str | int | None = None
    """As requested, for every machine. None: each has its own."""
    reserved_host_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        rows, tokens = self.plan.inputs["input_ids"]
        return rows * tokens * self.plan.step_config.accumulate / self.plan.estimate.step_seconds

    @property
    def weight_bytes(self) -> int:
        return sum(param.nbytes for param in self.graph.params)

    @property
    def is_quantized(self) -> bool:
        """Whether a base is quantized: its scales stand for no weights."""
        return any(param.stands_for is not None for param in self.graph.params)

    def explain(self) -> Explanation:
        """Why this plan, and what another machine would gain. Takes seconds."""
        return explain(self.problem, self.plan)

    def what_if(self) -> str:
        """What 4 GiB more would gain, and the smallest machine of the catalog that fits."""
        return what_if(self.problem, self.plan, self.smallest_machine())

    def smallest_machine(self) -> str | None:
        """The smallest machine of the catalog that fits, by GPU memory and then by name. None if none does."""
        for spec in sorted(CATALOG.values(), key=lambda spec: (spec.gpu_bytes, spec.name)):
            host_bytes = _host_bytes(spec, self.host_memory) - self.reserved_host_bytes
            least = self.problem.least_gpu_bytes(max(0, host_bytes))
            if least is not None and least <= _gpu_budget(spec, None).usable_bytes:
                return spec.name
        return None

    def machine_text(self) -> str:
        """Memory of the machine. A machine of the catalog may have any amount of RAM, so what is assumed is stated."""
        spec = self.problem.spec
        given = f"{show_bytes(self.problem.host_bytes)} host memory"
        if self.host_memory is None:
            given = f"{show_bytes(spec.host_bytes)} host memory, a tenth of it left free; host_memory sets another size"
        return f"machine {spec.name}: {show_bytes(spec.gpu_bytes)} GPU, {given}"

    def write_page(self, path: Path, *, title: str = "") -> None:
        """Write one HTML file: memory and lanes over one step, and what every block does. `title`: the model's name."""
        write_page(path, self.plan, self.graph, self.layout, self.problem.spec, title=title)

    def write_trace(self, path: Path) -> None:
        """Write what each lane does in one step, for Perfetto."""
        place = placement_of(self.plan, self.graph, self.layout)
        step = step_of(self.plan, self.graph, self.layout, self.problem.spec)
        write_trace(step.spans, path, describe=lambda name: describe(place, name))

    def __str__(self) -> str:
        return render(self.plan, self.graph, self.layout)


def plan(
    model: Any,
    *,
    sequence_len: int = 2048,
    micro_batch_size: int | None = None,
    batch_size: int | None = None,
    hardware: str = DEFAULT_HARDWARE,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    accumulate: int | None = None,
    optimizer: OptimizerSpec | None = None,
    method: MethodSpec | None = None,
    pins: Pins | None = None,
    dtype: str = "bfloat16",
    chunk_bytes: str | int = DEFAULT_CHUNK_BYTES,
    chunked_loss: bool | None = None,
    tile_tokens: int = TILE_TOKENS,
    images: int | None = None,
    image_size: int = 1024,
    peft_config: Any = None,
    quantization: Quantization | None = None,
) -> Forecast:
    """Plan the training of a model on a machine. Neither needs to be present.

    Args:
        model: a folder with a config.json, that file, a hub id whose config can be loaded, or a transformers config.
        sequence_len: tokens of a row. Batches are full, without padding.
        micro_batch_size: rows of a batch. Default: 1; with `batch_size`, the fastest.
        batch_size: rows of an optimizer step. Micro-batch and accumulation follow from it.
        hardware: a machine of the catalog, a machine's .yaml file (`outsize probe --save`), or a size such as "64MiB"
            for a small simulated one.
        gpu_memory: maximum GPU memory, CUDA context included. Default: all of the machine's.
        host_memory: maximum host memory. Default: the machine's, less a tenth.
        accumulate: backward passes per step. Default: 1, or what `batch_size` leaves.
        optimizer: of its settings, those that change memory: `update`, `fp32_grads`.
        method: trains some weights in coordinates, as in `prepare`.
        pins: parts of the plan to fix.
        dtype: of the weights, "bfloat16" or "float32".
        chunk_bytes: maximum size of a chunk.
        chunked_loss: whether the loss is computed in chunks of tokens, as in `prepare`.
        tile_tokens: length of the tiles of long rows, as in `prepare`.
        images: images per row, for vision models; their tokens are part of `sequence_len`. Default: 1. 0: text alone.
        image_size: height and width of an image in pixels, if the model takes any size.
        peft_config: a config of PEFT, such as `peft.LoraConfig(r=16, target_modules="all-linear")`: the adapter is
            trained, in the model's dtype, with fused layers (`outsize.fuse_lora`).
        quantization: of the linear layers below the adapter, an `outsize.quant.settings.Quantization`.

    Raises:
        PlanInfeasible: with the smallest memory that would be enough.
        ModelUnsupported: the model branches on the values of its weights.
    """
    request = ForecastRequest(
        sequence_len=sequence_len,
        micro_batch_size=micro_batch_size,
        batch_size=batch_size,
        hardware=hardware,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        accumulate=accumulate,
        optimizer=optimizer or default_spec(),
        method=method,
        pins=pins,
        dtype=dtype,
        chunk_bytes=chunk_bytes,
        chunked_loss=chunked_loss,
        tile_tokens=tile_tokens,
        images=images,
        image_size=image_size,
        adapter=None if peft_config is None else Adapter(peft_config=peft_config),
        quantization=quantization,
    )
    return forecast(model, request)


@host_rng_untouched()
def forecast(model: Any, request: ForecastRequest) -> Forecast:
    """`plan`, with its settings as one record."""
    return _OfflinePlanner(model, request).plan()


class _OfflinePlanner:
    """The counterpart of `setup.planner.Planner` for a model and a machine that need not be present."""

    def __init__(self, model: Any, request: ForecastRequest):
        self._request = request
        self._splits = splits_of(request.batch_size, request.micro_batch_size, request.accumulate)
        self._spec = request.hardware if isinstance(request.hardware, HardwareSpec) else lookup(request.hardware)
        self._gpu = _gpu_budget(self._spec, request.gpu_memory)
        self._host_bytes = max(0, _host_bytes(self._spec, request.host_memory) - request.reserved_host_bytes)
        self._config = overridden(config_of(model), request.config_overrides, request.rope_parameters)
        if request.attn_implementation is not None:
            self._config._attn_implementation = request.attn_implementation
        self._quantization = request.quantization
        section = quantization_section(self._config.to_dict())
        if section is not None and request.adapter is not None:
            self._quantization = stored_quantization(section) or self._quantization
        if section is not None and self._quantization is None:
            method = quantization_of(self._config.to_dict())
            log.warning("%s: its weights are quantized with %s. The plan is for the unquantized model.", model, method)
        self._images = Images(per_row=request.images, pixels=request.image_size)
        self._coordinates: dict[str, Coordinates] = {}

    def plan(self) -> Forecast:
        """The forecast of the fastest split of the batch."""
        choice = fastest(self._splits, self._trace, self._solve)
        found = choice.answer
        if not choice.words:
            return found
        return replace(found, plan=replace(found.plan, search=f"{found.plan.search}; {choice.words}"))

    def _trace(self, rows: int) -> Traced:
        request, spec = self._request, self._spec
        graph, trace, loss = fake_trace(
            copy.deepcopy(self._config),
            spec,
            rows=rows,
            tokens=request.sequence_len,
            dtype=DTYPES[request.dtype],
            chunked_loss=request.chunked_loss,
            tile_tokens=request.tile_tokens,
            images=self._images,
            adapter=request.adapter,
            quantization=self._quantization,
            batch=request.batch_of(rows) if request.batch_of is not None else None,
            bind=self._bind,
        )
        is_real = spec.context_bytes > 0  # `sim` counts bytes as the trace does
        return Traced(rows=rows, graph=graph, trace=added_in_place(trace, graph) if is_real else trace, loss=loss)

    def _bind(self, model: nn.Module) -> None:
        if (method := self._request.method) is not None:
            self._coordinates = method.bind(model).coordinates

    def _solve(self, found: Traced, split: Split) -> Forecast:
        request, graph = self._request, found.graph
        chunk_bytes = parse_bytes(request.chunk_bytes, name="chunk_bytes")
        layout = pack(graph, chunk_bytes, in_coordinates=self._coordinates)
        step_config = replace(request, accumulate=split.passes).step_config
        problem = Problem(
            graph=graph,
            layout=layout,
            trace=found.trace,
            spec=self._spec,
            step_config=replace(step_config, coordinates=self._coordinates),
            gpu=self._gpu,
            host_bytes=self._host_bytes,
            pins=request.pins or Pins(),
        )
        made = problem.solve()
        check(made, graph, layout)
        made = replace(made, loss=found.loss.text, loss_chunk=found.loss.chunk)
        return Forecast(
            plan=made,
            graph=graph,
            layout=layout,
            problem=problem,
            host_memory=request.host_memory,
            reserved_host_bytes=request.reserved_host_bytes,
        )


def _gpu_budget(spec: HardwareSpec, gpu_memory: str | int | None) -> GpuBudget:
    """On a real card, CUDA context and allocator overhead are subtracted."""
    requested = spec.gpu_bytes if gpu_memory is None else parse_bytes(gpu_memory, name="gpu_memory")
    if requested > spec.gpu_bytes:
        raise ConfigError(
            f"gpu_memory {exact_bytes(requested)} is more than the {show_bytes(spec.gpu_bytes)} of {spec.name}. Lower "
            "gpu_memory, or set other hardware."
        )
    budget = GpuBudget(total_bytes=requested, fixed_bytes=spec.context_bytes, share=spec.allocator_share)
    if budget.usable_bytes <= 0:
        raise ConfigError(
            f"gpu_memory {exact_bytes(requested)} is too small: a CUDA process takes {show_bytes(spec.context_bytes)} "
            "by itself. Raise gpu_memory."
        )
    return budget


def _host_bytes(spec: HardwareSpec, host_memory: str | int | None) -> int:
    """A request may exceed the machine's own size: machines with one GPU have any amount of RAM."""
    return int(spec.host_bytes * 0.9) if host_memory is None else parse_bytes(host_memory, name="host_memory")
