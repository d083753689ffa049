"""PEFT adapters (LoRA, rsLoRA, DoRA): a frozen base that streams, a small part that trains and stays; the same bits as
plain PEFT under every plan.

Each case is a way of adapting a zoo model. It is trained under plans that have nothing in common but the model, on
`sim`, which refuses one byte more than the plan promised and any access that races with another.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import turns
import zoo
from cells import Outcome, Traced
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLayer
from safetensors.torch import load_file
from synthetic import make_homes
from torch import Tensor, nn

import outsize
from outsize.base.errors import EngineMisuse, PlanInfeasible
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.layout.chunks import ChunkLayout
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.strategies import Strategy
from outsize.profile import cache
from outsize.profile.trace import ModelTrace
from outsize.runtime.engine import Engine
from outsize.schedule.plan import Decision, UpdateMode

STEPS = 3
CHUNK_BYTES = 4 * 1024
ATTENTION = ("q_proj", "v_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    kind: str
    config: tuple[tuple[str, Any], ...]
    """Of LoraConfig."""
    dtype: torch.dtype = torch.bfloat16
    """Of the base."""
    fp32_adapters: bool = True
    """PEFT's own habit."""
    accumulate: int = 1
    clip: bool = False
    autocast: bool = False
    update: UpdateMode = "after_step"
    fused: bool = False
    """With outsize.fuse_lora."""

    @property
    def spec(self) -> outsize.AdamW:
        return outsize.AdamW(
            lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM if self.clip else None, update=self.update
        )

    def base(self) -> nn.Module:
        return zoo.make(self.kind, self.dtype)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = get_peft_model(
            self.base(), LoraConfig(**{"r": 4, **dict(self.config)}), autocast_adapter_dtype=self.fp32_adapters
        )
        with torch.no_grad():
            for name, param in model.named_parameters():
                if (
                    "lora_B" in name or "lora_embedding_B" in name
                ):  # fresh ones are zero, which gives the other factor no gradient
                    param.normal_(std=0.1)
        return (outsize.fuse_lora(model) if self.fused else model).train()

    def batches(self) -> list[dict[str, Tensor]]:
        return cells.batches(self.kind, 3)


def lora(kind: str, target_modules: Any, *, how: dict[str, Any] | None = None, **config: Any) -> Adapted:
    """`how`: fields of Adapted; the rest is for LoraConfig."""
    return Adapted(kind=kind, config=tuple({"target_modules": target_modules, **config}.items()), **how or {})


CASES = {
    "lora": lora("llama", "all-linear", lora_dropout=0.2, how={"accumulate": 2, "clip": True}),
    "lora-bf16": lora("qwen3", "all-linear", lora_dropout=0.2, how={"fp32_adapters": False, "accumulate": 2}),
    "lora-fp32-base": lora("plain", ("up", "down"), how={"dtype": torch.float32, "clip": True}),
    "lora-autocast": lora("llama", "all-linear", how={"autocast": True, "accumulate": 2}),
    "lora-in-backward": lora("llama", "all-linear", lora_dropout=0.2, how={"update": "in_backward"}),
    "lora-conv1d": lora("gpt2", ("c_attn", "c_proj"), fan_in_fan_out=True, lora_dropout=0.1),
    "lora-embedding": lora("llama-untied", ("embed_tokens", "q_proj"), how={"accumulate": 3}),
    "lora-seq2seq": lora("t5", ("q", "v"), lora_dropout=0.1, how={"clip": True}),
    "lora-classifier": lora("bert", ("query", "value"), task_type="SEQ_CLS", lora_dropout=0.1),
    "lora-bias": lora("bert", ("query", "value"), bias="lora_only"),
    "lora-late-layers": lora("llama", ATTENTION, layers_to_transform=(2, 3)),
    "lora-saved-head": lora(
        "llama-untied", ATTENTION, modules_to_save=("lm_head",), lora_dropout=0.2, how={"accumulate": 2}
    ),
    "lora-saved-embedding": lora(
        "llama-untied", ATTENTION, modules_to_save=("embed_tokens", "lm_head"), how={"fp32_adapters": False}
    ),
    "lora-experts": lora("mixtral", ATTENTION, target_parameters=("mlp.experts.gate_up_proj",)),
    "rslora": lora("gemma2", "all-linear", use_rslora=True, lora_dropout=0.2, how={"clip": True}),
    "dora": lora("llama", (*ATTENTION, "up_proj"), use_dora=True, how={"accumulate": 2, "clip": True}),
    "dora-dropout": lora("qwen3", ATTENTION, use_dora=True, lora_dropout=0.2),
    "dora-bf16": lora("llama", ATTENTION, use_dora=True, lora_dropout=0.2, how={"fp32_adapters": False}),
    "dora-saved-head": lora("llama-untied", ATTENTION, use_dora=True, use_rslora=True, modules_to_save=("lm_head",)),
}
FEW = {
    "lora": lora("llama", ATTENTION, r=2, lora_dropout=0.1),
    "dora": lora("llama-untied", ("v_proj",), r=1, use_dora=True, use_rslora=True, how={"accumulate": 2}),
}
"""Adapters of at most a tenth of their model, as real ones are."""
VARIANTS = {"lora-classifier", "lora-bias", "lora-saved-embedding", "dora-dropout", "dora-bf16", "dora-saved-head"}
"""Cases whose parts other cases have too: `make test-all` runs them."""


# --- plans


def base_streams(
    graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, *, strategies: tuple[Strategy, ...], depth: int
) -> Decision:
    """What trains stays; layers take the strategies in turn, as far as they know them."""
    homes = tuple(
        make_homes("gpu", "gpu") if chunk.is_updated else make_homes("host", "host") for chunk in layout.chunks
    )
    wanted = [strategies[call % len(strategies)] for call in range(len(graph.calls))]
    return Decision(
        homes=homes,
        strategies=tuple(s if s in trace.strategies(v) else "keep" for v, s in enumerate(wanted)),
        depth=depth,
    )


PLANS: dict[str, cells.Decide] = {
    "resident": functools.partial(cells.uniform, depth=0),
    "recompute": functools.partial(base_streams, strategies=("recompute",), depth=0),
    "send": functools.partial(base_streams, strategies=("swap", "offload"), depth=2),
}


def machine(num_bytes: int = cells.GiB) -> SimDevice:
    return SimDevice(lookup(f"{num_bytes}B"))


def trace(case: Adapted, *, autocast_cache: bool) -> Traced:
    model = case.model()
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast, cache_enabled=autocast_cache):
        return cache.traced(model, zoo.batch(case.kind), find_layers(model), machine())


@functools.cache
def traced(case: Adapted) -> Traced:
    return trace(case, autocast_cache=False)


def prepare(case: Adapted, plan: str, traced_as: Traced | None = None) -> Engine:
    """With exactly the bytes that the plan says it needs."""
    return cells.prepare_by_hand(
        case.model(),
        zoo.batch(case.kind),
        spec=case.spec,
        device=machine(),
        accumulate=case.accumulate,
        chunk_bytes=CHUNK_BYTES,
        budget=None,
        traced=traced_as or traced(case),
        decision=PLANS[plan],
    )


def train(case: Adapted, engine: Engine) -> Outcome:
    return cells.train(
        engine.model,
        engine.optimizer,
        case.batches(),
        steps=STEPS,
        accumulate=case.accumulate,
        engine=engine,
        autocast=case.autocast,
        declare=case.update == "in_backward",
    )


@functools.cache
def plain(case: Adapted) -> tuple[nn.Module, Outcome]:
    """PEFT by itself: the trained model, and how it went."""
    model = case.model()
    outcome = cells.plain(
        model, case.batches(), spec=case.spec, steps=STEPS, accumulate=case.accumulate, autocast=case.autocast
    )
    assert not case.clip or max(outcome.norms) > cells.MAX_GRAD_NORM, "clipping must clip, or it is not tested"
    return model, outcome


@torch.no_grad()
def logits(model: nn.Module, case: Adapted) -> Tensor:
    was_training = model.training
    model.eval()
    found = model(**zoo.batch(case.kind, seed=7)).logits.clone()
    model.train(was_training)
    return found


# --- training


def by_turns() -> list[Any]:
    """Every case but variants under one plan, in turn, and the first LoRA under every one. `make test-all` runs the
    product.
    """
    return [
        pytest.param(
            name,
            plan,
            marks=[] if name == "lora" or (name not in VARIANTS and (i + j) % len(PLANS) == 0) else [pytest.mark.full],
        )
        for i, name in enumerate(CASES)
        for j, plan in enumerate(PLANS)
    ]


@pytest.mark.parametrize(("name", "plan"), by_turns())
def test_training_equals_plain_peft(name: str, plan: str, parity_cell: Callable[[object], None]) -> None:
    case = CASES[name]
    before = case.model()
    with cells.closing(prepare(case, plan)) as engine:
        assert list(engine.model.state_dict()) == list(before.state_dict()) and list(
            dict(engine.model.named_modules())
        ) == list(dict(before.named_modules()))
        found = train(case, engine)
        assert list(engine.model.state_dict()) == list(plain(case)[0].state_dict())
        unused = engine.plan.estimate.gpu_bytes - engine.report().gpu_peak_bytes
        assert unused == 0 or (unused > 0 and case.kind == "t5"), (
            "the promise is kept to the byte; T5's is an upper bound"
        )
    cells.assert_same(found, plain(case)[1])
    trained, base = (
        {n: p.detach() for n, p in before.named_parameters() if p.requires_grad == trains} for trains in (True, False)
    )
    assert base and all(torch.equal(found.weights[n], value) for n, value in base.items()), (
        "weight decay is for what trains"
    )
    assert found.state.keys() == trained.keys() and not any(
        torch.equal(found.weights[n], value) for n, value in trained.items()
    )
    parity_cell((name, plan))


def test_factors_are_fp32_over_a_bf16_base_by_default() -> None:
    """That the cases above are what they say."""
    for name, dtype in (
        ("lora", torch.float32),
        ("lora-bf16", torch.bfloat16),
        ("dora", torch.float32),
        ("dora-bf16", torch.bfloat16),
    ):
        params = list(CASES[name].model().parameters())
        assert {p.dtype for p in params if p.requires_grad} == {dtype} and {
            p.dtype for p in params if not p.requires_grad
        } == {torch.bfloat16}


# --- fused layers


FUSED = {
    "llama": lora("llama", "all-linear", lora_dropout=0.2, how={"fp32_adapters": False, "clip": True}),
    "gemma2": lora("gemma2", "all-linear", use_rslora=True, how={"fp32_adapters": False, "accumulate": 2}),
    "qwen3": lora("qwen3", ATTENTION, lora_dropout=0.2, how={"dtype": torch.float32, "clip": True, "accumulate": 2}),
    "autocast": lora("llama", "all-linear", how={"autocast": True, "dtype": torch.float32}),
    "experts": lora("mixtral", ("q_proj", "o_proj"), lora_dropout=0.1, how={"fp32_adapters": False}),
    "outside of layers": lora("llava", "all-linear", lora_dropout=0.1, how={"fp32_adapters": False, "accumulate": 2}),
}
"""Of each model, cells of FUSED_PLANS in turn: homes of the base, strategy, device."""
HOMES = ("resident", "mixed", "streamed")
STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "offload", "swap")


def base_at(graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, *, homes: str, strategy: Strategy) -> Decision:
    """Every second frozen chunk is streamed (`mixed`), or all, at the smallest number of slots."""

    def home_of(index: int) -> str:
        return "host" if homes == "streamed" or (homes == "mixed" and index % 2) else "gpu"

    strategies = tuple(strategy if strategy in trace.strategies(v) else "keep" for v in range(len(graph.calls)))
    assert strategies.count(strategy) >= 4, "each layer can have it"
    return Decision(
        homes=tuple(
            make_homes("gpu", "gpu") if chunk.is_updated else make_homes(*2 * (home_of(i),))
            for i, chunk in enumerate(layout.chunks)
        ),
        strategies=strategies,
        depth=0,
    )


def fused_cells() -> list[Any]:
    """All homes with all strategies, in turn with models and devices. `make test-all` runs the product."""
    names, devices, found = [*FUSED], ("cpu", "sim"), []
    for i, (homes, strategy) in enumerate(itertools.product(HOMES, STRATEGIES)):
        chosen = names[(i + i // 4) % len(names)], devices[(i + i // 2) % 2]
        for name, device in itertools.product(names, devices):
            marks = [] if (name, device) == chosen else [pytest.mark.full]
            found.append(pytest.param(name, homes, strategy, device, marks=marks))
    return found


@pytest.mark.parametrize(("name", "homes", "strategy", "device"), fused_cells())
def test_a_fused_model_trains_as_the_same_model_does_in_plain_pytorch(
    name: str, homes: str, strategy: Strategy, device: str, parity_cell: Callable[[object], None]
) -> None:
    case = dataclasses.replace(FUSED[name], fused=True)
    engine = cells.prepare_by_hand(
        case.model(),
        zoo.batch(case.kind),
        spec=case.spec,
        device=machine() if device == "sim" else "cpu",
        accumulate=case.accumulate,
        chunk_bytes=CHUNK_BYTES,
        budget=None if device == "sim" else cells.GiB,
        traced=traced(case),
        decision=functools.partial(base_at, homes=homes, strategy=strategy),
    )
    with cells.closing(engine):
        found = train(case, engine)
        assert device == "cpu" or engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
        evaluated = logits(engine.model, case)
    cells.assert_same(found, plain(case)[1])
    assert torch.equal(evaluated, logits(plain(case)[0], case))
    assert {type(module).__name__ for module in engine.model.modules()} == {
        type(module).__name__ for module in case.model().modules()
    }
    parity_cell((name, homes, strategy, device))


class WeightOnContext(torch.autograd.Function):
    """As other libraries' fused layers are: the weights are on `ctx`, not in `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        ctx.weight, ctx.a, ctx.b, ctx.scaling = weight, a, b, scaling
        ctx.save_for_backward(x)
        return x @ weight.T + scaling * (x @ a.T) @ b.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dlow, rows = ctx.scaling * dy @ ctx.b, x.flatten(0, -2)
        da, db = dlow.flatten(0, -2).T @ rows, ctx.scaling * dy.flatten(0, -2).T @ (rows @ ctx.a.T)
        return dy @ ctx.weight + dlow @ ctx.a, None, da, db, None


def with_weights_on_context(case: Adapted) -> nn.Module:
    """Each attention reads the weights of its projections without calling the base layers."""
    model = case.model()

    def forward(layer: Any, x: Tensor) -> Tensor:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return WeightOnContext.apply(x, layer.base_layer.weight, a, b, layer.scaling["default"])

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.forward = functools.partial(forward, module)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(("homes", "strategy"), [("mixed", "keep"), ("streamed", "recompute"), ("streamed", "swap")])
def test_a_function_of_others_may_keep_weights_on_its_context(
    homes: str, strategy: Strategy, parity_cell: Callable[[object], None]
) -> None:
    case = lora("llama", "all-linear", how={"fp32_adapters": False, "accumulate": 2, "clip": True})
    how: dict[str, Any] = dict(spec=case.spec, accumulate=case.accumulate)
    engine = cells.prepare_by_hand(
        with_weights_on_context(case),
        zoo.batch(case.kind),
        device=machine(),
        chunk_bytes=CHUNK_BYTES,
        budget=None,
        decision=functools.partial(base_at, homes=homes, strategy=strategy),
        **how,
    )
    with cells.closing(engine):
        assert any(home.weights == "host" for home in engine.plan.decision.homes)
        found = train(case, engine)
    cells.assert_same(found, cells.plain(with_weights_on_context(case), case.batches(), steps=STEPS, **how))
    parity_cell((homes, strategy))


# --- where things live


@functools.cache
def least_bytes(case: Adapted) -> int:
    with pytest.raises(PlanInfeasible) as refused:
        outsize.prepare(
            case.model(),
            zoo.batch(case.kind),
            device=machine(1),
            chunk_bytes=CHUNK_BYTES,
            optimizer=case.spec,
            accumulate=case.accumulate,
        )
    assert refused.value.resource == "gpu"
    return refused.value.needed_bytes


@pytest.mark.parametrize(("name", "room"), turns.by_turns(FEW, [0, 4 * 1024, 32 * 1024]))
def test_adapters_stay_on_the_device_with_their_state_while_the_base_streams(
    name: str, room: int, parity_cell: Callable[[object], None]
) -> None:
    """`room`: bytes above the smallest budget. As a user would, with a search."""
    case = FEW[name]
    device = machine(least_bytes(case) + room)
    engine = outsize.prepare(
        case.model(),
        zoo.batch(case.kind),
        device=device,
        chunk_bytes=CHUNK_BYTES,
        optimizer=case.spec,
        accumulate=case.accumulate,
    )
    with cells.closing(engine):
        chunks, homes = engine.layout.chunks, [str(home) for home in engine.plan.decision.homes]
        assert {homes[c.index] for c in chunks if c.is_updated} == {"gpu/gpu"}
        assert "host/host" in {homes[c.index] for c in chunks if not c.is_updated}
        schedule = engine.runtime.executor.schedule
        everything = [
            *schedule["forward"],
            *(a for segment in schedule.backwards for a in segment.actions),
            *schedule["update"],
        ]
        assert {a.kind for a in everything if a.kind in "LQGUW" and not chunks[a.index].is_updated} == {"L"}, (
            "the base is loaded, and no more"
        )
        assert {a.kind for a in everything if a.kind in "LQGUW" and chunks[a.index].is_updated} == {"U"}, (
            "adapters do not move"
        )
        before_adapters = [v for v, backward in enumerate(engine.graph.has_backward) if not backward]
        assert before_adapters == [0], "nothing before the first adapter needs a gradient"
        only_there = {c.index for c in chunks if c.calls == (0,)}
        assert not any(
            a.kind == "L" and a.index in only_there for segment in schedule.backwards for a in segment.actions
        )
        assert engine.plan.estimate.host_parts.keys() <= {"home", "arena"}
        cells.assert_same(train(case, engine), plain(case)[1])
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
    parity_cell((name, room))


# --- saving, reading the base, merging


@pytest.mark.parametrize(
    "name",
    [
        "lora-bf16",
        "lora-embedding",
        "dora-saved-head",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("lora", "lora-classifier", "lora-saved-head", "rslora", "dora")
        ),
    ],
)
def test_save_pretrained_writes_what_plain_peft_writes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with cells.closing(prepare(case, "send")) as engine:
        train(case, engine)
        engine.model.save_pretrained(tmp_path / "ours")
        ours = logits(engine.model, case)
    reference = plain(case)[0]
    reference.save_pretrained(tmp_path / "plain")
    found, expected = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "plain"))
    assert list(found) == list(expected) and all(
        found[n].dtype == v.dtype and torch.equal(found[n], v) for n, v in expected.items()
    )
    assert (tmp_path / "ours/adapter_config.json").read_text() == (tmp_path / "plain/adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(case.base(), tmp_path / "ours", autocast_adapter_dtype=case.fp32_adapters)
    assert torch.equal(logits(loaded, case), logits(reference, case)) and torch.equal(ours, logits(reference, case))


@pytest.mark.parametrize(
    ("name", "plan"),
    [("lora", "send"), ("dora", "recompute"), ("lora-saved-head", "recompute"), ("lora-experts", "send")],
)
def test_the_base_alone_is_a_reference_pass_that_training_does_not_notice(name: str, plan: str) -> None:
    """As preference training does it: the same model with its adapters off, without grad."""
    case = CASES[name]
    with cells.closing(prepare(case, plan)) as engine:
        with engine.model.disable_adapter():
            assert torch.equal(logits(engine.model, case), logits(case.base(), case))
        cells.assert_same(train(case, engine), plain(case)[1])


def test_after_detach_adapters_merge_as_plain_ones_do() -> None:
    case = CASES["lora"]
    with cells.closing(prepare(case, "recompute")) as engine:
        train(case, engine)
    expected = case.model()
    expected.load_state_dict(plain(case)[0].state_dict())
    assert torch.equal(logits(engine.model.merge_and_unload(), case), logits(expected.merge_and_unload(), case))


# --- known faults, to be mended where they are


def test_a_trial_run_under_autocast_counts_what_training_takes() -> None:
    case = CASES["lora-autocast"]
    with cells.closing(prepare(case, "resident", trace(case, autocast_cache=True))) as engine:
        train(case, engine)
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes


def test_the_base_alone_reads_the_embedding_that_an_adapter_replaces() -> None:
    case = CASES["lora-saved-embedding"]
    with cells.closing(prepare(case, "recompute")) as engine, engine.model.disable_adapter():
        assert torch.equal(logits(engine.model, case), logits(case.base(), case))


def test_a_fused_layer_that_is_called_alone_with_grad_is_refused_in_its_backward() -> None:
    """As PEFT's is: between passes the engine does not collect gradients."""
    case = dataclasses.replace(FUSED["llama"], fused=True)
    with cells.closing(prepare(case, "recompute")) as engine:
        layer: Any = engine.model.get_submodule("base_model.model.model.layers.0")
        x = torch.randn(2, 3, layer.mlp.gate_proj.in_features, dtype=torch.bfloat16)
        for part in (layer.self_attn.q_proj, layer.mlp):
            with pytest.raises(EngineMisuse, match="outside of the model's forward"):
                part(x).sum().backward()


def test_fusing_a_prepared_model_is_refused() -> None:
    case = CASES["lora-bf16"]
    with cells.closing(prepare(case, "recompute")) as engine:
        with pytest.raises(
            EngineMisuse, match=r"fuse_lora: \S+lora_A.default.weight belongs to a prepared model.*detach"
        ):
            outsize.fuse_lora(engine.model)
        model = engine.model
    assert any(type(module).__name__ == "FusedQwen3MLP" for module in outsize.fuse_lora(model).modules())


def test_merging_into_a_prepared_model_is_refused() -> None:
    case = CASES["lora"]
    with cells.closing(prepare(case, "recompute")) as engine, pytest.raises(EngineMisuse, match="detach"):
        engine.model.merge_adapter()
