"""Weights and tensors that several block calls use: looped stacks, one encoder called twice, layers tied to layers,
keys and values that later layers read.

Each trains as a plain loop does, and takes no more memory than its plan says: the gradient of what is shared lives from
the last user to the first.
"""

import functools
import importlib
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cells
import pytest
import torch
import transformers
import transformers.utils
from parity.test_mixed_plans import random_decision
from torch import Tensor, nn

import outsize
from outsize.base.errors import ModelUnsupported, PlanInfeasible
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.model.discover import find_layers
from outsize.profile.tracer import Tracer

WIDTH, VOCAB = 16, 31
CHUNK_BYTES = 1024
MOST_ABOVE = 0.03
"""Of the measured peak, what an estimate may be above it. Tensors in dicts die with the strategies of several layers
together.
"""


def loss_of(logits: Tensor, ids: Tensor) -> SimpleNamespace:
    return SimpleNamespace(loss=nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Looped(nn.Module):
    """A stack that runs several times."""

    def __init__(self, num_layers: int = 4, loops: int = 3, ties: tuple[tuple[int, int], ...] = (), whole: bool = True):
        super().__init__()
        self.embed, self.head, self.loops = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), loops
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        for later, earlier in ties:
            if whole:
                self.layers[later].up = self.layers[earlier].up
            else:
                self.layers[later].up.weight = self.layers[earlier].up.weight

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for _ in range(self.loops):
            for layer in self.layers:
                x = layer(x)
        return loss_of(self.head(x), ids)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).mean(1)


class Towers(nn.Module):
    """One encoder for queries and documents, each with a projection of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.query, self.document = Encoder(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        one, other = self.query(self.encoder(ids)), self.document(self.encoder(ids.flip(0)))
        return SimpleNamespace(loss=nn.functional.cross_entropy((one @ other.T).float(), torch.arange(len(ids))))


class Sharing(nn.Module):
    """Makes keys, leaves them in `store`, or reads them there."""

    def __init__(self, index: int, num_own: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 3 * WIDTH) if index < num_own else None
        self.leaves = index == num_own - 1

    def forward(self, x: Tensor, store: Any) -> Tensor:
        held = store if isinstance(store, (list, dict, UserDict)) else store.held
        keys = (
            torch.tanh(self.keys(x)) if self.keys is not None else held[-1] if isinstance(held, list) else held["keys"]
        )
        if self.leaves and isinstance(held, list):
            held.append(keys)
        elif self.leaves:
            held["keys"] = keys
        return x + self.down(torch.tanh(self.up(x))) * keys[..., :WIDTH]


class Store(SimpleNamespace):
    """An object of another kind than those that arguments are looked for in."""


class KeySharing(nn.Module):
    """Later layers read the keys of an earlier one, as in Gemma 3n."""

    def __init__(self, store: Callable[[], Any]):
        super().__init__()
        self.embed, self.head, self.store = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), store
        self.layers = nn.ModuleList(Sharing(i, 3) for i in range(8))

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x, store = self.embed(ids), self.store()
        for layer in self.layers:
            x = layer(x, store)
        return loss_of(self.head(x), ids)


class Collecting(nn.Module):
    """Each layer appends to a list that the root sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Appending() for _ in range(5))

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x, penalties = self.embed(ids), []
        for layer in self.layers:
            x = layer(x, penalties)
        return SimpleNamespace(loss=loss_of(self.head(x), ids).loss + 0.1 * sum(penalties))


class Appending(Block):
    def forward(self, x: Tensor, penalties: list[Tensor]) -> Tensor:  # type: ignore[override]
        inner = torch.tanh(self.up(x))
        out = x + self.down(inner)
        penalties.append(inner.float().square().mean())  # the last operator of the layer, not its output
        return out


Make = Callable[[], nn.Module]
WEIGHTS: dict[str, Make] = {
    "looped": Looped,
    "looped-twice": functools.partial(Looped, num_layers=3, loops=2),
    "towers": Towers,
    "tied": functools.partial(Looped, num_layers=5, loops=1, ties=((3, 0),), whole=False),
    "tied-in-reverse": functools.partial(Looped, num_layers=8, loops=1, ties=((7, 0), (6, 1), (5, 2), (4, 3))),
    "tied-out-of-order": functools.partial(Looped, num_layers=9, loops=1, ties=((5, 0), (6, 1), (7, 2), (4, 3))),
}
TENSORS: dict[str, Make] = {
    "dict": functools.partial(KeySharing, dict),
    "UserDict": functools.partial(KeySharing, UserDict),
    "list": functools.partial(KeySharing, list),
    "namespace": functools.partial(KeySharing, lambda: SimpleNamespace(held={})),
    "object": functools.partial(KeySharing, lambda: Store(held={})),
    "collected": Collecting,
}
MAKE = WEIGHTS | TENSORS
DATA = [{"ids": torch.randint(0, VOCAB, (2, 3), generator=torch.Generator().manual_seed(i))} for i in range(3)]
"""Few tokens: weights and their gradients are most of the memory."""


def made(make: Make, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).train()


def machine() -> SimDevice:
    return SimDevice(lookup("1GiB"))


@functools.cache
def traced(case: str, dtype: torch.dtype) -> cells.Traced:
    model = made(MAKE[case], dtype)
    return Tracer(model, DATA[0], find_layers(model), machine()).trace()


@functools.cache
def expected(case: str, dtype: torch.dtype, accumulate: int, fp32_grads: bool) -> cells.Outcome:
    return cells.plain(
        made(MAKE[case], dtype),
        DATA,
        spec=outsize.AdamW(lr=1e-2, fp32_grads=fp32_grads),
        steps=2,
        accumulate=accumulate,
    )


def train_within_plan(
    engine: Any,
    data: list[Any],
    outcome: cells.Outcome,
    *,
    accumulate: int = 1,
    declare: bool = False,
    most_above: float = 0.0,
) -> None:
    """To the bit, at most at the estimate, and hardly below it."""
    found = cells.train(
        engine.model, engine.optimizer, data, steps=2, accumulate=accumulate, engine=engine, declare=declare
    )
    cells.assert_same(found, outcome)
    peak, estimate = engine.report().gpu_peak_bytes, engine.plan.estimate.gpu_bytes
    assert peak <= estimate <= peak * (1 + most_above)


def under_plan(
    case: str, dtype: torch.dtype, decide: cells.Decide, *, accumulate: int, update: Any, fp32_grads: bool
) -> None:
    spec = outsize.AdamW(lr=1e-2, update=update, fp32_grads=fp32_grads)
    how: dict[str, Any] = dict(spec=spec, device=machine(), accumulate=accumulate, chunk_bytes=CHUNK_BYTES, budget=None)
    with cells.closing(
        cells.prepare_by_hand(made(MAKE[case], dtype), DATA[0], traced=traced(case, dtype), decision=decide, **how)
    ) as engine:
        outcome = expected(case, dtype, accumulate, fp32_grads)
        above = MOST_ABOVE if case in TENSORS else 0.0
        train_within_plan(
            engine, DATA, outcome, accumulate=accumulate, declare=update == "in_backward", most_above=above
        )


TERMS: list[dict[str, Any]] = [
    {"accumulate": accumulate, "update": update, "fp32_grads": fp32}
    for accumulate in (1, 2)
    for update in ("after_step", "in_backward")
    for fp32 in (False, True)
]


def cases_of(names: dict[str, Make]) -> Iterator[Any]:
    """Every case under two strategies by turns, with step_config, dtype and homes that are drawn; the full run has all
    strategies and five ways each.
    """
    rng = random.Random(17)
    ways = [
        (dtype, home, step_config)
        for dtype in (torch.float32, torch.bfloat16)
        for home in ("host", "gpu")
        for step_config in TERMS
    ]
    ways = [way for way in ways if way[0] == torch.bfloat16 or not way[2]["fp32_grads"]]
    for i, case in enumerate(names):
        for j, strategy in enumerate(("keep", "recompute", "offload", "swap")):
            for number, (dtype, home, step_config) in enumerate(rng.sample(ways, 5)):
                words = [
                    case,
                    strategy,
                    str(dtype)[6:],
                    home,
                    step_config["update"],
                    str(step_config["accumulate"]),
                    *(["fp32_grads"] * step_config["fp32_grads"]),
                ]
                yield pytest.param(
                    case,
                    strategy,
                    dtype,
                    home,
                    step_config,
                    marks=pytest.mark.full if number or (i + j) % 2 else (),
                    id="-".join(words),
                )


@pytest.mark.parametrize(("case", "strategy", "dtype", "home", "step_config"), list(cases_of(MAKE)))
def test_what_is_shared_is_counted_under_every_strategy(
    case: str, strategy: Any, dtype: torch.dtype, home: str, step_config: dict[str, Any]
) -> None:
    decide = functools.partial(cells.uniform, strategy=strategy, weights=home, optimizer=home, depth=0)
    under_plan(case, dtype, decide, **step_config)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
@pytest.mark.parametrize("case", MAKE)
def test_what_is_shared_is_counted_under_mixed_plans(case: str, seed: int) -> None:
    rng = random.Random(f"{case} {seed}")
    step_config = {
        "accumulate": rng.choice((1, 2)),
        "update": rng.choice(("after_step", "in_backward")),
        "fp32_grads": False,
    }
    under_plan(case, torch.float32, functools.partial(random_decision, rng=rng), **step_config)


def smallest(make: Make, batch: Any, spec: outsize.AdamW) -> int:
    with pytest.raises(PlanInfeasible) as raised:
        outsize.prepare(made(make), batch, device="sim:1B", optimizer=spec, chunk_bytes=CHUNK_BYTES)
    return raised.value.needed_bytes


@pytest.mark.parametrize("case", ["looped", "towers", "tied-in-reverse", "UserDict"])
def test_the_smallest_budget_suffices(case: str) -> None:
    spec = outsize.AdamW(lr=1e-2)
    budget = smallest(MAKE[case], DATA[0], spec)
    device = SimDevice(lookup(f"{budget}B"))
    with cells.closing(
        outsize.prepare(made(MAKE[case]), DATA[0], device=device, optimizer=spec, chunk_bytes=CHUNK_BYTES)
    ) as engine:
        assert engine.plan.estimate.gpu_bytes == budget
        train_within_plan(
            engine, DATA, expected(case, torch.float32, 1, False), most_above=MOST_ABOVE if case in TENSORS else 0.0
        )


class ThereAndBack(Looped):
    """The norm and the head run after the second call of the first layer: they are in its block, which the plan has
    complete in the backward of its first call.
    """

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> SimpleNamespace:
        x = self.embed(ids)
        for layer in (*self.layers, *reversed(self.layers)):
            x = layer(x)
        return loss_of(self.head(self.norm(x)), ids)


def test_gradients_of_code_after_a_later_call_of_a_layer_are_counted_until_its_first() -> None:
    spec = outsize.AdamW(lr=1e-2)
    outcome = cells.plain(made(ThereAndBack), DATA, spec=spec, steps=2)
    for budget in (smallest(ThereAndBack, DATA[0], spec), None):
        with cells.closing(
            outsize.prepare(
                made(ThereAndBack),
                DATA[0],
                device=machine(),
                gpu_memory=budget,
                optimizer=spec,
                chunk_bytes=CHUNK_BYTES,
            )
        ) as engine:
            train_within_plan(engine, DATA, outcome, most_above=0.25)


def test_tensors_in_an_unknown_object_keep_all_activations_and_say_so() -> None:
    _, trace = traced("object", torch.float32)
    assert all(trace.strategies(call) == ("keep",) for call in range(len(trace.calls)))
    assert (
        trace.notes[0].startswith("layers.3 reads a tensor that layers.2 made and that is none of its arguments")
        and len(trace.notes) == 1
    )
    _, trace = traced("dict", torch.float32)
    assert "offload" in trace.strategies(5) and not trace.notes


# --- Gemma 3n and 4: inputs of each layer beside the hidden state, keys and values of earlier layers


def gemma(kind: str, num_layers: int = 6, num_shared: int = 2, **more: Any) -> nn.Module:
    if kind == "Gemma3n":  # its configuration imports timm, which needs torchvision
        has_timm, transformers.utils.is_timm_available = transformers.utils.is_timm_available, lambda: False
        try:
            importlib.import_module("transformers.models.gemma3n.configuration_gemma3n")
        finally:
            transformers.utils.is_timm_available = has_timm
        more |= {
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.95 if i < 2 else 0.0 for i in range(num_layers)],
        }
    else:
        more |= {"global_head_dim": 16}
    config = getattr(transformers, f"{kind}TextConfig")(
        vocab_size=97,
        vocab_size_per_layer_input=97,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=num_shared,
        sliding_window=8,
        pad_token_id=0,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        max_position_embeddings=64,
        **more,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gemma_data() -> list[dict[str, Tensor]]:
    ids = [torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return [{"input_ids": one, "labels": one} for one in ids]


@pytest.mark.parametrize("kind", ["Gemma3n", "Gemma4"])
def test_gemma_trains_streamed_and_resident(kind: str) -> None:
    make, data, spec = functools.partial(gemma, kind), gemma_data(), outsize.AdamW(lr=1e-3)
    model = made(make)
    outcome, trace = (
        cells.plain(made(make), data, spec=spec, steps=2),
        Tracer(model, data[0], find_layers(model), machine()).trace(),
    )
    plans: list[dict[str, Any]] = [
        {"strategy": "offload", "weights": "host", "optimizer": "host", "depth": 0},
        {"strategy": "keep", "weights": "gpu", "optimizer": "gpu"},
    ]
    for plan in plans:
        with cells.closing(
            cells.prepare_by_hand(made(make), data[0], spec=spec, device=machine(), traced=trace, budget=None, **plan)
        ) as engine:
            train_within_plan(engine, data, outcome, most_above=MOST_ABOVE)


@pytest.mark.full
@pytest.mark.parametrize("num_shared", [0, 4])
@pytest.mark.parametrize("kind", ["Gemma3n", "Gemma4"])
def test_gemma_trains_at_its_smallest_budget_and_with_room(kind: str, num_shared: int) -> None:
    make, data, spec = functools.partial(gemma, kind, 8, num_shared), gemma_data(), outsize.AdamW(lr=1e-3)
    outcome = cells.plain(made(make), data, spec=spec, steps=2)
    for budget in (smallest(make, data[0], spec), 2**30):
        device = SimDevice(lookup(f"{budget}B"))
        with cells.closing(
            outsize.prepare(made(make), data[0], device=device, optimizer=spec, chunk_bytes=CHUNK_BYTES)
        ) as engine:
            train_within_plan(engine, data, outcome, most_above=MOST_ABOVE)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["Gemma3n", "Gemma4"])
def test_gemma_trains_under_mixed_plans(kind: str, seed: int) -> None:
    make, data, spec = functools.partial(gemma, kind, 14, 8), gemma_data(), outsize.AdamW(lr=1e-3)
    rng = random.Random(seed)
    strategies: tuple[Any, ...] = ("keep", "recompute", "offload", "swap")
    decide: Any = functools.partial(random_decision, rng=rng)
    if seed < 4:
        decide = functools.partial(cells.uniform, strategy=strategies[seed], weights="host", optimizer="host", depth=0)
    with cells.closing(
        cells.prepare_by_hand(
            made(make), data[0], spec=spec, device=machine(), decision=decide, budget=None, chunk_bytes=4096
        )
    ) as engine:
        train_within_plan(engine, data, cells.plain(made(make), data, spec=spec, steps=2), most_above=MOST_ABOVE)


# --- parameters over one memory


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def refused(model: nn.Module, match: str) -> None:
    for device in ("cpu", "sim:16MiB"):
        with pytest.raises(ModelUnsupported, match=match):
            outsize.prepare(model, {"input": torch.randn(2, 8)}, device=device)


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = two_layers()
    model[1].weight = nn.Parameter(model[0].weight.data)
    refused(
        model,
        r"0\.weight and 1\.weight are two parameters over the same memory.*\(model\[1\]\.weight = model\[0\]\.weight\).*clone",
    )
    model[1].weight.requires_grad_(False)  # training the first would move the second
    refused(model, "two parameters over the same memory")
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    refused(model, "two parameters over the same memory")
    memory = torch.randn(12, 8)
    model[0].weight, model[1].weight = nn.Parameter(memory[:8]), nn.Parameter(memory[4:])
    refused(model, "two parameters over the same memory")


def test_a_buffer_over_a_trained_parameter_is_refused() -> None:
    model = two_layers()
    model.register_buffer("first", model[0].weight.data[0])
    refused(model, r"0\.weight and the buffer first share memory")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters_with_gaps_or_repeated_elements_are_refused(requires_grad: bool) -> None:
    model, columns = two_layers(), torch.randn(8, 16)
    for i, layer in enumerate(model):
        layer.weight = nn.Parameter(columns[:, 8 * i : 8 * i + 8], requires_grad)
    refused(model, r"0\.weight has shape \(8, 8\) and strides \(16, 1\), .*\. Make it contiguous before prepare")
    model = two_layers()
    model[0].bias = nn.Parameter(torch.zeros(1).expand(8), requires_grad)
    refused(model, r"0\.bias has shape \(8,\) and strides \(0,\), .*\. Make it contiguous before prepare")


class Sums(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> SimpleNamespace:
        out = self.inner(x)
        return SimpleNamespace(loss=(out[0] if isinstance(out, tuple) else out).square().mean())


def tied() -> nn.Module:
    model = two_layers()
    model[1].weight = model[0].weight
    return Sums(model)


def frozen_twice() -> nn.Module:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    return Sums(model)


def flat() -> nn.Module:
    """Parts of one buffer, one after the other."""
    model, memory = two_layers(), torch.randn(16)
    for i, layer in enumerate(model):
        layer.bias = nn.Parameter(memory[8 * i : 8 * i + 8])
    return Sums(model)


def lstm() -> nn.Module:
    return Sums(nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True))


def gru() -> nn.Module:
    return Sums(nn.GRU(8, 8, num_layers=2, batch_first=True))


@pytest.mark.parametrize("make", [tied, frozen_twice, flat, lstm, gru], ids=lambda make: make.__name__)
def test_parameters_beside_each_other_in_one_memory_train(make: Make) -> None:
    data = [{"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(i))} for i in range(2)]
    spec = outsize.AdamW(lr=1e-2)
    outcome = cells.plain(made(make), data, spec=spec, steps=2)
    for budget in (smallest(make, data[0], spec), 2**20):
        device = SimDevice(lookup(f"{budget}B"))
        with cells.closing(
            outsize.prepare(made(make), data[0], device=device, optimizer=spec, chunk_bytes=CHUNK_BYTES)
        ) as engine:
            cells.assert_same(
                cells.train(engine.model, engine.optimizer, data, steps=2, accumulate=1, engine=engine), outcome
            )
            assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes
