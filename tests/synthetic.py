"""Models that exist as numbers alone: graphs, traces and machines for tests of the planner.

`make_graph` and `make_trace` give a decoder of plausible proportions; `random_case` an odd small one (uneven blocks,
tied and frozen parameters, strategies missing here and there), the same for the same seed.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from outsize.base.records import fingerprint
from outsize.hardware.catalog import lookup
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout, pack
from outsize.model.graph import Block, BlockGraph, Param
from outsize.model.work import SharedTensor, Work
from outsize.optim.adamw import RULE
from outsize.profile.trace import ModelTrace
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Decision, Homes, StepConfig

MACHINE = lookup("64MiB")


def make_step_config(**how: Any) -> StepConfig:
    return StepConfig(optimizer=RULE.layout, **how)


def make_homes(weights: str, optimizer: str, is_trainable: bool = True) -> Homes:
    """`optimizer`: `gpu` and `host` are state home and update site; `streamed` is state on the host, updated on the GPU."""
    state, update = {"streamed": ("host", "gpu")}.get(optimizer, (optimizer, optimizer))
    if not is_trainable:
        state = update = weights
    return Homes(weights=weights, state=state, update=update)  # type: ignore[arg-type]


NOTHING = Work(
    forward_seconds=0.0,
    backward_seconds=0.0,
    forward_peak_bytes=0,
    forward_delta_bytes=0,
    backward_peak_bytes=0,
    backward_delta_bytes=0,
    sent_bytes=0,
    released_bytes=0,
)
"""A call that costs nothing: tests replace what they are about."""


@dataclass(frozen=True, kw_only=True)
class Case:
    graph: BlockGraph
    layout: ChunkLayout
    trace: ModelTrace
    step_config: StepConfig = StepConfig(optimizer=RULE.layout)
    spec: HardwareSpec = MACHINE

    def place(self, decision: Decision) -> Placement:
        work = self.trace.works(decision.strategies)
        return Placement(self.graph, self.layout, decision, self.step_config, work, self.trace.shared)

    def decide(
        self,
        homes: str | list[str] = "gpu/gpu",
        strategies: str | list[str] = "keep",
        depth: int = 0,
        host_update_interval: int = 1,
    ) -> Decision:
        """`homes` per chunk or for all (`host/gpu`: weights/optimizer; `host/streamed`: streamed state); `strategies` per call or for all layers."""
        per_chunk = [homes] * len(self.layout.chunks) if isinstance(homes, str) else homes
        if isinstance(strategies, str):
            strategies = [
                strategies if strategies in self.trace.strategies(v) else "keep" for v in range(len(self.graph.calls))
            ]
        both = tuple(
            make_homes(*text.split("/"), chunk.is_updated)
            for text, chunk in zip(per_chunk, self.layout.chunks, strict=True)
        )
        return Decision(
            homes=both, strategies=tuple(strategies), depth=depth, host_update_interval=host_update_interval
        )  # type: ignore[arg-type]


def make_graph(
    num_layers: int,
    num_chunks: int = 1,
    *,
    numel: int = 4096,
    tied: bool = False,
    frozen: int = 0,
    dtype: str = "bfloat16",
) -> BlockGraph:
    """Stem, layers, head. A layer has `num_chunks` parameters of `numel` elements; the first `frozen` blocks do not
    train.
    """
    layers = [f"model.layers.{i}" for i in range(num_layers)]
    shape = (numel,)
    params = [Param(name="embed.weight", shape=(2 * numel,), dtype=dtype, trainable=frozen == 0)]
    blocks = [Block(name="stem", kind="stem", structure="stem", params=("embed.weight",))]
    for i, layer in enumerate(layers):
        names = tuple(f"{layer}.p{j}.weight" for j in range(num_chunks))
        params += [Param(name=name, shape=shape, dtype=dtype, trainable=i + 1 >= frozen) for name in names]
        blocks.append(Block(name=layer, kind="layer", structure="layer", params=names))
    if not tied:
        params.append(Param(name="lm_head.weight", shape=(2 * numel,), dtype=dtype, trainable=True))
    blocks.append(
        Block(name="head", kind="head", structure="head", params=("embed.weight" if tied else "lm_head.weight",))
    )
    has_backward = tuple(i >= frozen for i in range(len(blocks)))
    return BlockGraph(
        blocks=tuple(blocks),
        calls=tuple(range(len(blocks))),
        has_backward=has_backward,
        params=tuple(params),
        buffer_bytes=512,
    )


def layer_work(*, input_bytes: int, saved_bytes: int, seconds: float) -> dict[str, Work]:
    """One layer under each strategy: `saved_bytes` are kept for backward beside the output, which is as large as the
    input.
    """
    inner = max(saved_bytes // 2, input_bytes)  # what is alive at once beside the saved tensors, the output among it
    keep = Work(
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        forward_peak_bytes=saved_bytes + inner,
        forward_delta_bytes=saved_bytes + input_bytes,
        backward_peak_bytes=inner,
        backward_delta_bytes=-saved_bytes - input_bytes,
        sent_bytes=0,
        released_bytes=0,
    )
    again = dataclasses.replace(
        keep,
        backward_seconds=3 * seconds,
        forward_peak_bytes=saved_bytes // 2 + inner,
        forward_delta_bytes=input_bytes,
        backward_peak_bytes=saved_bytes + inner,
        backward_delta_bytes=-input_bytes,
    )
    offload = dataclasses.replace(again, sent_bytes=input_bytes, released_bytes=input_bytes, backward_delta_bytes=0)
    swap = dataclasses.replace(
        keep, sent_bytes=saved_bytes, released_bytes=saved_bytes, backward_delta_bytes=-input_bytes
    )
    return {"keep": keep, "recompute": again, "offload": offload, "swap": swap}


def make_trace(
    graph: BlockGraph,
    *,
    input_bytes: int = 2048,
    saved_bytes: int = 24576,
    seconds: float = 2e-6,
    held_bytes: int = 4096,
) -> ModelTrace:
    region = layer_work(input_bytes=input_bytes, saved_bytes=input_bytes, seconds=seconds)["keep"]
    calls = []
    for call, backward in enumerate(graph.has_backward):
        if not backward:
            forward = dataclasses.replace(
                NOTHING, forward_seconds=seconds, forward_peak_bytes=saved_bytes, forward_delta_bytes=0
            )
            calls.append({"keep": forward})
        elif graph.blocks[graph.calls[call]].kind == "layer":
            calls.append(layer_work(input_bytes=input_bytes, saved_bytes=saved_bytes, seconds=seconds))
        else:
            calls.append({"keep": region})
    return ModelTrace(
        graph=fingerprint(graph),
        inputs={"input_ids": (1, 128)},
        calls=tuple(calls),
        shared=(),
        held_bytes=held_bytes,
        provenance="invented for tests",
    )


def make_case(
    num_layers: int = 4,
    num_chunks: int = 1,
    *,
    step_config: StepConfig | None = None,
    spec: HardwareSpec = MACHINE,
    **graph_options: object,
) -> Case:
    graph = make_graph(num_layers, num_chunks, **graph_options)  # type: ignore[arg-type]
    largest = max(param.nbytes for param in graph.params)
    layout = pack(graph, chunk_bytes=min(p.nbytes for p in graph.params) if num_chunks > 1 else largest)
    return Case(
        graph=graph, layout=layout, trace=make_trace(graph), step_config=step_config or make_step_config(), spec=spec
    )


def random_case(seed: int, *, max_layers: int = 3) -> Case:
    """A small model with all the oddities the planner must cope with."""
    rng = random.Random(seed)
    num_layers = rng.randint(1, max_layers)
    params: dict[str, Param] = {}

    def some_params(prefix: str) -> list[str]:
        names = []
        for i in range(rng.randint(0, 2)):
            numel, dtype = rng.choice([128, 256, 300, 1024, 4000]), rng.choice(["bfloat16", "bfloat16", "float32"])
            param = Param(name=f"{prefix}.{i}", shape=(numel,), dtype=dtype, trainable=rng.random() < 0.8)
            params[param.name] = param
            names.append(param.name)
        return names

    names = ["stem", *(f"layers.{i}" for i in range(num_layers)), "head"]
    kinds = ["stem", *["layer"] * num_layers, "head"]
    owned = [some_params(name) for name in names]
    if rng.random() < 0.4:  # tied weights
        first, second = sorted(rng.sample(range(len(names)), 2))
        owned[second] += owned[first][:1]
    if not params:
        params["head.0"] = Param(name="head.0", shape=(256,), dtype="float32", trainable=True)
        owned[-1].append("head.0")
    frozen = rng.randint(0, num_layers) if rng.random() < 0.3 else 0
    blocks = tuple(
        Block(name=n, kind=k, structure=n, params=tuple(dict.fromkeys(o)))
        for n, k, o in zip(names, kinds, owned, strict=True)
    )  # type: ignore[arg-type]
    graph = BlockGraph(
        blocks=blocks,
        calls=tuple(range(len(blocks))),
        has_backward=tuple(i >= frozen for i in range(len(blocks))),
        params=tuple(params.values()),
        buffer_bytes=rng.choice([0, 100]),
    )
    calls = []
    for call in range(len(names)):
        size = rng.choice([256, 512, 2048])
        table = layer_work(input_bytes=size, saved_bytes=size * rng.randint(1, 12), seconds=rng.uniform(0.2e-6, 5e-6))
        if kinds[call] != "layer" or call < frozen:
            table = {"keep": table["keep"]}
        else:
            for name in rng.sample(["recompute", "offload", "swap"], rng.choice([0, 0, 1])):
                del table[name]
        calls.append(table)
    other = random.Random(-seed)
    shared = []
    for call in range(
        2, num_layers + 1
    ):  # an output, which the layer that made it keeps, or the next one, or a caller's frame
        if call - 1 >= frozen and other.random() < 0.5:
            strategies = [tuple(s for s in calls[v] if other.random() < 0.5) for v in (call - 1, call)]
            sends = tuple(s for s in calls[call] if s in ("offload", "swap") and s not in strategies[1])
            size = other.choice([256, 2048])
            calls[call - 1] = {
                s: dataclasses.replace(w, forward_peak_bytes=w.forward_peak_bytes + size)
                for s, w in calls[call - 1].items()
            }
            shared.append(
                SharedTensor(
                    call=call - 1,
                    role="output",
                    number=0,
                    num_bytes=size,
                    allocated_in=call - 1,
                    freed_in=call + other.randint(1, 2),
                    held_by=((call - 1, strategies[0]), (call, strategies[1])),
                    sent_by=((call, sends),),
                )
            )
    if other.random() < 0.3:
        calls[-1]["after recompute"] = dataclasses.replace(
            calls[-1]["keep"], forward_peak_bytes=calls[-1]["keep"].forward_peak_bytes + 700
        )
    takers = tuple(v for v in range(len(names)) if kinds[v] == "layer")
    kept_by = rng.choice([(), ("keep",), ("keep", "swap"), ("recompute", "offload")])
    held_by = tuple((call, kept_by) for call in takers if call >= frozen)
    mask = SharedTensor(call=1, role="argument", number=1, num_bytes=300, held_by=held_by, freed_in=len(names) - 1)
    trace = ModelTrace(
        graph=fingerprint(graph),
        inputs={"x": (2, 8)},
        calls=tuple(calls),
        shared=(*shared, *([mask] if rng.random() < 0.4 else [])),
        held_bytes=rng.choice([0, 64, 4096]),
        provenance="random",
    )
    step_config = make_step_config(
        update=rng.choice(["after_step", "in_backward"]),
        accumulate=rng.choice([1, 1, 2]),
        fp32_grads=rng.random() < 0.3,
    )
    return Case(
        graph=graph, layout=pack(graph, chunk_bytes=rng.choice([512, 2048, 8192])), trace=trace, step_config=step_config
    )


def random_decision(case: Case, seed: int) -> Decision:
    """Any legal decision, not only those the search would look at."""
    rng = random.Random(seed)
    homes = [
        rng.choice([f"{w}/{o}" for w in ("gpu", "host") for o in ("gpu", "host", "streamed")])
        for _ in case.layout.chunks
    ]
    strategies = [rng.choice(case.trace.strategies(v)) for v in range(len(case.graph.calls))]
    return case.decide(homes, strategies, rng.randint(0, 3), rng.randint(1, 3))
