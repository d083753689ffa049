"""Store: the bytes of a prepared model. What is padding stays zero, what is frozen stays as it is, what is released
looks like itself, what ends is gone.
"""

import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from synthetic import make_homes
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import outsize
from outsize.base.errors import DeviceOutOfMemory, ModelUnsupported
from outsize.device.cpu import CpuDevice
from outsize.device.observer import remove_mode
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.profile.trace import ModelTrace
from outsize.runtime.engine import Engine
from outsize.schedule.plan import Decision

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
HOMES = pytest.mark.parametrize(
    ("weights", "optimizer"), [("gpu", "gpu"), ("host", "gpu"), ("gpu", "host"), ("host", "host")]
)
ODD = 2**16
"""A chunk size at which parameters of several shapes, norms among them, share a chunk and leave gaps."""


def step(engine: Engine, kind: str, seed: int = 0) -> None:
    engine.model(**zoo.batch(kind, seed=seed)).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


# --- padding


class Poisoned(CpuDevice):
    """Its fresh memory is full of NaN, as uninitialised memory may be."""

    def empty(self, num_bytes: int) -> Tensor:
        return super().empty(num_bytes).fill_(0xFF)


@HOMES
@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_uninitialised_memory_reaches_no_result(weights: str, optimizer: str, update: Any) -> None:
    """Traps A1, C4: slots, staging and gradient buffers begin as NaN, and every bit is still the reference's."""
    for dtype in ("fp32", "bf16"):
        cell = cells.Cell(
            kind="llama", dtype=dtype, strategy="swap", weights=weights, optimizer=optimizer, update=update
        )
        cells.assert_same(cells.run(cell, Poisoned(), chunk_bytes=ODD), cells.expected(cell))


def gaps(engine: Engine, index: int) -> Tensor:
    """True where no parameter lies."""
    chunk = engine.layout.chunks[index]
    free = torch.ones(chunk.numel, dtype=torch.bool)
    for piece in chunk.pieces:
        free[piece.offset : piece.offset + piece.numel] = False
    return free


def padding(engine: Engine) -> dict[tuple[int, str], Tensor]:
    """What lies between parameters, in weights and optimizer state."""
    store, found = engine.runtime.store, {}
    engine.drain()
    for chunk in engine.layout.chunks:
        free = gaps(engine, chunk.index)
        found[chunk.index, "weights"] = store.flat(store.place.home_buffer(chunk.index), chunk.index)[free]
        if chunk.is_updated:
            state, lo = store.state(chunk.index)
            named = {**dict(zip(("m", "v"), state, strict=True)), **({} if lo is None else {"lo": lo})}
            found |= {(chunk.index, name): flat[free] for name, flat in named.items()}
    return {key: value for key, value in found.items() if value.numel()}


@HOMES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_padding_stays_zero_after_steps(weights: str, optimizer: str, dtype: Any) -> None:
    """Trap C4."""
    cell = cells.Cell(kind="llama", dtype=dtype, weights=weights, optimizer=optimizer)
    with cells.closing(cells.prepare(cell, Poisoned(), chunk_bytes=ODD)) as engine:
        assert padding(engine) and all(not bool(p.any()) for p in padding(engine).values()), "zero when prepared"
        for seed in range(2):
            step(engine, "llama", seed)
        assert [key for key, p in padding(engine).items() if bool(p.ne(0).any())] == []


@HOMES
def test_padding_is_zero_when_prepared(weights: str, optimizer: str) -> None:
    with cells.closing(
        cells.prepare(cells.Cell(kind="gpt2", weights=weights, optimizer=optimizer), Poisoned(), chunk_bytes=ODD)
    ) as engine:
        assert padding(engine) and all(not bool(p.any()) for p in padding(engine).values())


# --- every parameter


@HOMES
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bert", "mixed"])
def test_every_trainable_parameter_changes_in_one_step_and_no_frozen_one(
    kind: str, weights: str, optimizer: str
) -> None:
    """Traps C19, C2: those outside of layers too, and weight decay reaches nothing that is frozen."""
    cell = cells.Cell(kind=kind, weights=weights, optimizer=optimizer, frozen="scattered")
    before = {n: p.detach().clone() for n, p in cell.model().named_parameters()}
    with cells.closing(cells.prepare(cell)) as engine:
        step(engine, kind)
        after = engine.model.state_dict()
        for name, param in engine.model.named_parameters():
            assert torch.equal(after[name], before[name]) is not param.requires_grad, name


def addresses(model: nn.Module) -> dict[str, int]:
    """Of what parameters compute with in a pass; between passes they read their homes."""
    with torch._C.DisableTorchFunctionSubclass():
        return {n: p.data_ptr() for n, p in model.named_parameters()}


@HOMES
@pytest.mark.parametrize("kind", ["llama", "mixed"])
def test_a_released_parameter_still_looks_like_itself(kind: str, weights: str, optimizer: str) -> None:
    """Trap A8: shape, strides, dtype and identity at all times, whatever its slot holds; A25: and its name."""

    def looks(model: nn.Module) -> dict[str, Any]:
        named = model.named_parameters()
        return {
            n: (id(p), p.shape, p.stride(), p.dtype, p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter), p.numel())
            for n, p in named
        }

    model = zoo.make(kind)
    before = looks(model)
    engine = cells.prepare_by_hand(model, zoo.batch(kind), spec=SPEC, weights=weights, optimizer=optimizer, depth=0)
    assert looks(model) == before
    step(engine, kind)
    assert looks(model) == before and all(p.grad is None for p in model.parameters())
    own = addresses(model)
    step(engine, kind, 1)
    assert addresses(model) == own, "an address never changes"
    if weights == "host":
        assert len(set(own.values())) < len(own), "blocks really pass through the same slots"
    engine.detach()
    assert looks(model) == before


class TakesShape(torch.autograd.Function):
    """Captures the weight's shape and dtype when its node is made, as casts and transposes do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.facts = (weight.shape, weight.stride(), weight.dtype)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        assert ctx.facts == (weight.shape, weight.stride(), weight.dtype)
        return grad @ weight.t(), x.t() @ grad


class Stack(nn.Module):
    """Layers of one kind, a loss."""

    def __init__(self, layer: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(TakesShape.apply(x, self.weight))


class Quantised(nn.Module):
    """A frozen int8 matrix with a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randint(-128, 128, (8, 8), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((8,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.q.to(x.dtype) * self.scale))


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for seed in range(steps):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "swap"])
@pytest.mark.parametrize("layer", [Shaped, Quantised])
def test_odd_parameters_stream_and_train_to_the_bit(layer: type[nn.Module], strategy: str) -> None:
    """Trap A8 with a custom Function; trap C21: int8 bytes travel as they are and are never updated."""
    plain, model = Stack(layer), Stack(layer)
    expected = train(
        plain, cells.Reference([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    )
    bytes_before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.int8}
    how: dict[str, Any] = dict(weights="host", optimizer="host", strategy=strategy, depth=0, chunk_bytes=256)
    engine = cells.prepare_by_hand(model, {"x": torch.randn(4, 8)}, spec=SPEC, device="sim:1MiB", **how)
    with cells.closing(engine):
        assert train(model, engine.optimizer) == expected
        state = model.state_dict()
        assert all(torch.equal(state[n], v) and state[n].dtype == torch.int8 for n, v in bytes_before.items())
        assert not any(engine.layout.chunks[engine.layout.location[n][0]].is_updated for n in bytes_before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Strided(nn.Module):
    """A parameter with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Overlapping(Strided):
    """A parameter that spans as many elements as it has, with some of them twice and others never."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64).as_strided((8, 8), (5, 4)))


@pytest.mark.parametrize("layer", [Strided, Overlapping])
def test_a_parameter_with_gaps_or_overlap_is_refused_by_name_and_the_model_is_as_before(layer: type[nn.Module]) -> None:
    model = Stack(layer)
    before = [p.data_ptr() for p in model.parameters()]
    modes = len(_get_current_dispatch_mode_stack())
    with pytest.raises(ModelUnsupported, match=r"layers\.0\.weight has shape \(8, 8\)"):
        cells.prepare_by_hand(model, {"x": torch.randn(4, 8)}, spec=SPEC, device="cpu")
    assert [p.data_ptr() for p in model.parameters()] == before and len(_get_current_dispatch_mode_stack()) == modes


@pytest.mark.usefixtures("_profiles_anew")
def test_a_refused_model_leaves_the_device_as_it_was() -> None:
    """Trap H7."""

    device = SimDevice(lookup("1MiB"))
    modes = list(_get_current_dispatch_mode_stack())
    try:
        with pytest.raises(ModelUnsupported):
            cells.prepare_by_hand(Stack(Strided), {"x": torch.randn(4, 8)}, spec=SPEC, device=device, budget=2**20)
        assert device.budgets == {} and device.observer.live_bytes == 0 and _get_current_dispatch_mode_stack() == modes
    finally:
        remove_mode(device.observer)


@pytest.mark.usefixtures("_profiles_anew")
def test_a_device_that_is_too_full_leaves_the_model_its_weights() -> None:
    """Traps A6, H7: the first half of the chunks streams and has moved when the second half, which is resident, does
    not fit.
    """

    def half(graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace) -> Decision:
        homes = (make_homes("host" if 2 * c.index < len(layout.chunks) else "gpu", "host") for c in layout.chunks)
        return Decision(homes=tuple(homes), strategies=("keep",) * len(graph.calls), depth=0)

    device, cell = SimDevice(lookup("64MiB")), cells.Cell(kind="plain")
    model, expected = cell.model(), dict(cell.model().named_parameters())
    how: dict[str, Any] = dict(spec=SPEC, device=device, decision=half, traced=cell.traced(device))
    try:
        with pytest.raises(DeviceOutOfMemory):
            cells.prepare_by_hand(model, zoo.batch("plain"), budget=80_000, **how)
        assert [n for n, p in model.named_parameters() if not torch.equal(p, expected[n])] == []
    finally:
        remove_mode(device.observer)


# --- plans


def test_a_plan_cannot_be_changed() -> None:
    """Trap C20: another residency is another plan."""
    with cells.closing(cells.prepare(cells.Cell(kind="plain"))) as engine:
        plan = engine.plan
        for record, field in (
            (plan, "gpu_budget_bytes"),
            (plan.decision, "homes"),
            (plan.step_config, "accumulate"),
            (plan.decision.homes[0], "weights"),
        ):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, field, getattr(record, field))
        with pytest.raises(AttributeError):
            engine.plan = plan  # type: ignore[misc]


def test_the_buffers_are_those_that_the_plan_names_at_their_sizes() -> None:
    """Trap C11: one definition of residency."""
    cell = cells.Cell(kind="t5", strategy="offload", weights="host", optimizer="host")
    with cells.closing(cells.prepare(cell, SimDevice(lookup("64MiB")))) as engine:
        store, place = engine.runtime.store, engine.runtime.place
        assert {k: t.numel() for k, t in store.gpu.items()} == place.gpu and {
            k: t.numel() for k, t in store.host.items()
        } == place.host
        assert engine.device.observer.live_bytes == place.gpu_bytes  # type: ignore[attr-defined]


# --- traffic


@HOMES
def test_frozen_chunks_cause_no_traffic_to_the_host(weights: str, optimizer: str) -> None:
    """Trap G15: per step each trainable chunk's gradient leaves once, a frozen one's never; and frozen weights are
    never written.
    """
    cell = cells.Cell(kind="llama", weights=weights, optimizer=optimizer, frozen="scattered")
    with cells.closing(cells.prepare(cell)) as engine:
        chunks = engine.layout.chunks
        frozen, trained = {c.index for c in chunks if not c.is_updated}, {c.index for c in chunks if c.is_updated}
        step(engine, "llama")
        issued = list(engine.runtime.executor.issued)
        of = lambda kind: [int(word[1:]) for word in issued if word[0] == kind]
        assert frozen and trained
        assert sorted(of("G")) == (sorted(trained) if optimizer == "host" else [])
        assert sorted(of("U")) == sorted(trained) and not frozen & {*of("W"), *of("Q"), *of("U"), *of("G")}
        assert sorted(set(of("L"))) == (sorted(frozen | trained) if weights == "host" else [])
        assert not any(
            key[1] in frozen
            for key in (*engine.runtime.place.gpu, *engine.runtime.place.host)
            if key[0] in ("state", "host_state", "gradient")
        )


# --- saving and ending


@pytest.mark.parametrize("kind", ["llama-untied", "gpt2"])
def test_saving_twice_gives_the_same_and_training_continues_as_without_a_save(kind: str, tmp_path: Path) -> None:
    """Traps H4, B12: right after a step, in the middle of a run."""
    cell = cells.Cell(kind=kind, dtype="bf16", weights="host", optimizer="host")

    def run(save: bool) -> tuple[dict[str, Tensor], list[bytes]]:
        files = []
        with cells.closing(cells.prepare(cell)) as engine:
            for seed in range(3):
                torch.manual_seed(seed)
                step(engine, kind, seed)
                if save and seed == 1:
                    states = [{n: v.clone() for n, v in engine.model.state_dict().items()} for _ in range(2)]
                    moments = [copy.deepcopy(engine.optimizer.state_dict()) for _ in range(2)]
                    assert all(torch.equal(states[1][n], v) for n, v in states[0].items())
                    assert moments[0]["param_groups"] == moments[1]["param_groups"]
                    assert all(
                        torch.equal(moments[1]["state"][i][k], v)
                        for i, s in moments[0]["state"].items()
                        for k, v in s.items()
                    )
                    for number in range(2):
                        engine.model.save_pretrained(tmp_path / str(number))
                        files.append((tmp_path / str(number) / "model.safetensors").read_bytes())
            return {n: v.clone() for n, v in engine.model.state_dict().items()}, files

    saved, files = run(True)
    undisturbed, _ = run(False)
    assert len(files) == 2 and files[0] == files[1]
    assert all(torch.equal(saved[n], v) for n, v in undisturbed.items())


@pytest.mark.usefixtures("_profiles_anew")
def test_preparing_and_detaching_five_times_leaves_nothing_on_the_device() -> None:
    """Trap H7: memory, promises, hooks, patched methods, dispatch modes; and the model goes on where it was."""
    device = SimDevice(lookup("64MiB"))
    model, plain = zoo.make("llama"), zoo.make("llama")
    reference = cells.Reference(list(plain.named_parameters()), lr=1e-2, weight_decay=0.1)
    facts = lambda: [
        (sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), len(m._state_dict_hooks))
        for m in model.modules()
    ]
    before, modes = facts(), list(_get_current_dispatch_mode_stack())
    state = None
    for seed, strategy in enumerate(("keep", "recompute", "offload", "swap", "swap")):
        how: dict[str, Any] = dict(
            weights="host" if seed % 2 else "gpu", optimizer="gpu" if seed % 3 else "host", strategy=strategy
        )
        engine = cells.prepare_by_hand(model, zoo.batch("llama"), spec=SPEC, device=device, **how)
        assert device.budgets and device.observer.live_bytes > 0
        if state is not None:
            engine.optimizer.load_state_dict(state)
        step(engine, "llama", seed)
        state = copy.deepcopy(engine.detach())
        assert device.observer.live_bytes == 0 and device.budgets == {}
        assert facts() == before and _get_current_dispatch_mode_stack() == modes
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        plain(**zoo.batch("llama", seed=seed)).loss.backward()
        reference.step()
        reference.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["host", "gpu"])
def test_the_state_that_detach_returns_is_not_on_the_device(optimizer: Any) -> None:
    """Trap H7."""
    device = SimDevice(lookup("64MiB"))
    engine = cells.prepare(cells.Cell(kind="plain", weights="host", optimizer=optimizer), device)
    step(engine, "plain")
    state = engine.detach()
    assert state["state"] and device.observer.live_bytes == 0


def test_planning_again_fits_a_device_that_either_plan_fits(_profiles_anew: None) -> None:
    """Trap G12: a re-plan is a part of the lifetime, and so is its profiling run."""
    device, model = SimDevice(lookup("600KiB")), zoo.make("llama")
    engine = outsize.prepare(model, zoo.batch("llama"), device=device, chunk_bytes="8KiB", optimizer=SPEC)
    try:
        step(engine, "llama")
        model(**zoo.batch("llama", size=3)).loss.backward()
        assert engine.plan.inputs["input_ids"] == (3, 16)
        engine.detach()
    finally:
        remove_mode(device.observer)  # a failed attach leaves it behind


@pytest.mark.parametrize("update", ["after_step", "in_backward"])
def test_an_engine_that_is_detached_is_freed_at_once(update: Any) -> None:
    """Trap H7: no cycle holds device memory until the garbage collector comes."""
    device = SimDevice(lookup("64MiB"))
    cell = cells.Cell(kind="plain", weights="host", optimizer="host", update=update)
    gc.collect()
    gc.disable()
    try:
        engine = cells.prepare(cell, device)
        cells.train_cell(cell, engine, steps=2)
        engine.detach()
        assert device.observer.live_bytes == 0
    finally:
        gc.enable()


# --- by name


@HOMES
def test_what_is_written_by_name_is_read_by_name_and_used(weights: str, optimizer: str) -> None:
    """Trap C10: a slot that holds the old value is not trusted; H1: and the master is the value itself."""
    cell = cells.Cell(kind="plain", dtype="bf16", weights=weights, optimizer=optimizer)
    with cells.closing(cells.prepare(cell)) as engine:
        step(engine, "plain")
        value = torch.randn(2 * zoo.HIDDEN, zoo.HIDDEN).to(torch.bfloat16)
        name = "layers.1.up.weight"
        with engine.gathered(name) as values:
            values[name].copy_(value)
        assert torch.equal(engine.runtime.store.value(name), value) and torch.equal(
            engine.model.state_dict()[name], value
        )
        assert not bool(engine.optimizer_state(name)["lo"].any())
        twin = cell.model()
        twin.load_state_dict(engine.model.state_dict())
        with torch.no_grad():
            assert float(engine.model(**zoo.batch("plain")).loss) == float(twin(**zoo.batch("plain")).loss)


def test_rebound_parameters_are_reported_by_name() -> None:
    with cells.closing(cells.prepare(cells.Cell(kind="plain", weights="host", optimizer="host"))) as engine:
        store = engine.runtime.store
        assert list(store.replaced_data()) == []
        with torch._C.DisableTorchFunctionSubclass():
            engine.model.norm.weight.data = torch.ones(zoo.HIDDEN)
        assert list(store.replaced_data()) == ["norm.weight"]
