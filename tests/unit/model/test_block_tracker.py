"""BlockTracker: calls open in order, forward and backward, whatever blocks take and return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from torch import Tensor, nn

from outsize.model.block_tracker import BlockTracker
from outsize.model.discover import find_layers


class Recorder:
    """Listens, and writes down who opened."""

    def __init__(self) -> None:
        self.forward: list[tuple[int, int | None]] = []
        self.backward: list[int] = []
        self.numbers: list[int] = []
        self.log: list[str] = []

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.log.append("begin")
        return args, kwargs

    def call_of_layer(self, layer: int, after: int) -> int:
        return after + 1

    def call_of_module(self, module: nn.Module, call: int) -> int:
        return call

    def forward_enters(self, call: int, layer: int | None) -> None:
        self.forward.append((call, layer))
        self.log.append(f"F{call}")

    def run_layer(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.log.append(f"run{layer}")
        return forward(*args, **kwargs)

    def forward_ends(self, outputs: Any, *, failed: bool) -> None:
        self.log.append("failed" if failed else "end")

    def backward_enters(self, call: int, forward_id: int) -> None:
        if call not in self.backward:
            self.log.append(f"B{call}")
        self.backward.append(call)
        self.numbers.append(forward_id)

    def backward_ends(self) -> None:
        self.log.append("done")

    @property
    def opened(self) -> list[int]:
        """Calls in the order in which their backward first opened."""
        return list(dict.fromkeys(self.backward))


def listen(model: nn.Module) -> tuple[Recorder, BlockTracker]:
    recorder = Recorder()
    tracker = BlockTracker(model, recorder)
    tracker.attach(find_layers(model))
    return recorder, tracker


@dataclass
class Record:
    hidden: Tensor
    note: str = ""


class Pair(NamedTuple):
    hidden: Tensor
    other: int


WRAP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda y: y),
    "tuple": (lambda x: (x, None), lambda y: y[0]),
    "namedtuple": (lambda x: Pair(x, 1), lambda y: y.hidden),
    "dict": (lambda x: {"hidden": x}, lambda y: y["hidden"]),
    "dataclass": (Record, lambda y: y.hidden),
    "nested": (lambda x: [{"deep": (Record(x),)}], lambda y: y[0]["deep"][0].hidden),
}


class Layer(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x + torch.tanh(self.proj(x)))


class Model(nn.Module):
    """A stem, three layers that return something, a head."""

    def __init__(self, wrapping: str = "tensor", *, stem: bool = True, head: bool = True) -> None:
        super().__init__()
        wrap, self.take = WRAP[wrapping]
        self.embed = nn.Linear(4, 4) if stem else None
        self.layers = nn.ModuleList(Layer(wrap) for _ in range(3))
        self.head = nn.Linear(4, 1) if head else None

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers:
            x = self.take(layer(x))
        return self.head(x) if self.head is not None else x


ORDER = [(0, None), (1, 0), (2, 1), (3, 2), (4, None)]


@pytest.mark.parametrize("wrapping", WRAP)
def test_visits_open_in_order_and_backward_in_reverse_whatever_layers_return(wrapping: str) -> None:
    """Module backward hooks would miss the dicts and dataclasses."""
    model = Model(wrapping)
    recorder, _ = listen(model)
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.forward == ORDER
    assert recorder.opened == [4, 3, 2, 1, 0]
    assert recorder.log == [
        "begin",
        "F0",
        "F1",
        "run0",
        "F2",
        "run1",
        "F3",
        "run2",
        "F4",
        "end",
        "B4",
        "B3",
        "B2",
        "B1",
        "B0",
        "done",
    ]


def test_a_backward_opens_before_any_gradient_of_its_own_weights_arrives() -> None:
    """Traps A14, A15: and the one before it has all of its gradients by then."""
    model = Model()
    recorder, _ = listen(model)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: recorder.log.append(name))
    model(torch.ones(2, 4)).sum().backward()
    arrived = [word for word in recorder.log[recorder.log.index("B4") :] if word != "done"]
    owner, found = "", {}
    for word in arrived:
        if word.startswith("B") and word[1:].isdigit():
            owner = word
        else:
            found[word] = owner
    assert found == {
        "head.weight": "B4",
        "head.bias": "B4",
        **{f"layers.{i}.proj.{p}": f"B{i + 1}" for i in range(3) for p in ("weight", "bias")},
        "embed.weight": "B0",
        "embed.bias": "B0",
    }
    assert recorder.log[-1] == "done"


def test_a_stem_without_weights_has_no_backward() -> None:
    model = Model(stem=False)
    recorder, _ = listen(model)
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.forward == ORDER and recorder.opened == [4, 3, 2, 1]


def test_a_frozen_prefix_has_no_backward_and_the_first_trained_layer_has_one_without_a_gradient_for_its_input() -> None:
    """Trap A14."""
    model = Model()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    recorder, _ = listen(model)
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.forward == ORDER and recorder.opened == [4, 3, 2]


def test_an_input_of_the_root_that_requires_grad_is_a_leaf_and_opens_nothing() -> None:
    model, x = Model(stem=False), torch.ones(2, 4, requires_grad=True)
    recorder, _ = listen(model)
    model(x).sum().backward()
    assert recorder.opened == [4, 3, 2, 1] and x.grad is not None


@pytest.mark.parametrize("wrapping", WRAP)
def test_a_head_that_only_passes_its_input_on_has_no_backward(wrapping: str) -> None:
    """A model that returns its last layer's output, as BertModel does: the loss is computed outside."""
    model = Model(wrapping, head=False)
    recorder, _ = listen(model)
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.forward == ORDER and recorder.opened == [3, 2, 1, 0]


class TwoStacks(nn.Module):
    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.first = nn.ModuleList(Layer(lambda x: x) for _ in range(2))
        self.norm = nn.LayerNorm(4) if between else nn.Identity()
        self.second = nn.ModuleList(Layer(lambda x: x) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.first:
            x = layer(x)
        x = self.norm(x)
        for layer in self.second:
            x = layer(x)
        return x.square().sum()


@pytest.mark.parametrize("between", [True, False])
def test_a_region_between_lists_has_a_backward_only_if_it_does_something(between: bool) -> None:
    model = TwoStacks(between=between)
    recorder, _ = listen(model)
    model(torch.ones(2, 4)).backward()
    assert recorder.forward == [(0, None), (1, 0), (2, 1), (3, None), (4, 2), (5, 3), (6, None)]
    assert recorder.opened == ([6, 5, 4, 3, 2, 1, 0] if between else [6, 5, 4, 2, 1, 0])


class Inner(TwoStacks):
    """Ends rows with a weight of its own, and returns what it made of the first stack beside the result."""

    def __init__(self) -> None:
        super().__init__(between=True)
        self.newline = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.first:
            x = layer(x)
        seen = torch.cat([self.norm(x), self.newline[None]])
        x = 2 * seen
        for layer in self.second:
            x = layer(x)
        return x, seen


class ReturnsFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, seen = self.inner(x)
        return {"loss": x.square().sum(), "seen": seen}


def test_what_an_earlier_region_made_and_the_root_returns_does_not_open_the_head_again() -> None:
    model = ReturnsFeatures()
    recorder, _ = listen(model)
    model(torch.ones(2, 4))["loss"].backward()
    assert recorder.backward == sorted(recorder.backward, reverse=True) and recorder.opened == [6, 5, 4, 3, 2, 1, 0]


class HandsOn(nn.Module):
    """The stem makes something of a weight of its own that only the last layer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)
        self.layers = nn.ModuleList(Layer(lambda x: x) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        later = x * self.scale
        for layer in self.layers[:-1]:
            x = layer(x).detach()
        return self.layers[-1](later).sum()


def test_what_a_stem_makes_for_a_later_layer_opens_the_stem() -> None:
    recorder, _ = listen(model := HandsOn())
    model(torch.ones(2, 4)).backward()
    assert recorder.opened == [4, 3, 0]


def test_what_was_made_before_the_forward_opens_nothing() -> None:
    recorder, _ = listen(model := Model(stem=False))
    before = nn.Linear(4, 4)
    model(before(torch.ones(2, 4))).sum().backward()
    assert recorder.opened == [4, 3, 2, 1] and before.weight.grad is not None


def test_the_decoder_of_t5_waits_for_its_encoder() -> None:
    model = zoo.make("t5")
    recorder, _ = listen(model)
    model(**zoo.batch("t5")).loss.backward()
    assert [layer for _, layer in recorder.forward] == [None, 0, 1, 2, None, 3, 4, 5, None]
    assert recorder.opened == [8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_a_layer_that_runs_three_times_is_three_visits_with_regions_between() -> None:
    model = zoo.make("looped")
    recorder, _ = listen(model)
    model(**zoo.batch("looped")).loss.backward()
    assert [layer for _, layer in recorder.forward] == [None, 0, None, 0, None, 0, None]
    assert recorder.opened == [6, 5, 3, 1, 0], "the regions between only pass the hidden state on"


# --- what breaks off


class Breaks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        self.layers[1].register_forward_hook(self._break)

    def _break(self, *_: Any) -> None:
        if self.broken:
            raise RuntimeError("broken")


def test_an_exception_in_forward_is_reported_and_the_next_forward_begins_anew() -> None:
    model = Breaks()
    recorder, tracker = listen(model)
    with pytest.raises(RuntimeError, match="broken"):
        model(torch.ones(2, 4))
    assert recorder.log == ["begin", "F0", "F1", "run0", "F2", "run1", "failed"] and not tracker.is_open
    model.broken = False
    recorder.forward.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.forward == ORDER and recorder.opened == [4, 3, 2, 1, 0] and set(recorder.numbers) == {2}


def test_a_forward_inside_an_except_block_has_not_failed() -> None:
    model = Model()
    recorder, _ = listen(model)
    try:
        raise KeyError("elsewhere")
    except KeyError:
        model(torch.ones(2, 4)).sum().backward()
    assert recorder.log[-1] == "done" and "failed" not in recorder.log


def test_a_backward_that_breaks_off_is_not_ended_and_the_next_one_opens_again() -> None:
    model = Model()
    recorder, _ = listen(model)
    handle = model.layers[1].proj.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()
    assert "done" not in recorder.log and recorder.opened == [4, 3, 2]
    handle.remove()
    recorder.backward.clear()
    model(torch.ones(2, 4)).sum().backward()
    assert recorder.opened == [4, 3, 2, 1, 0] and recorder.log[-1] == "done"


def test_a_backward_says_which_forward_it_belongs_to() -> None:
    """Trap D42: two graphs in flight."""
    model = Model()
    recorder, tracker = listen(model)
    first = model(torch.ones(2, 4)).sum()
    second = model(torch.ones(2, 4)).sum()
    second.backward()
    first.backward()
    assert recorder.numbers == [2] * 5 + [1] * 5 and tracker.forward_id == 2
    assert recorder.log.count("done") == 2


def test_without_grad_nothing_opens_backward() -> None:
    model = Model()
    recorder, _ = listen(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert recorder.forward == ORDER and recorder.backward == []


def test_a_layer_that_is_called_by_itself_is_no_visit() -> None:
    model = Model()
    recorder, tracker = listen(model)
    model.layers[1](torch.ones(2, 4)).sum().backward()
    assert recorder.forward == [(-1, 1)] and recorder.backward == [] and not tracker.is_open


# --- coming and going


def test_detaching_leaves_no_hook_and_no_forward_behind() -> None:
    model = Model()
    hooks = lambda: [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]
    before = hooks()
    _, tracker = listen(model)
    assert hooks() != before
    tracker.detach()
    assert hooks() == before


def test_detaching_gives_a_layer_its_own_forward_back() -> None:
    """Patched kernels (Liger, accelerate's hooks) set `forward` on the instance: tracing a model must not undo them."""
    model = Model()
    patched = lambda x: x * 2
    model.layers[1].forward = patched
    _, tracker = listen(model)
    tracker.detach()
    assert vars(model.layers[1]).get("forward") is patched


def test_a_patched_forward_is_what_runs_while_the_course_is_attached() -> None:
    model = Model()
    model.layers[1].forward = lambda x: x * 2
    recorder, _ = listen(model)
    x = torch.ones(2, 4)
    found = model(x)
    assert recorder.forward == ORDER
    y = model.embed(x)
    y = y + torch.tanh(model.layers[0].proj(y))
    y = y * 2
    y = y + torch.tanh(model.layers[2].proj(y))
    assert torch.equal(found, model.head(y))


def test_arguments_may_be_replaced_where_the_forward_begins() -> None:
    class Moves(Recorder):
        def forward_begins(
            self, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(a * 0 for a in args), {k: v * 0 for k, v in kwargs.items()}

    model = Model()
    BlockTracker(model, Moves()).attach(find_layers(model))
    assert torch.equal(model(torch.ones(2, 4)), model(x=torch.zeros(2, 4)))
