"""Tracer: what it measures is what an independent count finds, and the user's model does not notice."""

import dataclasses
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from outsize.base.errors import ModelUnsupported
from outsize.base.records import dumps, fingerprint, loads
from outsize.base.units import ALIGN_BYTES
from outsize.device.cpu import CpuDevice
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGIES
from outsize.model.tensors import tensors_in
from outsize.model.work import SharedTensor, Work
from outsize.profile import profiling_pass
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer

WITHOUT_ATTENTION = tuple(s.name for s in STRATEGIES if not s.saves_attention_of)
KNOWN_ATTENTION = {
    **dict.fromkeys(("llama", "llama-untied", "one-block", "qwen3", "mixtral", "llama-classes"), "layers"),
    **dict.fromkeys(("qwen2.5-vl", "qwen3-vl"), "."),
    **dict.fromkeys(("llava", "llava-next"), "."),
    "qwen3-next": "model.layers.1",  # the other one has linear attention
}
"""By kind of model: a part of the names of the layers that call a known attention operator."""

DEVICES: dict[str, Callable[[], Device]] = {"cpu": CpuDevice, "sim": lambda: SimDevice(lookup("1GiB"))}
EVERY_DEVICE = pytest.mark.parametrize("device", list(DEVICES))
Traced = tuple[BlockGraph, ModelTrace]


def trace(model: nn.Module, batch: Any, device: str = "sim") -> Traced:
    return Tracer(model, batch, find_layers(model), DEVICES[device]()).trace()


@functools.cache
def traced(kind: str) -> Traced:
    """Of a zoo model as it comes."""
    return trace(zoo.make(kind), zoo.batch(kind))


def only_bytes(work: Work) -> Work:
    return dataclasses.replace(work, forward_seconds=0.0, backward_seconds=0.0)


# --- the user's model


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_nothing_of_a_model_lives_on_when_its_trace_is_taken(kind: str) -> None:
    """T5's layers hand on a position bias with a graph, whose hooks the garbage collector cannot see."""
    model = zoo.make(kind)
    trace(model, zoo.batch(kind))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Layer(nn.Module):
    """Has everything that a forward could leave traces in: running statistics, random numbers, a counter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.drop(torch.tanh(self.norm(self.proj(x))))


class Stateless(nn.Module):
    """Can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.proj(x)))


class Model(nn.Module):
    def __init__(self, num_layers: int = 4, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.fails = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.seen += x.shape[0]
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.fails and i == 1:
                raise RuntimeError("out of luck")
        return {"loss": self.head(x).square().mean()}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(3))}


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a user could see of a model and of the process."""
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "where": {n: (p.data_ptr(), p.device, p.stride(), p.requires_grad, id(p)) for n, p in model.named_parameters()},
        "grads": {n: (id(p.grad), p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None},
        "buffers": {n: (id(b), b.clone(), b.data_ptr()) for n, b in model.named_buffers()},
        "flags": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._state_dict_hooks))
            for m in model.modules()
        ],
        "accumulate": {n: len(p._post_accumulate_grad_hooks or ()) for n, p in model.named_parameters()},
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": torch.get_rng_state(),
        "modes": [id(m) for m in _get_current_dispatch_mode_stack()],
        "grad mode": torch.is_grad_enabled(),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def a_used_model() -> nn.Module:
    """In the middle of somebody's work: gradients set, part of it in eval mode, a hook of the user's, a weight
    frozen.
    """
    torch.manual_seed(0)
    model = Model()
    model(**batch())["loss"].backward()
    model.layers[2].eval()
    model.layers[1].norm.eval()
    model.layers[3].proj.weight.requires_grad_(False)
    model.layers[0].register_forward_hook(lambda *_: None)
    model.embed.weight.grad = None
    return model


@EVERY_DEVICE
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
def test_tracing_changes_nothing_of_the_users_model(device: str, fails: bool) -> None:
    """Traps C18, F10: also when the model raises in the middle of it."""
    model = a_used_model()
    model.fails = fails
    given = batch()
    before, inputs = everything(model), {k: v.clone() for k, v in given.items()}
    with torch.no_grad():  # whatever mode the caller is in
        before["grad mode"] = False
        if fails:
            with pytest.raises(RuntimeError, match="out of luck"):
                trace(model, given, device)
        else:
            trace(model, given, device)
        after = everything(model)
    for what, value in before.items():
        assert equal(value, after[what]), what
    assert equal(inputs, given)


def test_a_forward_that_was_patched_onto_a_layer_stays() -> None:
    """Traps C18, F10: fused kernels are installed this way."""
    model = Model()
    patched = lambda x: x + 1.0
    model.layers[1].forward = patched
    trace(model, batch())
    assert vars(model.layers[1]).get("forward") is patched


class Rebinds(nn.Module):
    """Puts a new tensor in a buffer's place, as dynamic rotary tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.count = self.count + 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.sum()}


def test_a_buffer_that_forward_replaces_is_the_users_again() -> None:
    """Trap F10."""
    model = Rebinds()
    mine = model.count
    trace(model, batch())
    assert model.count is mine and float(mine) == 0.0


def test_an_expanded_buffer_is_no_obstacle() -> None:
    model = Rebinds()
    model.register_buffer("mask", torch.ones(1).expand(8))
    trace(model, batch())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_other_random_streams_are_where_they_were(draw: Callable[[], Any]) -> None:
    """Trap F10: masking and layer drop in transformers draw from numpy."""

    class Draws(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(x * (0.5 + draw()))

    expected = draw()
    random.seed(0)
    np.random.seed(0)
    trace(Draws(), batch())
    assert draw() == expected


def test_a_generator_that_a_module_owns_is_where_it_was() -> None:
    """PVeRA keeps them in a dict."""
    model = Model()
    model.layers[0].generators = {"default": torch.Generator().manual_seed(5), "other": None}
    model.layers[0].register_forward_pre_hook(
        lambda module, args: (args[0] + torch.randn(8, generator=module.generators["default"]),)
    )
    trace(model, batch())
    assert torch.equal(model.layers[0].generators["default"].get_state(), torch.Generator().manual_seed(5).get_state())


class Replaces(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.head.weight.data = self.head.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@EVERY_DEVICE
def test_a_parameter_whose_data_forward_replaces_is_refused_by_name_and_the_users_again(device: str) -> None:
    """PEFT's CPT does: what it puts there would never reach the parameter's home."""
    model = Replaces()
    before = everything(model)
    with pytest.raises(
        ModelUnsupported, match=r"^head\.weight: the model's forward replaces the data of this parameter"
    ):
        trace(model, batch(), device)
    assert equal(before, everything(model))


class NoLoss(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": super().forward(x)["loss"]}


@pytest.mark.parametrize("kind", [NoLoss, Model])
def test_a_model_with_nothing_to_train_is_refused(kind: type[nn.Module]) -> None:
    model = kind()
    model.requires_grad_(False)
    before = everything(model)
    with pytest.raises(ModelUnsupported, match="nothing to train"):
        trace(model, {"x": torch.ones(2, 8)})
    assert equal(before, everything(model))


# --- repeatable


@pytest.mark.parametrize("kind", ["gpt2", "bert", "mixtral"])
def test_a_trace_repeated_is_equal(kind: str) -> None:
    """Trap F2: on the simulated device to the last digit of its seconds."""
    graph, first = trace(zoo.make(kind), zoo.batch(kind))
    assert (graph, first) == traced(kind)


def test_bytes_are_the_same_on_cpu_and_sim_and_for_the_second_trace_of_one_model() -> None:
    """Traps F1, F2. The batch itself is on the device of `sim` alone: its first phase, and what dies with the call,
    differ by it.
    """
    model = zoo.make("llama")
    first, again = trace(model, zoo.batch("llama"), "cpu")[1], trace(model, zoo.batch("llama"), "cpu")[1]
    simulated = traced("llama")[1]
    for call, table in enumerate(first.calls):
        for strategy, work in table.items():
            assert only_bytes(work) == only_bytes(again.calls[call][strategy])
            if 0 < call < len(first.calls) - 1:
                assert only_bytes(work) == only_bytes(simulated.calls[call][strategy])
    assert first.shared == again.shared == simulated.shared and first.held_bytes == again.held_bytes


def test_a_strategy_that_computes_more_never_takes_less_time_than_keep() -> None:
    recomputed = 0
    for works in trace(zoo.make("llama"), zoo.batch("llama"), "cpu")[1].calls:
        keep = works["keep"]
        for name in works.keys() & {strategy.name for strategy in STRATEGIES if strategy.recomputes}:
            recomputed += 1
            seconds = works[name].forward_seconds + works[name].backward_seconds
            assert seconds >= 0.999 * (keep.forward_seconds + keep.backward_seconds)
    assert recomputed


def plain(num_blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return zoo.PlainModel(num_blocks=num_blocks, loops=1, tied=False)


def test_three_layers_and_twelve_give_the_same_work() -> None:
    """A layer's work does not depend on how many there are; those between the ends are never run."""
    (_, few), (graph, many) = trace(plain(3), zoo.batch("plain")), trace(plain(12), zoo.batch("plain"))
    assert len(graph.calls) == 14
    for call in range(14):
        same = few.calls[0 if call == 0 else 1 if call == 1 else 2 if call < 12 else call - 9]
        assert many.calls[call].keys() == same.keys()
        for strategy, work in many.calls[call].items():
            assert only_bytes(work) == only_bytes(same[strategy])
            assert (work.forward_seconds, work.backward_seconds) == pytest.approx(
                (same[strategy].forward_seconds, same[strategy].backward_seconds)
            )
    assert many.held_bytes == few.held_bytes


@pytest.mark.parametrize(("kind", "ran"), [("llama", {0, 1, 7}), ("gemma2", {0, 1, 2, 3, 7})])
def test_of_many_equal_layers_the_first_two_and_the_last_run(kind: str, ran: set[int]) -> None:
    """Trap F6: the cost of profiling is bounded, also where kinds of layers alternate."""
    from transformers import Gemma2ForCausalLM, LlamaForCausalLM

    config = zoo.make(kind).config
    config.num_hidden_layers = 8
    if kind == "gemma2":
        config.layer_types = config.layer_types * 2
    torch.manual_seed(0)
    model = (LlamaForCausalLM if kind == "llama" else Gemma2ForCausalLM)._from_config(config).train()
    seen: set[int] = set()
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: seen.add(i))
    graph, _ = trace(model, zoo.batch(kind))
    assert seen == ran and len(graph.calls) == 10


# --- the graph


def params_of(graph: BlockGraph) -> dict[str, set[str]]:
    return {block.name: set(block.params) for block in graph.blocks}


def test_the_regions_of_gpt2_own_what_they_read() -> None:
    found = params_of(traced("gpt2")[0])
    assert found["stem"] == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert found["head"] == {"transformer.ln_f.weight", "transformer.ln_f.bias", "transformer.wte.weight"}, (
        "the head is tied to the embedding"
    )


def test_the_shared_embedding_of_t5_belongs_to_all_three_regions() -> None:
    found = params_of(traced("t5")[0])
    assert found["stem"] == {"shared.weight"}
    assert found["between:decoder.block.0"] == {"shared.weight", "encoder.final_layer_norm.weight"}
    assert found["head"] == {"shared.weight", "decoder.final_layer_norm.weight"}
    assert traced("t5")[0].users["shared.weight"] == (0, 4, 8)


@pytest.mark.parametrize("kind", zoo.NAMES)
def test_every_parameter_is_listed_once_and_layers_hold_their_own(kind: str) -> None:
    """Trap C19: no trainable parameter is without a user."""
    model, (graph, _) = zoo.make(kind), traced(kind)
    assert [(p.name, p.shape, p.trainable) for p in graph.params] == [
        (n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()
    ]
    assert all(graph.users[p.name] for p in graph.params)
    canonical = {id(p): n for n, p in model.named_parameters()}
    for block in graph.blocks:
        if block.kind == "layer":
            others = {name for name in block.params if not name.startswith(f"{block.name}.")}
            assert set(block.params) - others == {
                canonical[id(p)] for p in model.get_submodule(block.name).parameters()
            }
            assert not others or (kind == "qwen3-vl" and all("deepstack_merger" in name for name in others)), (
                "run behind the layer"
            )
    assert [graph.blocks[v].kind for v in (graph.calls[0], graph.calls[-1])] == ["stem", "head"]
    assert graph.buffer_bytes == sum(b.nbytes for b in model.buffers())


def test_a_parameter_that_is_never_read_is_in_the_graph() -> None:
    """Trap D20."""
    model = Model()
    model.unused = nn.Parameter(torch.ones(5))
    graph, _ = trace(model, batch())
    assert (
        graph.param["unused"].numel == 5
        and graph.users["unused"] == ()
        and not any("unused" in b.params for b in graph.blocks)
    )


def test_a_list_whose_elements_are_never_called_is_no_stack_of_layers() -> None:
    """Trap C15: discovery is verified by the run; its weights belong to the region that reads them."""

    class Unrolled(Model):
        def __init__(self) -> None:
            super().__init__(2)
            self.mixes = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(x @ self.mixes[0].weight @ self.mixes[1].weight)

    graph, _ = trace(Unrolled(), batch())
    assert [b.name for b in graph.blocks] == ["stem", "layers.0", "layers.1", "head"]
    assert {"mixes.0.weight", "mixes.1.weight"} <= params_of(graph)["stem"]


@pytest.mark.parametrize("kind", ["plain", "llama", "t5", "gpt2"])
def test_a_frozen_prefix_has_no_backward_where_autograd_has_none(kind: str) -> None:
    """Design 2.2: measured, and equal to what a plain run of the model says."""
    model = zoo.make(kind)
    zoo.freeze_some(model, seed=1)
    outputs: dict[str, bool] = {}
    handles = [
        layer.module.register_forward_hook(
            lambda m, a, out, name=layer.name: outputs.update({name: next(tensors_in(out)).requires_grad})
        )
        for layer in find_layers(model)
    ]
    model(**zoo.batch(kind))
    for handle in handles:
        handle.remove()
    graph, found = trace(model, zoo.batch(kind))
    for call, has_backward in enumerate(graph.has_backward):
        name = graph.call_name(call)
        if name in outputs:
            assert has_backward == outputs[name], name
        if not has_backward:
            assert found.strategies(call) == ("keep",), "nothing to choose where nothing is saved"
            work = found.work(call, "keep")
            assert work.backward_seconds == work.backward_delta_bytes == work.backward_peak_bytes == 0
    assert not graph.has_backward[0] and graph.has_backward[-1] and not all(outputs.values())


class Seeing(nn.Module):
    """Embeddings that pass a tower by, and features of the middle of the tower that enter behind the first layers."""

    def __init__(self, *, num_deep: int = 0, reads_scale: bool = False) -> None:
        super().__init__()
        self.embed, self.merge, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8)) if reads_scale else None
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9))
        self.aside = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(num_deep))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9))

    def forward(self, x: Tensor, image: Tensor) -> dict[str, Tensor]:
        text = self.embed(x) if self.scale is None else x * self.scale
        deep = []
        for i, layer in enumerate(self.tower):
            image = layer(image)
            if i < len(self.aside):
                deep.append(self.aside[i](image))
        text = text + self.merge(image)
        for i, layer in enumerate(self.layers):
            text = layer(text)
            if i < len(deep):
                text = text + deep[i]
        return {"loss": self.head(text).square().mean()}


def pictures() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8), "image": torch.randn(4, 8)}


def test_what_passes_a_frozen_tower_by_has_its_backward() -> None:
    """Token embeddings of a model with a frozen vision tower: the stem hands nothing to the tower that has a
    gradient.
    """
    model = Seeing()
    model.tower.requires_grad_(False)
    graph, found = trace(model, pictures())
    towers = [call for call in range(len(graph.calls)) if graph.call_name(call).startswith("tower")]
    assert [call for call, has in enumerate(graph.has_backward) if not has] == towers
    assert found.work(0, "keep").backward_seconds > 0 and "embed.weight" in params_of(graph)["stem"]


def test_a_weight_whose_gradient_arrives_outside_of_hooks_is_refused_by_name() -> None:
    """Read without a call, and handed to no layer: nothing tells when its block's backward begins."""
    model = Seeing(reads_scale=True)
    model.embed.requires_grad_(False)
    model.tower.requires_grad_(False)
    with pytest.raises(ModelUnsupported, match=r"scale has a gradient.*stem"):
        trace(model, pictures())
    model.tower.requires_grad_(True)
    with pytest.raises(ModelUnsupported, match=r"scale has a gradient"):
        trace(model, pictures())
    model.scale.requires_grad_(False)
    trace(model, pictures())


def test_a_list_that_only_branches_off_is_no_stack() -> None:
    """Its modules run with the layer before them, which then holds their weights and is of another kind than its
    neighbours.
    """
    graph, _ = trace(Seeing(num_deep=3), pictures())
    names = [graph.call_name(call) for call in range(len(graph.calls))]
    assert names == [
        "stem",
        *(f"tower.{i}" for i in range(9)),
        "between:layers.0",
        *(f"layers.{i}" for i in range(9)),
        "head",
    ]
    params = params_of(graph)
    assert {"aside.1.0.weight", "aside.1.0.bias"} < params["tower.1"] and len(params["tower.3"]) == 2


@pytest.mark.parametrize("num_deep", [0, 1, 4])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_are_skipped_have_the_bytes_that_they_have_when_all_run(num_deep: int, frozen: bool) -> None:
    """All run if no two are alike. What runs behind a layer, or before it, makes kinds of its own."""
    alike, unlike = Seeing(num_deep=num_deep), Seeing(num_deep=num_deep)
    for i, layer in enumerate((*unlike.tower, *unlike.layers)):
        layer.tag = (i, i)
    for model in (alike, unlike):
        model.tower.requires_grad_(not frozen)
    (graph, few), (_, many) = trace(alike, pictures()), trace(unlike, pictures())
    for call in range(len(graph.calls)):
        for strategy in few.strategies(call):
            assert only_bytes(few.work(call, strategy)) == only_bytes(many.work(call, strategy)), (
                graph.call_name(call),
                strategy,
            )
    assert lifetimes(few) == lifetimes(many) and few.held_bytes == many.held_bytes


def lifetimes(found: ModelTrace) -> list[SharedTensor]:
    """Without when a tensor would die in forward if nothing held it or sent it, where under every strategy something
    does: it is not always known.
    """

    def is_kept(tensor: SharedTensor) -> bool:
        known = [
            {*dict(tensor.held_by).get(call, ()), *dict(tensor.sent_by).get(call, ())} for call in dict(tensor.held_by)
        ]
        return any(under >= set(WITHOUT_ATTENTION) for under in known)

    return [dataclasses.replace(tensor, freed_in=0) if is_kept(tensor) else tensor for tensor in found.shared]


class Lent(nn.Module):
    """A layer with a module that other layers have too."""

    def __init__(self, lent: nn.Module, tag: Any) -> None:
        super().__init__()
        self.own, self.lent, self.tag = nn.Linear(8, 8), lent, tag

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lent(self.own(x)))


class Lending(nn.Module):
    def __init__(self, *, stride: int, alike: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        lent = [nn.Linear(8, 8) for _ in range(12 // stride)]
        self.layers = nn.ModuleList(Lent(lent[i // stride], None if alike else (i, i)) for i in range(12))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


@pytest.mark.parametrize("stride", [2, 3, 12])
def test_layers_that_share_weights_have_the_bytes_that_they_have_when_all_run(stride: int) -> None:
    """The gradient of a shared weight is there from the backward of the last layer that has it to that of the first."""
    (graph, few), (_, many) = (trace(Lending(stride=stride, alike=alike), batch()) for alike in (True, False))
    for call in range(len(graph.calls)):
        for strategy in few.strategies(call):
            assert only_bytes(few.work(call, strategy)) == only_bytes(many.work(call, strategy)), (
                graph.call_name(call),
                strategy,
            )


class Stream:
    def __init__(self, hidden: Tensor, beside: Tensor):
        self.hidden, self.beside = hidden, beside


class TwoStreams(nn.Module):
    def __init__(self, tag: Any) -> None:
        super().__init__()
        self.one, self.two, self.tag = nn.Linear(8, 8), nn.Linear(8, 8), tag

    def forward(self, stream: Stream) -> Stream:
        hidden = stream.hidden + torch.tanh(self.one(stream.beside))
        return Stream(hidden, stream.beside + torch.tanh(self.two(hidden)))


class Streaming(nn.Module):
    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(TwoStreams(None if alike else (i, i)) for i in range(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        stream = Stream(self.embed(x), x)
        for layer in self.layers:
            stream = layer(stream)
        return {"loss": self.head(stream.hidden + stream.beside).square().mean()}


def test_a_second_stream_in_a_record_goes_through_layers_that_are_skipped() -> None:
    """As ShadowPEFT's: its gradient comes to the layers before them too. What is swapped of it is an upper bound."""
    (graph, few), (_, many) = (trace(Streaming(alike=alike), batch()) for alike in (True, False))
    assert all(graph.has_backward)
    for call in range(len(graph.calls)):
        for strategy in {"keep", "recompute", "offload"} & set(few.strategies(call)):
            assert only_bytes(few.work(call, strategy)) == only_bytes(many.work(call, strategy)), (
                graph.call_name(call),
                strategy,
            )


class LooksFirst(Model):
    """Runs its layers without grad before it trains them, as X-LoRA does."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.embed.requires_grad_(False)
            seen = self.embed(x)
            for layer in self.layers:
                seen = layer(seen)
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": (self.head(x) + seen.mean()).square().mean()}


def test_layers_that_run_without_grad_first_do_not_stand_for_those_that_train() -> None:
    graph, found = trace(LooksFirst(num_layers=6, layer=Stateless), batch())
    layers = [call for call in range(len(graph.calls)) if graph.call_name(call).startswith("layers")]
    assert [graph.has_backward[call] for call in layers] == [False] * 6 + [True] * 6
    assert all(
        found.strategies(call) == (WITHOUT_ATTENTION if graph.has_backward[call] else ("keep",)) for call in layers
    )


# --- layers that cannot be recomputed


class Remembers(nn.Module):
    """Saves more from call to call, as a layer with a cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x + torch.tanh(self.proj(torch.cat(self.seen))).sum(0)


@pytest.mark.parametrize("odd", [(2,), (1, 3, 5)])
def test_a_layer_whose_second_run_differs_is_kept_or_swapped_and_a_note_names_it(
    odd: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(num_layers=7, layer=Stateless)
    for i in odd:
        model.layers[i] = Remembers()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: [module.layers[i].seen.clear() for i in odd] and None, with_kwargs=True
    )
    _, found = trace(model, batch())
    for call in range(1, 8):
        assert found.strategies(call) == (("keep", "swap") if call - 1 in odd else WITHOUT_ATTENTION)
    [note] = [record.getMessage() for record in caplog.records]
    others = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    assert note.startswith(
        f"layers.{odd[0]}{others}: a second run of the forward differs from the first (saved tensor 0 is float32 (5, "
        "8) on cpu"
    )
    assert note.endswith("These activations are kept or swapped, not recomputed.")


def test_where_memory_is_too_small_for_second_runs_none_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come on top of what a trial kept before there was a comparison: a batch that fitted then fits still."""
    expected, calls = traced("plain"), 0

    def runs_out(*_: Any) -> Tensor:
        nonlocal calls
        calls += 1
        raise torch.OutOfMemoryError("no memory for a second run")

    monkeypatch.setattr(profiling_pass, "keep_and_compare", runs_out)
    assert trace(zoo.make("plain"), zoo.batch("plain")) == expected and calls == 1


# --- the numbers


def test_the_first_phase_does_not_count_the_model() -> None:
    """Trap F1."""

    class Wide(Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50_000, 8)  # 1.6 MB

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return super().forward(self.table(x))

    _, found = trace(Wide(), {"x": torch.arange(5)})
    stem = found.work(0, "keep")
    assert 0 < stem.forward_delta_bytes <= stem.forward_peak_bytes <= 1024


@dataclasses.dataclass
class Saved:
    """What autograd keeps of one run of a layer, counted by storages."""

    storages: dict[int, int]
    """All but weights, buffers and what came as another input."""
    input: tuple[int, int]
    output: tuple[int, int]
    """Storage and bytes."""


def saved_by(model: nn.Module, inputs: Any, layer: nn.Module) -> Saved:
    """An independent count, with saved_tensors_hooks around the layer alone."""
    static = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: list[Saved] = []
    alive: list[Any] = []
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        hidden = given[0].untyped_storage().data_ptr()
        others = {t.untyped_storage().data_ptr() for t in given[1:]} - {hidden}
        storages: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            alive.append(t.detach())
            if (key := t.untyped_storage().data_ptr()) not in static | others and t.untyped_storage().nbytes():
                storages[key] = t.untyped_storage().nbytes()
            return t

        with saved_tensors_hooks(note, lambda t: t):
            out = original(*args, **kwargs)
        result = next(tensors_in(out))
        found.append(
            Saved(
                storages,
                (hidden, given[0].untyped_storage().nbytes()),
                (result.untyped_storage().data_ptr(), result.untyped_storage().nbytes()),
            )
        )
        return out

    layer.forward = forward
    alive.append(model(**inputs))
    del layer.forward
    return found[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "bert", "t5", "plain", "mixed"])
def test_a_kept_layer_holds_what_autograd_saves_and_its_output(kind: str) -> None:
    """Trap G1: not the output's size, nor a formula. Weights and what layers share, inputs and outputs among it, are
    not counted.
    """
    model, (graph, found) = zoo.make(kind), traced(kind)
    call = 2
    counted = saved_by(model, zoo.batch(kind), model.get_submodule(graph.call_name(call)))
    born = {
        where: size for where, size in counted.storages.items() if where not in (counted.input[0], counted.output[0])
    }
    work = found.work(call, "keep")
    assert work.forward_delta_bytes == sum(born.values())
    assert [tensor.num_bytes for tensor in found.shared if tensor.allocated_in == call] == [counted.output[1]]
    assert work.backward_delta_bytes == -work.forward_delta_bytes, "backward gives back what forward took"
    assert work.forward_delta_bytes > 4 * counted.output[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "bert", "t5", "plain", "mixed"])
def test_swap_sends_what_autograd_saves_and_no_weight(kind: str) -> None:
    """Traps A23, G15: the same storages, each once and rounded up to where the next may begin."""
    model, (graph, found) = zoo.make(kind), traced(kind)
    counted = saved_by(model, zoo.batch(kind), model.get_submodule(graph.call_name(2)))
    work = found.work(2, "swap")
    assert work.sent_bytes == sum(-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in counted.storages.values())
    assert 0 < work.released_bytes <= work.sent_bytes


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_saved_attention_costs_its_outputs_and_saves_its_kernel(kind: str) -> None:
    """The result and the log-sum-exp, on the GPU or with the input on the host."""
    model, (_, found) = zoo.make(kind), traced(kind)
    config, tokens = model.config, zoo.batch(kind)["input_ids"].numel()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = [tokens * config.num_attention_heads * width * 4 for width in (head_dim, 1)]
    again, saved, offload, sent = (
        found.work(2, s) for s in ("recompute", "recompute+attention", "offload", "offload+attention")
    )
    assert saved.forward_delta_bytes - again.forward_delta_bytes == sum(sizes) and saved.sent_bytes == 0
    aligned = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
    assert sent.sent_bytes - offload.sent_bytes == sum(aligned)
    assert sent.released_bytes - offload.released_bytes == sum(sizes)
    assert again.backward_seconds - saved.backward_seconds > 0
    assert saved.backward_seconds == sent.backward_seconds and offload.backward_seconds == again.backward_seconds


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "plain"])
def test_a_recomputed_layer_leaves_its_output_alone(kind: str) -> None:
    """Trap G2: the chain of inputs is what remains of a stack of recomputed layers."""
    model, (graph, found) = zoo.make(kind), traced(kind)
    counted = saved_by(model, zoo.batch(kind), model.get_submodule(graph.call_name(2)))
    again, offload, keep = (found.work(2, s) for s in ("recompute", "offload", "keep"))
    assert again.forward_delta_bytes == offload.forward_delta_bytes == 0
    output = next(tensor for tensor in found.shared if tensor.allocated_in == 2)
    assert (
        output.num_bytes == counted.output[1]
        and set(dict(output.held_by)[3]) & set(WITHOUT_ATTENTION) == {"keep", "recompute"}
        and set(dict(output.sent_by)[3]) & set(WITHOUT_ATTENTION) == {"offload", "swap"}
    )
    assert offload.sent_bytes == -(-counted.input[1] // ALIGN_BYTES) * ALIGN_BYTES
    assert again.backward_peak_bytes > keep.backward_peak_bytes, "the forward runs again in backward"
    assert again.backward_seconds > keep.backward_seconds and again.forward_seconds == keep.forward_seconds


def test_longer_batches_save_more_and_by_what_they_are_longer() -> None:
    """Traps G2, G4: linear where the kernels are."""
    sizes = [
        trace(zoo.make("plain"), zoo.batch("plain", tokens=n))[1].work(2, "keep").forward_delta_bytes
        for n in (8, 16, 32)
    ]
    assert sizes[1] == 2 * sizes[0] and sizes[2] == 4 * sizes[0]
    eager = zoo.make("llama")
    eager.set_attn_implementation("eager")
    (_, flash), (_, squared) = traced("llama"), trace(eager, zoo.batch("llama"))
    assert squared.work(2, "keep").forward_delta_bytes > flash.work(2, "keep").forward_delta_bytes


def test_what_layers_share_is_counted_once() -> None:
    """The rotary tables of a decoder: each layer takes them, none of its numbers holds them."""
    graph, found = traced("llama")
    tables = [tensor for tensor in found.shared if tensor.role == "argument" and tensor.number > 0]
    assert [tensor.num_bytes for tensor in tables] == [512, 512, 128]  # cos and sin: (1, 16, 8) in fp32, positions
    assert all([call for call, _ in tensor.held_by] == [1, 2, 3, 4] for tensor in tables) and len(graph.calls) == 6


def test_held_bytes_are_the_outputs() -> None:
    """(2, 16, 97) logits in fp32, and the loss."""
    assert traced("plain")[1].held_bytes == 2 * 16 * zoo.VOCAB * 4 + 4


# --- as records


@pytest.mark.parametrize("kind", zoo.NAMES)
def test_graph_and_trace_come_back_from_json_with_equal_fingerprints(kind: str) -> None:
    """Trap F9."""
    graph, found = traced(kind)
    graph_again, found_again = loads(BlockGraph, dumps(graph)), loads(ModelTrace, dumps(found))
    assert (graph_again, found_again) == (graph, found)
    assert fingerprint(graph_again) == fingerprint(graph) == found.graph and fingerprint(found_again) == fingerprint(
        found
    )


@pytest.mark.parametrize("kind", zoo.NAMES)
def test_layers_know_every_strategy_and_regions_only_to_keep(kind: str) -> None:
    """Attention by hand (T5, capped scores) or with dropout is not saved."""
    graph, found = traced(kind)
    for call, block in enumerate(graph.calls):
        is_layer = graph.blocks[block].kind == "layer" and graph.has_backward[call]
        known = KNOWN_ATTENTION.get(kind, "") and KNOWN_ATTENTION[kind] in graph.call_name(call)
        expected = tuple(s.name for s in STRATEGIES) if known else WITHOUT_ATTENTION
        assert found.strategies(call) == (expected if is_layer else ("keep",)), graph.call_name(call)
    assert found.inputs == {name: tuple(t.shape) for name, t in zoo.batch(kind).items()}


class _Recording(Tracer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.modules: list[nn.Module] = []

    def place(self, module: nn.Module) -> None:
        self.modules.append(module)
        super().place(module)


def test_only_layers_that_run_are_copied_to_the_device() -> None:
    """Trap F6, design 3.7: prepare never has the whole model on the device."""
    from transformers import LlamaForCausalLM

    config = zoo.make("llama").config
    config.num_hidden_layers = 12
    model = LlamaForCausalLM._from_config(config).train()
    tracer = _Recording(model, zoo.batch("llama"), find_layers(model), CpuDevice())
    tracer.trace()
    placed = {i for i, layer in enumerate(model.model.layers) if any(layer is module for module in tracer.modules)}
    assert placed == {0, 1, 11}
