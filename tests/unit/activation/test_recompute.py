"""A forward that is made again: held against torch.utils.checkpoint, which does the same with more Python."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outsize.activation.recompute import run_and_compare, run_checkpointed
from outsize.base.errors import ModelUnsupported
from outsize.device.observer import Observer

CPU = torch.device("cpu")
Again = Callable[[Callable[[], Any]], Any]


def ours(forward: Callable[[], Any]) -> Any:
    return run_checkpointed(forward, CPU)


def theirs(forward: Callable[[], Any]) -> Any:
    return checkpoint(lambda _: forward(), torch.empty(0), use_reentrant=False)


def seen(again: Again, forward: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[str], int]:
    """Which operators backward runs, and how far above the forward's end its memory rises."""
    names: list[str] = []

    class Names(Observer):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    observer = Names()
    with observer:
        out = again(lambda: forward(x))
        names.clear()
        level = observer.level()
        observer.reset_peak()
        out.square().sum().backward()
    return [name for name in names if "detach" not in name], observer.peak() - level


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3-next", "mixtral"])
def test_the_same_operators_run_in_backward_and_hold_the_same_memory(kind: str) -> None:
    """So it stops where the last saved tensor is made, and keeps none that nobody will ask for."""
    found = []
    for again in (ours, theirs):
        model = zoo.make(kind, seed=0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stack = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
        inputs: list[tuple[Any, Any]] = []
        handle = stack[1].register_forward_pre_hook(
            lambda _, args, kwargs, inputs=inputs: inputs.append((args, kwargs)), with_kwargs=True
        )
        model(**zoo.batch(kind))
        handle.remove()
        (args, kwargs), layer = inputs[0], stack[1]
        torch.manual_seed(3)

        def forward(x: Tensor, layer: nn.Module = layer, args: Any = args, kwargs: Any = kwargs) -> Tensor:
            out = layer(x, *args[1:], **kwargs)
            return out if isinstance(out, Tensor) else out[0]

        found.append(seen(again, forward, args[0].detach().requires_grad_()))
    assert found[0] == found[1] and len(found[0][0]) > 20


@pytest.mark.parametrize("enabled", [True, False])
def test_backward_outside_of_autocast_makes_the_forward_as_it_was(enabled: bool) -> None:
    grads = []
    for again in (ours, theirs, lambda forward: forward()):
        torch.manual_seed(0)
        layer, x = (
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8)),
            torch.randn(4, 8, requires_grad=True),
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = again(lambda layer=layer, x=x: layer(x))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not enabled):
            out.float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
        after = torch.rand(1)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads, strict=True))
    torch.manual_seed(0)
    nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), nn.functional.dropout(torch.ones(4, 8), 0.5)
    assert torch.equal(after, torch.rand(1)), "the stream goes on as if nothing had been drawn twice"


def test_two_backwards_over_one_graph_are_two_times_the_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    calls = 0

    def forward() -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin().exp()

    loss = ours(forward).sum()
    loss.backward(retain_graph=True)
    once = x.grad
    assert once is not None
    once = once.clone()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, once + once) and calls == 3


def test_without_grad_nothing_is_kept_to_be_made_again() -> None:
    with torch.no_grad():
        assert not ours(lambda: torch.ones(2, requires_grad=True) * 2).requires_grad


def test_one_that_keeps_the_inputs_lets_go_of_them_with_the_graph() -> None:
    """No cycle: what a step held is gone without the garbage collector."""
    gc.disable()
    try:
        x = torch.randn(4, 8, requires_grad=True)
        middle = x * 2
        alive = weakref.ref(middle)
        out = ours(lambda middle=middle: middle.sin().exp())
        del middle
        out.sum().backward()
        del out
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["longer", "fewer"])
def test_a_forward_that_is_another_one_the_second_time_is_refused(how: str) -> None:
    x = torch.randn(6, 6, requires_grad=True)
    calls = 0

    def forward() -> Tensor:
        nonlocal calls
        calls += 1
        if how == "longer":
            return (x[:calls] * x[:calls]).sum()
        return x.sin() if calls == 1 else x + 1

    out = ours(forward)
    with pytest.raises(
        ModelUnsupported,
        match=r"saves other tensors.*(and float32 \(2, 6\) on cpu in backward|1 tensors are saved in forward and fewer)",
    ):
        out.sum().backward()


def test_a_backward_inside_of_the_forward_works_both_times() -> None:
    """A layer that takes a gradient of its own, as for a penalty."""
    grads = []
    for again in (ours, theirs, lambda forward: forward()):
        x = torch.linspace(0.1, 1.0, 6, requires_grad=True)

        def forward(x: Tensor = x) -> Tensor:
            y = x.sin() * x
            (inner,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return (y * inner.detach()).exp()

        again(forward).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_tensors_are_made_where_they_were_made() -> None:
    seen = []

    def forward() -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    with torch.device("meta"):
        out = ours(forward)
    out.sum().backward()
    assert seen == ["meta", "meta"]


# --- comparing a second run with the first


def differences(forward: Callable[[], Tensor]) -> list[str]:
    reports: list[str] = []
    run_and_compare(forward, CPU, reports.append).square().sum().backward()
    return reports


def test_a_second_run_that_is_the_same_is_reported_once_as_such() -> None:
    """With the same random numbers, as `run_checkpointed` runs it."""
    layer, x = nn.Linear(6, 6), torch.randn(4, 6)
    assert differences(lambda: nn.functional.dropout(layer(x).tanh())) == [""]


def test_gradients_are_of_the_first_run() -> None:
    """Whatever the second does."""
    x = torch.randn(3, requires_grad=True)
    factors = iter([2.0, 5.0])
    assert differences(lambda: (x * next(factors)).exp()) == ["the second run returns other values"]
    expected = torch.autograd.grad((x * 2).exp().square().sum(), x)[0]
    assert x.grad is not None and torch.equal(x.grad, expected)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            lambda x: x[:1].exp(),
            "saved tensor 0 is float32 (3,) on cpu in the first run and float32 (1,) on cpu in the second",
        ),
        (lambda x: x + 0.0, "the first run saves 1 tensors and the second 0"),
        (lambda x: {}["task"], "a second run raises KeyError: 'task'"),
        (lambda x: x.exp() + 1, "the second run returns other values"),
        (lambda x: x.exp().exp().log(), ""),  # only what backward asks for counts
    ],
)
def test_how_a_second_run_differs_is_reported(second: Callable[[Tensor], Tensor], expected: str) -> None:
    x = torch.zeros(3, requires_grad=True)
    runs = iter([torch.exp, second])
    assert differences(lambda: next(runs)(x)) == [expected]


def test_memory_that_runs_out_in_the_second_run_is_no_difference() -> None:
    x = torch.zeros(3, requires_grad=True)
    reports: list[str] = []
    calls = 0

    def forward() -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise torch.OutOfMemoryError("no memory")
        return x.exp()

    with pytest.raises(torch.OutOfMemoryError):
        run_and_compare(forward, CPU, reports.append).sum().backward()
    assert reports == []


def test_what_is_written_into_an_output_afterwards_is_no_difference() -> None:
    x = torch.ones(3, requires_grad=True)
    reports: list[str] = []
    out = run_and_compare(lambda: x * x, CPU, reports.append)
    out += 1  # as a model does that adds to its hidden states in place
    out.sum().backward()
    assert reports == [""]


def test_a_difference_is_reported_also_by_a_model_that_catches_everything() -> None:
    x = torch.ones(3, requires_grad=True)
    runs = iter([3, 2])

    def forward() -> Tensor:
        try:
            return x[: next(runs)].exp()
        except Exception:
            return x.exp()

    assert differences(forward) == [
        "saved tensor 0 is float32 (3,) on cpu in the first run and float32 (2,) on cpu in the second"
    ]
