"""Strategies: whatever a block does with its activations, its gradients and the random stream are those of the plain
block, and what leaves is what should.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cells
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_outputs import BaseModelOutput

import outsize
from outsize.activation.strategies import RUN
from outsize.base.units import ALIGN_BYTES
from outsize.model.strategies import STRATEGY
from outsize.transfer.offloaded_tensors import OffloadedTensors

EVERY = pytest.mark.parametrize("strategy", list(RUN))
SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def statics(block: nn.Module) -> Callable[[Tensor], bool]:
    pointers = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
    return lambda t: t.untyped_storage().data_ptr() in pointers


@dataclass
class Result:
    output: Tensor
    grads: list[Tensor | None]
    sent_bytes: int
    num_items: int
    after_forward: Tensor
    """A random number drawn after the forward …"""
    after_backward: Tensor
    """… and after the backward."""


def run(block: nn.Module, strategy: str, *args: Any, leaves: list[Tensor] | None = None, **kwargs: Any) -> Result:
    """Forward, the offloaded's way to the host and back as the engine does it, backward."""
    leaves = [*(leaves or []), *(p for p in block.parameters() if p.requires_grad)]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(5)
    offloaded = OffloadedTensors()
    output = RUN[strategy](block, args, kwargs, offloaded, statics(block), block)
    after_forward = torch.rand(1)
    num_items = len(offloaded.items)
    if STRATEGY[strategy].sends:
        assert offloaded.num_bytes > 0, "a strategy that quietly does nothing"
        arena = torch.empty(offloaded.num_bytes, dtype=torch.uint8)
        offloaded.copy_to(arena)
        offloaded.free_device_copy()
        offloaded.attach_buffer(arena.clone())
        arena.fill_(0xFF)
    else:
        assert offloaded.num_bytes == 0
    output.square().sum().backward()
    return Result(
        output.detach(), [leaf.grad for leaf in leaves], offloaded.num_bytes, num_items, after_forward, torch.rand(1)
    )


def same(found: Result, expected: Result) -> bool:
    grads = zip(found.grads, expected.grads, strict=True)
    return torch.equal(found.output, expected.output) and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in grads
    )


# --- what leaves


class ReadsWeights(nn.Module):
    """Saves parameters, buffers and views of them of every size: transposed, sliced, expanded, of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.gain = nn.Parameter(torch.randn(128))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.randn(4, 64))

    def forward(self, x: Tensor) -> Tensor:  # (4, 64)
        y = x @ self.matrix.t()  # saves x and a transposed weight
        y = torch.tanh(y * self.gain[64:])  # saves y, a slice of a weight, and the result
        y = (
            y * self.gain[:64].expand(4, 64) * self.scalar * self.table[1]
        )  # an expanded slice, a scalar, a row of a buffer; and y twice
        return y


def test_swap_sends_no_parameter_no_buffer_and_no_view_of_one_of_any_size() -> None:
    """Traps A4, A23: the bytes are exactly those of the activations that autograd saves, counted by hand."""
    torch.manual_seed(0)
    block, x = ReadsWeights(), torch.randn(4, 64, requires_grad=True)
    found = run(block, "swap", x, leaves=[x])
    # x, x @ W.T, the tanh, and the product with the expanded gain; the products with the scalar save their input, the
    # one with the buffer only the buffer.
    saved: dict[int, int] = {}
    is_static = statics(block)

    def note(t: Tensor) -> Tensor:
        if not is_static(t):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    held = []
    with saved_tensors_hooks(note, lambda t: t):
        held.append(block(x))
    assert found.sent_bytes == sum(map(aligned, saved.values())) == 4 * 1024
    assert same(found, run(block, "keep", x, leaves=[x]))


class OnlyNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_block_with_small_weights_alone_sends_its_input_and_its_statistics() -> None:
    """Trap A4: no threshold decides what a weight is."""
    x = torch.randn(4, 64, requires_grad=True)
    found = run(OnlyNorm(), "swap", x, leaves=[x])
    assert found.sent_bytes == aligned(x.nbytes) + 2 * aligned(4 * 4)  # mean and rstd of four rows


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.proj(x)) * mask


def test_swap_leaves_what_other_blocks_share_where_it_is() -> None:
    x, mask = torch.randn(4, 64, requires_grad=True), torch.rand(4, 64)
    found = run(WithMask(), "swap", x, mask, leaves=[x])
    assert found.sent_bytes == 2 * 1024 and found.num_items == 2  # the input, and the tanh


def test_swap_sends_a_storage_once_however_many_operators_save_it() -> None:
    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.t() * torch.tanh(x[:1]) * x[:, :1]  # the input under four shapes

    x = torch.randn(16, 16, requires_grad=True)
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = aligned(t.untyped_storage().nbytes())
        return t

    block, held = Uses(), []
    with saved_tensors_hooks(note, lambda t: t):
        held.append(block(x))
    found = run(block, "swap", x, leaves=[x])
    assert found.sent_bytes == sum(saved.values()) and found.num_items == len(saved)
    assert same(found, run(block, "keep", x, leaves=[x]))


def test_an_empty_saved_tensor_stays() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.tanh(x), torch.tanh(x[:0])])

    x = torch.randn(4, 64, requires_grad=True)
    assert same(run(Empty(), "swap", x, leaves=[x]), run(Empty(), "keep", x, leaves=[x]))


def test_offload_sends_exactly_the_input_once() -> None:
    """Trap D44: also where the block is given its input twice, and other tensors beside it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)

        def forward(self, x: Tensor, mask: Tensor, residual: Tensor) -> Tensor:
            return residual + torch.tanh(self.proj(x)) * mask

    torch.manual_seed(0)
    block, x, mask = Twice(), torch.randn(4, 64, requires_grad=True), torch.rand(4, 64)
    found = run(block, "offload", x, mask, residual=x, leaves=[x])
    assert found.sent_bytes == 1024 and found.num_items == 1
    assert same(found, run(block, "keep", x, mask, residual=x, leaves=[x]))


@pytest.mark.parametrize(
    "view", [lambda b: b.t(), lambda b: b[:1].expand(64, 64), lambda b: b[:, ::2].repeat(1, 2)[3:].t()[:, 1:]]
)
def test_offload_brings_back_inputs_of_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    """Trap D40."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.gain) + x.contiguous().cumsum(0)

    torch.manual_seed(0)
    base = torch.randn(64, 64, requires_grad=True)
    block = Odd()
    assert same(run(block, "offload", view(base), leaves=[base]), run(block, "keep", view(base), leaves=[base]))


def test_the_input_is_freed_when_the_parcel_lets_go() -> None:
    """Neither the checkpoint nor a closure keeps an offloaded input alive."""
    block, offloaded = WithMask(), OffloadedTensors()
    leaf = torch.randn(4, 64, requires_grad=True)
    x = leaf * 2
    storage = weakref.ref(x.untyped_storage())
    out = RUN["offload"](block, (x, torch.ones(4, 64)), {}, offloaded, statics(block), block)
    arena = torch.empty(offloaded.num_bytes, dtype=torch.uint8)
    offloaded.copy_to(arena)
    del x
    assert storage() is not None
    offloaded.free_device_copy()
    assert storage() is None
    offloaded.attach_buffer(arena)
    out.sum().backward()
    assert leaf.grad is not None


# --- how blocks are called


@EVERY
def test_a_block_that_is_called_by_keyword_gives_the_plain_gradients(strategy: str) -> None:
    """Trap D44."""
    torch.manual_seed(0)
    block, x, mask = WithMask(), torch.randn(4, 64, requires_grad=True), torch.rand(4, 64)
    expected = run(block, "keep", x, mask, leaves=[x])
    found = run(block, strategy, x=x, mask=mask, leaves=[x])
    assert same(found, expected)
    assert found.sent_bytes == {"offload": 1024, "offload+attention": 1024, "swap": 2048}.get(strategy, 0)


class Pair(NamedTuple):
    hidden: Tensor
    mask: Tensor


@dataclass
class Record:
    hidden: Tensor
    mask: Tensor


class Nested(nn.Module):
    """Takes its input out of whatever it is wrapped in."""

    def __init__(self, take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.take = take

    def forward(self, wrapped: Any) -> Tensor:
        x, mask = self.take(wrapped)
        return x + torch.tanh(self.proj(x)) * mask


WRAPPED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, m: (x, m), lambda w: w),
    "list": (lambda x, m: [x, m], lambda w: w),
    "dict": (lambda x, m: {"hidden": x, "mask": m}, lambda w: (w["hidden"], w["mask"])),
    "tuple in dict in list": (lambda x, m: [{"a": (x, None)}, 3, m], lambda w: (w[0]["a"][0], w[2])),
    "namedtuple": (Pair, lambda w: (w.hidden, w.mask)),
    "dataclass": (Record, lambda w: (w.hidden, w.mask)),
    "ModelOutput": (
        lambda x, m: BaseModelOutput(last_hidden_state=x, attentions=(m,)),
        lambda w: (w.last_hidden_state, w.attentions[0]),
    ),
}


@pytest.mark.parametrize("strategy", RUN)
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_block_inputs_may_be_nested(strategy: str, wrapping: str) -> None:
    torch.manual_seed(0)
    wrap, take = WRAPPED[wrapping]
    block, x, mask = Nested(take), torch.randn(4, 64, requires_grad=True), torch.rand(4, 64)
    expected = run(block, "keep", wrap(x, mask), leaves=[x])
    found = run(block, strategy, wrap(x, mask), leaves=[x])
    assert same(found, expected)
    if strategy == "offload":
        assert found.sent_bytes == 1024


@EVERY
def test_an_input_without_grad_keeps_the_weights_gradients(strategy: str) -> None:
    """The first layer after a frozen embedding."""
    torch.manual_seed(0)
    block, x, mask = WithMask(), torch.randn(4, 64), torch.rand(4, 64)
    assert same(run(block, strategy, x, mask), run(block, "keep", x, mask))


# --- random numbers


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(F.dropout(self.proj(x), 0.5)), 0.3)


@EVERY
def test_the_dropout_mask_and_the_global_random_stream_are_the_plain_ones(strategy: str) -> None:
    """Trap D48: a recompute draws the same numbers again, and leaves the stream where it found it."""
    torch.manual_seed(0)
    block, x = Dropped(), torch.randn(4, 64, requires_grad=True)
    expected, found = run(block, "keep", x, leaves=[x]), run(block, strategy, x, leaves=[x])
    assert same(found, expected)
    assert torch.equal(found.after_forward, expected.after_forward) and torch.equal(
        found.after_backward, expected.after_backward
    )


@EVERY
@pytest.mark.usefixtures("_profiles_anew")
def test_a_prepared_model_with_dropout_leaves_the_random_stream_where_the_plain_loop_does(strategy: str) -> None:
    """Trap D48, with the whole engine: after every forward, backward and step."""

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
        found = []
        torch.manual_seed(7)
        for batch in cells.batches("gpt2", 2):
            out = model(**batch)
            found.append(torch.get_rng_state().numpy().tobytes())
            out.loss.backward()
            found.append(torch.get_rng_state().numpy().tobytes())
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.get_rng_state().numpy().tobytes())
        return found

    plain = zoo.make("gpt2")
    expected = states(plain, cells.Reference(plain.parameters(), lr=1e-2))
    cell = cells.Cell(kind="gpt2", strategy=strategy, weights="host", optimizer="host")
    with cells.closing(cells.prepare(cell, spec=SPEC)) as engine:
        assert states(engine.model, engine.optimizer) == expected


# --- keyword calls through the engine


class ByKeyword(nn.Module):
    """Its layers take nothing but keywords, the mask first."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)

        def forward(self, *, scale: float, hidden_states: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"hidden_states": hidden_states + torch.tanh(self.proj(hidden_states)) * mask * scale}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(ByKeyword.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask, x = (x > 0).float(), self.embed(x)
        for layer in self.layers:
            x = layer(scale=0.5, hidden_states=x, mask=mask)["hidden_states"]
        return {"loss": x.square().mean()}


@EVERY
def test_a_model_whose_layers_take_keywords_trains_to_the_bit_and_really_sends(strategy: str) -> None:
    """Trap D44: what the plan says is sent is the input's size, not zero."""
    data = [{"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(i))} for i in range(3)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for batch in data:
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    plain = ByKeyword()
    expected = train(plain, cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1))
    engine = cells.prepare_by_hand(
        ByKeyword(), data[0], spec=SPEC, weights="host", optimizer="host", strategy=strategy, device="sim:1MiB"
    )
    with cells.closing(engine):
        assert train(engine.model, engine.optimizer) == expected
        sent = [w.sent_bytes for w in engine.plan.work]
        assert sent == {"offload": [0, *[1024] * 4, 0], "swap": [0, *[2048] * 4, 0]}.get(strategy, [0] * 6)
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), plain.parameters(), strict=True))
