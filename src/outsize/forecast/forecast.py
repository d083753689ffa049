"""`outsize.plan`: what a run would need and how fast it would be, from a model's config alone. No weights, no GPU, next
to no memory.

The same tracer and planner as in `prepare` run here, on fake tensors: shapes and lifetimes without contents. So bytes
are counted and not guessed (of CPU operators, which save the same tensors as CUDA's to within small change), and
seconds are a roofline of the machine asked about, with what issuing takes its Python. What depends on a model's weights
has no value here: a model that branches on them (some routers do) is refused, and `prepare` measures it.
"""

import copy
import logging
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outsize import compat
from outsize.base.errors import ConfigError, ModelUnsupported, OutsizeError, tell
from outsize.base.log import log
from outsize.base.units import exact_bytes, is_count, parse_bytes, show_bytes
from outsize.compat import fake_tensor
from outsize.device.rng import host_rng_untouched
from outsize.device.sim import AbsentDevice
from outsize.forecast.example import Images, example_batch
from outsize.forecast.fake_weights import FakeWeights
from outsize.hardware.catalog import CATALOG, lookup
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES, ChunkLayout, pack
from outsize.loss.chunked_loss import ChosenLoss, trace_with_loss
from outsize.model.build import load_config, trainable_class
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.quantized import quantization_of
from outsize.plan.check import check
from outsize.plan.pins import Pins
from outsize.plan.plan import Plan, StepConfig
from outsize.plan.render import render
from outsize.planner.explain import Explanation, Problem, explain, what_if
from outsize.profile.scale import scaled
from outsize.profile.trace import ModelTrace, added_in_place
from outsize.profile.tracer import Tracer
from outsize.report.page import write_page
from outsize.report.step import describe, placement_of, step_of
from outsize.report.trace import write_trace
from outsize.runtime.optimizer import AdamW
from outsize.setup.micro_batch import Split, Traced, fastest, splits_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MANY_TOKENS = 2**18
"""Of a batch. The operators of a loss that is made in chunks grow with them, and with those the time to trace it;
beyond, a batch is scaled from two others.
"""
_UNKNOWABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)
_HERE = Path(__file__).resolve().parents[1]
_INSTEAD = (
    "Plan it where it runs: outsize.prepare(model, batch) measures with real weights and a real batch, and "
    "engine.plan is the plan"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A plan for a machine one may not have. Printed, it is the plan's table."""

    plan: Plan
    graph: BlockGraph
    layout: ChunkLayout
    problem: Problem
    """What it is the solution of, for further questions."""
    host_memory: str | int | None = None
    """As it was asked for, for every machine. None: each has its own."""

    @property
    def tokens_per_second(self) -> float:
        rows, tokens = self.plan.inputs["input_ids"]
        return rows * tokens * self.plan.step_config.accumulate / self.plan.estimate.step_seconds

    def explain(self) -> Explanation:
        """Why this plan, and what another machine would be worth. Takes seconds."""
        return explain(self.problem, self.plan)

    def what_if(self) -> str:
        """What 4 GiB more would gain, and the smallest machine of the catalog that fits."""
        return what_if(self.problem, self.plan, self.smallest_machine())

    def smallest_machine(self) -> str | None:
        """Of the catalog, by GPU memory and then by name; None if no one is large enough."""
        for spec in sorted(CATALOG.values(), key=lambda spec: (spec.gpu_bytes, spec.name)):
            least = self.problem.least_gpu_bytes(_host_budget(spec, self.host_memory))
            if least is not None and least <= _allowance(spec, None).usable_bytes:
                return spec.name
        return None

    def write_page(self, path: Path, *, title: str = "") -> None:
        """One HTML file: memory and lanes over one step, what every block does. `title`: what the model is called."""
        write_page(path, self.plan, self.graph, self.layout, self.problem.spec, title=title)

    def write_trace(self, path: Path) -> None:
        """What each lane does in one step, for Perfetto."""
        place = placement_of(self.plan, self.graph, self.layout)
        step = step_of(self.plan, self.graph, self.layout, self.problem.spec)
        write_trace(step.spans, path, describe=lambda name: describe(place, name))

    def __str__(self) -> str:
        return render(self.plan, self.graph, self.layout)


@host_rng_untouched()
def plan(
    model: Any,
    *,
    sequence_len: int = 2048,
    micro_batch_size: int | None = None,
    batch_size: int | None = None,
    hardware: str = "rtx4090",
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    accumulate: int | None = None,
    optimizer: AdamW | None = None,
    pins: Pins | None = None,
    dtype: str = "bfloat16",
    chunk_bytes: str | int = DEFAULT_CHUNK_BYTES,
    chunked_loss: bool | None = None,
    images: int | None = None,
    image_size: int = 1024,
) -> Forecast:
    """Plan the training of a model on a machine, neither of which needs to be at hand.

    Args:
        model: a folder with a config.json, that file, a hub id whose config can be loaded, or a transformers config
        object.
        sequence_len: tokens of a row; batches are taken to be full, without padding.
        micro_batch_size: rows of a batch. Default: 1; with `batch_size`, the fastest.
        batch_size: rows of an optimizer step. Micro-batches and accumulation follow from it.
        hardware: a machine of the catalog, a .yaml file of one (`outsize probe --save`), or a size such as "64MiB" for
        a small simulated one.
        gpu_memory: most GPU memory to use, CUDA context included. Default: all of the machine's.
        host_memory: most host memory to use. Default: the machine's, less a tenth.
        accumulate: backward passes per step. Default: 1, or what `batch_size` makes of it.
        optimizer: what of its settings matters to memory: `update`, `fp32_grads`.
        pins: parts of the plan to fix.
        dtype: of the weights, "bfloat16" or "float32".
        chunk_bytes: upper bound of a chunk.
        chunked_loss: whether the loss is made in chunks of tokens, as in `prepare`.
        images: of a row, for models that see; their tokens are part of `sequence_len`. Default: 1 for those. 0: text
        alone.
        image_size: height and width of an image in pixels, where the model takes any size.

    Raises:
        PlanInfeasible: with the smallest memory that would do.
        ModelUnsupported: the model branches on values that only real weights give.
    """
    given = {
        "sequence_len": sequence_len,
        "micro_batch_size": micro_batch_size,
        "batch_size": batch_size,
        "accumulate": accumulate,
    }
    wrong = [f"{name} is {value!r}" for name, value in given.items() if value is not None and not is_count(value)]
    if wrong or dtype not in DTYPES:
        found = "; ".join([*wrong, *([] if dtype in DTYPES else [f"dtype is {dtype!r}"])])
        raise ConfigError(
            tell(f"{', '.join(given)} are whole numbers from 1, and dtype is bfloat16 or float32", found, "Correct it")
        )
    splits = splits_of(batch_size, micro_batch_size, accumulate)
    spec = lookup(hardware)
    allowance, host_budget = _allowance(spec, gpu_memory), _host_budget(spec, host_memory)
    settings = optimizer or AdamW()
    config = _config(model)

    pictures = Images(per_row=images, pixels=image_size)

    def trace(rows: int) -> Traced:
        few = max(2, MANY_TOKENS // (2 * sequence_len))
        if rows > 2 * few:
            one, other = trace(few), trace(2 * few)
            many = scaled(one.point, other.point, rows)
            if many is not None and other.makes_its_loss_alike(rows):
                return replace(other, rows=rows, trace=many)
        graph, found, loss = fake_trace(
            copy.deepcopy(config),
            spec,
            rows=rows,
            tokens=sequence_len,
            dtype=DTYPES[dtype],
            chunked_loss=chunked_loss,
            images=pictures,
        )
        is_real = spec.context_bytes > 0  # else it is for `sim`, which counts as we do
        return Traced(rows=rows, graph=graph, trace=added_in_place(found, graph) if is_real else found, loss=loss)

    def solve(found: Traced, split: Split) -> Forecast:
        graph, loss = found.graph, found.loss
        layout = pack(graph, parse_bytes(chunk_bytes, name="chunk_bytes"))
        step_config = StepConfig(update=settings.update, accumulate=split.passes, fp32_grads=settings.fp32_grads)
        problem = Problem(
            graph=graph,
            layout=layout,
            trace=found.trace,
            spec=spec,
            step_config=step_config,
            gpu=allowance,
            host_bytes=host_budget,
            pins=pins or Pins(),
        )
        made = problem.solve()
        check(made, graph, layout)
        told = replace(made, loss=loss.text, loss_chunk=loss.chunk)
        return Forecast(plan=told, graph=graph, layout=layout, problem=problem, host_memory=host_memory)

    choice = fastest(splits, trace, solve)
    made = choice.answer
    return (
        replace(made, plan=replace(made.plan, search=f"{made.plan.search}; {choice.words}")) if choice.words else made
    )


# The machine.


def _allowance(spec: HardwareSpec, gpu_memory: str | int | None) -> GpuBudget:
    """On a real card the context and the allocator's loss come off."""
    asked = spec.gpu_bytes if gpu_memory is None else parse_bytes(gpu_memory, name="gpu_memory")
    if asked > spec.gpu_bytes:
        found = f"{exact_bytes(asked)} was asked for"
        raise ConfigError(
            tell(
                f"gpu_memory is at most the {show_bytes(spec.gpu_bytes)} of {spec.name}",
                found,
                "Ask for less, or name other hardware",
            )
        )
    allowance = GpuBudget(total_bytes=asked, fixed_bytes=spec.context_bytes, share=spec.allocator_share)
    if allowance.usable_bytes <= 0:
        least = f"gpu_memory is more than the {show_bytes(spec.context_bytes)} that a CUDA process takes by itself"
        raise ConfigError(tell(least, f"{exact_bytes(asked)} was given", "Give more"))
    return allowance


def _host_budget(spec: HardwareSpec, host_memory: str | int | None) -> int:
    """The machine's own size is no limit to what is asked for: boxes with one GPU have any amount of RAM."""
    return int(spec.host_bytes * 0.9) if host_memory is None else parse_bytes(host_memory, name="host_memory")


# The model.


def _config(model: Any) -> Any:
    from transformers import PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    if not isinstance(model, (str, Path)):
        found = f"{type(model).__name__} was given"
        raise ConfigError(
            tell(
                "model is a path, a hub id or a transformers config",
                found,
                "For a model object use outsize.prepare, or give its config",
            )
        )
    config = load_config(model, may_be_quantized=True)
    if (method := quantization_of(config.to_dict())) is not None:
        log.warning(
            "%s: its weights are quantized with %s. The plan is for the unquantized model, which training needs.",
            model,
            method,
        )
    return config


def fake_trace(
    config: Any,
    spec: HardwareSpec,
    *,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    chunked_loss: bool | None = None,
    images: Images | None = None,
) -> tuple[BlockGraph, ModelTrace, ChosenLoss]:
    """Trace a model that exists as shapes alone, and tell how its loss is made. The config is changed: it is ours."""
    kind = trainable_class(config)
    text = config.get_text_config()
    config.use_cache = text.use_cache = False  # nobody generates while training
    limit = getattr(text, "max_position_embeddings", None)
    too_long = isinstance(limit, int) and tokens > limit
    complaints = logging.getLogger(fake_tensor.__name__)
    complaints.disabled, was = True, complaints.disabled  # torch logs a traceback of what is raised anyway
    batch: dict[str, Tensor] = {}
    try:
        with torch.random.fork_rng(devices=[]), FakeWeights():
            built = cache(lambda: _without_values(kind, config, dtype).train())
            example = example_batch(kind, config, rows=rows, tokens=tokens, images=images or Images(), model=built)
            batch, model = example.batch, built()
            layers = find_layers(model)
            (graph, trace), loss = trace_with_loss(
                model, batch, lambda _: Tracer(model, batch, layers, AbsentDevice(spec)).trace(), wanted=chunked_loss
            )
    except OutsizeError:
        raise
    except _UNKNOWABLE as error:
        found = f"{kind.__name__} needs the result of {getattr(error, 'func', None) or error}"
        raise ModelUnsupported(
            tell("what a model runs does not depend on the values in its weights", found, _INSTEAD)
        ) from error
    except Exception as error:
        if _is_ours(error):
            raise
        found = f"it breaks off with {type(error).__name__}: {error}"
        if "pixel_values" in batch:
            expected = f"{kind.__name__} runs on shapes alone, with images as outsize's own example batch has them"
            raise ModelUnsupported(tell(expected, found, _INSTEAD)) from error
        if too_long:
            found = f"sequence_len is {tokens} and the model breaks off: {error}"
            raise ConfigError(
                tell(f"sequence_len is at most the model's max_position_embeddings of {limit}", found, "Shorten it")
            ) from error
        raise ModelUnsupported(tell(f"{kind.__name__} runs on shapes alone", found, _INSTEAD)) from error
    finally:
        complaints.disabled = was
    if too_long:
        log.warning("sequence_len %d is more than the %s positions that %s was made for", tokens, limit, kind.__name__)
    of_what = "FLOPs, bytes and operators" if trace.counts_launches else "FLOPs and bytes"
    provenance = f"bytes of {kind.__name__} counted on fake tensors (CPU operators), seconds estimated from {of_what}"
    inputs = {
        name: shape for name, shape in trace.inputs.items() if name != "position_ids"
    }  # which models make themselves
    return (
        graph,
        replace(trace, inputs=inputs, provenance=f"{example.text}; {provenance}" if example.text else provenance),
        loss,
    )


def _is_ours(error: Exception) -> bool:
    """Whether outsize's own code raised it: a mistake of ours is not laid at the model's door."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(_HERE)


def _without_values(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """A model whose weights are not drawn: some draws look at what they drew, and weights of shapes alone have nothing
    to look at.
    """
    try:
        with compat.transformers().no_init_weights():
            model: Any = kind._from_config(config, dtype=dtype)
    except (KeyError, TypeError, AttributeError, ImportError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(
            tell(
                f"transformers makes a {kind.__name__} of the config",
                found,
                "Correct the config, or install what is missing",
            )
        ) from error
    model.tie_weights()  # which transformers does when it draws
    return model
