"""Less common uses of weights and gradients, each compared with a plain loop: repeated clipping, writes through unusual
functions, views that are held, failures in a backward, assigned gradients that share memory."""

import gc
from collections.abc import Callable
from typing import Any

import cells
import foreign_plans
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported

EVERY_PLAN = foreign_plans.EVERY_PLAN
Use = Callable[[nn.Module, Any], Any]


def backward(model: nn.Module, seed: int = 0) -> None:
    model(**zoo.batch("llama", seed=seed)).loss.backward()


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def assert_same(
    plan: str,
    use: Use,
    *,
    spec: outsize.AdamW = foreign_plans.SPEC,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 0.0,
) -> None:
    """What `use` returns, and the weights after it and one more step. `tolerance`: of torch's clipping, which takes its
    norm in fp32.
    """
    (plain, reference), (model, engine) = foreign_plans.both(plan, spec=spec, dtype=dtype)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        step(run, optimizer, 100)
        run.found = use(run, optimizer)
        step(run, optimizer, 101)
    torch.testing.assert_close(model.found, plain.found, rtol=tolerance, atol=tolerance)
    engine.detach()
    for (name, mine), theirs in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs[1], rtol=0, atol=tolerance, msg=name)


def up(model: nn.Module) -> nn.Parameter:
    return model.model.layers[0].mlp.up_proj.weight  # type: ignore[no-any-return, union-attr, index]


def norm(tensors: Any) -> float:
    return float(torch.stack([t.detach().double().norm() for t in tensors]).norm())


# --- clipping and what comes between it and the step


def log_norm_after_clipping(model: nn.Module, optimizer: Any) -> float:
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
    optimizer.step()
    optimizer.zero_grad()
    return found


def clip_every_micro_batch(model: nn.Module, optimizer: Any) -> None:
    for seed in range(3):
        backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def clip_and_skip(model: nn.Module, optimizer: Any) -> None:
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    optimizer.zero_grad()


def clip_twice(model: nn.Module, optimizer: Any) -> float:
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    found = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step()
    optimizer.zero_grad()
    return found


def clip_and_look_at_held_gradients(model: nn.Module, optimizer: Any) -> float:
    backward(model)
    held = [p.grad for p in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found = norm(held)
    for grad in held:
        grad.add_(1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return found


def clip_after_step(model: nn.Module, optimizer: Any) -> float:
    backward(model)
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    found = norm(p.grad for p in model.parameters())
    optimizer.zero_grad()
    return found


@EVERY_PLAN
@pytest.mark.parametrize(
    "use",
    [
        log_norm_after_clipping,
        clip_every_micro_batch,
        clip_and_skip,
        clip_twice,
        clip_and_look_at_held_gradients,
        clip_after_step,
    ],
    ids=lambda f: f.__name__,
)
def test_clipping_holds_for_whatever_comes_before_the_step(plan: str, use: Use) -> None:
    assert_same(plan, use, tolerance=2e-6)


@pytest.mark.parametrize("max_norm", [5.0, float("inf"), 0.005])
def test_clipping_beside_the_optimizers_own(max_norm: float) -> None:
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.01)

    def use(model: nn.Module, optimizer: Any) -> None:
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    assert_same("streamed", use, spec=spec, tolerance=2e-6)


def test_gradients_that_are_not_finite_are_shown_after_clipping_as_torch_does() -> None:
    def use(model: nn.Module, optimizer: Any) -> bool:
        (model(**zoo.batch("llama")).loss * float("nan")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found = bool(model.lm_head.weight.grad.isnan().all())
        optimizer.zero_grad()
        return found

    assert_same("streamed", use)


# --- writes


def zero_by_init(weight: nn.Parameter, model: nn.Module) -> None:
    nn.init.constant_(weight, 0.0)


def zero_by_keyword(weight: nn.Parameter, model: nn.Module) -> None:
    torch.clamp_(input=weight.data, min=0.0, max=0.0)


def zero_by_inplace_argument(weight: nn.Parameter, model: nn.Module) -> None:
    F.threshold(weight.data, 1e9, 0.0, inplace=True)


def zero_by_overload(weight: nn.Parameter, model: nn.Module) -> None:
    torch.ops.aten.mul_.Scalar(weight.data, 0.0)


def zero_by_view_of_view(weight: nn.Parameter, model: nn.Module) -> None:
    weight.data[:, 0][20:].zero_()
    weight.data.t()[1][-5:] = 0.0


def zero_by_view_made_with_grad(weight: nn.Parameter, model: nn.Module) -> None:
    row = weight[3]
    with torch.no_grad():
        row.zero_()


def zero_by_state_dict(weight: nn.Parameter, model: nn.Module) -> None:
    model.state_dict()["model.layers.0.mlp.up_proj.weight"].zero_()


def scale_by_embedding(weight: nn.Parameter, model: nn.Module) -> None:
    with torch.no_grad():
        F.embedding(torch.tensor([1, 2]), weight.data, max_norm=0.01)


@EVERY_PLAN
@pytest.mark.parametrize(
    "write",
    [
        zero_by_init,
        zero_by_keyword,
        zero_by_inplace_argument,
        zero_by_overload,
        zero_by_view_of_view,
        zero_by_view_made_with_grad,
        zero_by_state_dict,
        scale_by_embedding,
    ],
    ids=lambda f: f.__name__,
)
def test_writes_through_unusual_functions_are_kept_and_reach_the_masters(
    plan: str, write: Callable[[nn.Parameter, nn.Module], None]
) -> None:
    """A bf16 zero with an old remainder of its master would be NaN after the next step."""

    def use(model: nn.Module, optimizer: Any) -> Tensor:
        write(up(model), model)
        step(model, optimizer)
        return up(model).detach().clone()

    assert_same(plan, use)
    model = zoo.make("llama", dtype=torch.bfloat16)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    for seed in range(2):
        step(model, engine.optimizer, seed)
    write(up(model), model)
    step(model, engine.optimizer, 3)
    assert bool(up(model).isfinite().all())
    engine.detach()


@EVERY_PLAN
@pytest.mark.parametrize(
    "view",
    [
        lambda m: up(m).view(-1),
        lambda m: up(m).data[:, 0][20:],
        lambda m: m.state_dict()["model.layers.0.mlp.up_proj.weight"],
    ],
    ids=["view", "view of view", "state dict"],
)
def test_views_held_over_a_step_write_the_live_weight(plan: str, view: Callable[[nn.Module], Tensor]) -> None:
    def use(model: nn.Module, optimizer: Any) -> None:
        held = view(model)
        step(model, optimizer)
        with torch.no_grad():
            held.fill_(0.01)
        step(model, optimizer, 1)

    assert_same(plan, use)


def test_numpy_arrays_of_weights_are_read_only() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    array = up(model).data.numpy()
    assert np.array_equal(array, np.asarray(up(zoo.make("llama")).detach()))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    engine.detach()


@EVERY_PLAN
def test_the_usual_swap_of_averaged_weights(plan: str) -> None:
    """`p.data` is kept without a copy, replaced, and put back."""

    def use(model: nn.Module, optimizer: Any) -> list[float]:
        kept = [p.data for p in model.parameters()]
        for param in model.parameters():
            param.data = torch.full_like(param, 0.01)
        with torch.no_grad():
            found = [float(model(**zoo.batch("llama")).loss), norm(kept)]
        for param, value in zip(model.parameters(), kept, strict=True):
            param.data = value
        return found

    assert_same(plan, use)


@EVERY_PLAN
def test_a_leaf_made_of_a_weight_gets_its_own_gradient(plan: str) -> None:
    def use(model: nn.Module, optimizer: Any) -> Tensor:
        leaf = up(model).detach().clone().requires_grad_()
        other = up(model).detach().requires_grad_()
        ((leaf**2).sum() + (other**3).sum()).backward()
        return leaf.grad + other.grad

    assert_same(plan, use)


def test_gathered_keeps_what_was_written_otherwise() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    name = "model.layers.0.mlp.up_proj.weight"
    with engine.gathered(name, "model.norm.weight") as values:
        up(model).data.fill_(7.0)
        values["model.norm.weight"].fill_(3.0)
    assert bool((up(model) == 7).all()) and bool((model.model.norm.weight == 3).all())
    engine.detach()


# --- gradients


@EVERY_PLAN
def test_assigned_gradients_share_memory_with_what_was_assigned(plan: str) -> None:
    """One flat buffer for all gradients, filled by backward and edited as a whole."""

    def use(model: nn.Module, optimizer: Any) -> Tensor:
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        start = 0
        for param in model.parameters():
            param.grad = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        backward(model, 0)
        backward(model, 1)
        found = flat.clone()
        flat.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return found

    assert_same(plan, use)


@EVERY_PLAN
def test_a_gradient_kept_before_it_was_replaced_is_refused_not_another(plan: str) -> None:
    _, (model, engine) = foreign_plans.both(plan)
    backward(model)
    held = up(model).grad
    up(model).grad = None
    backward(model, 1)
    with pytest.raises(RuntimeError, match=r"grad: this gradient was cleared"):
        held.sum()
    engine.optimizer.step()
    engine.detach()


@EVERY_PLAN
def test_zero_grad_without_none_leaves_zeros(plan: str) -> None:
    def use(model: nn.Module, optimizer: Any) -> Tensor:
        backward(model)
        optimizer.zero_grad(set_to_none=False)
        found = up(model).grad.clone()
        optimizer.step()  # weight decay and the moments' decay
        backward(model, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return found

    (plain, reference), (model, engine) = foreign_plans.both(plan)
    reference.zero_grad = lambda set_to_none=True: torch.optim.Optimizer.zero_grad(reference, set_to_none)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        run.found = use(run, optimizer)
    assert torch.equal(model.found, plain.found) and not bool(plain.found.any())
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@EVERY_PLAN
@pytest.mark.parametrize("when", ["before", "after"])
def test_post_accumulate_hooks_see_the_sum_so_far(plan: str, when: str) -> None:
    def hook(model: nn.Module, seen: list[float]) -> None:
        def look(param: Tensor) -> None:
            seen.append(float(param.grad.norm()))
            param.grad.clamp_(-1e-3, 1e-3)

        up(model).register_post_accumulate_grad_hook(look)

    plain, model, wanted, found = zoo.make("llama"), zoo.make("llama"), [], []
    hook(plain, wanted)
    if when == "before":
        hook(model, found)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    if when == "after":
        hook(model, found)
    found.clear()  # of the profiling run
    for run, optimizer in ((plain, foreign_plans.reference(plain)), (model, engine.optimizer)):
        for seed in range(2):
            for micro in range(2):
                backward(run, 10 * seed + micro)
            optimizer.step()
            optimizer.zero_grad()
    assert found == wanted and len(found) == 4
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_hook_that_drops_the_gradient() -> None:
    def use(model: nn.Module, optimizer: Any) -> None:
        handle = up(model).register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        step(model, optimizer)
        handle.remove()

    assert_same("streamed", use)


# --- failures


class Stop(BaseException):
    pass


@EVERY_PLAN
def test_after_a_backward_that_broke_off_weights_are_read_and_written_right(plan: str) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[Tensor]:
        loss = model(**zoo.batch("llama")).loss

        def fail(grad: Tensor) -> None:
            raise Stop

        handle = up(model).register_hook(fail)
        with pytest.raises(Stop):
            loss.backward()
        handle.remove()
        found = [p.data.clone() for p in model.parameters()]
        for param in model.parameters():
            param.data.mul_(0.9)
        optimizer.zero_grad()
        return found

    assert_same(plan, use)


def test_after_an_undeclared_backward_was_refused_weights_are_read_right() -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed", spec=outsize.AdamW(update="in_backward"))
    with pytest.raises(EngineMisuse, match="last_backward"):
        backward(model)
    expected = zoo.make("llama")
    engine.runtime.drop_guard()
    assert all(torch.equal(p.data, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    engine.optimizer.zero_grad()
    engine.detach()


def test_what_is_left_of_a_dropped_engine_disturbs_nothing() -> None:
    """Its guard had the addresses of freed slots, and clip_grad_norm_ stayed exchanged."""
    gc.collect()  # of earlier tests
    original, torch_backward = nn.utils.clip_grad_norm_, torch.autograd.backward
    guards = []
    for _ in range(2):
        model = zoo.make("llama", dtype=torch.bfloat16)
        engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
        step(model, engine.optimizer)
        guards.append(engine.runtime._guard)
        del model, engine
        gc.collect()
    assert nn.utils.clip_grad_norm_ is original and torch.autograd.backward is torch_backward
    with guards[0]:  # as one that could not be removed
        guards[0]._slot_at = {t.untyped_storage().data_ptr(): 0 for t in zoo.make("llama").parameters()}
        plain = zoo.make("llama")
        guards[0]._slot_at |= {t.untyped_storage().data_ptr(): 0 for t in plain.parameters()}
        backward(plain)


# --- what is refused


def test_optimizer_edits_that_could_not_be_kept_are_refused() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    step(model, engine.optimizer)
    optimizer = engine.optimizer
    optimizer.state[up(model)]["exp_avg"] = torch.zeros_like(up(model))
    assert not bool(optimizer.state[up(model)]["exp_avg"].any())
    with pytest.raises(ConfigError, match="the engine holds the state"):
        optimizer.state = {}
    for act in (lambda: __import__("copy").deepcopy(optimizer), lambda: __import__("pickle").dumps(optimizer)):
        with pytest.raises(ConfigError, match=r"state_dict\(\)"):
            act()
    backward(model)
    removed = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ConfigError, match=r"param_groups\[0\]: it had .* parameters when the model was prepared"):
        optimizer.step()
    optimizer.param_groups[0]["params"].append(removed)
    optimizer.step()
    engine.detach()


class Tagged(nn.Parameter):
    """A subclass that only carries information."""


class Counted(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_parameters_of_other_classes() -> None:
    def tagged(kind: type[nn.Parameter]) -> nn.Module:
        model = zoo.make("llama")
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = kind(layer.mlp.up_proj.weight.detach())
        return model

    plain, model = tagged(Tagged), tagged(Tagged)
    reference = foreign_plans.reference(plain)
    engine = cells.prepare_by_hand(model, zoo.batch("llama"), spec=foreign_plans.SPEC, **foreign_plans.STREAMED)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        step(run, optimizer)
        backward(run, 1)
        run.found = [up(run).data.clone(), up(run).grad.clone()]
        optimizer.step()
    assert isinstance(up(model), Tagged)
    torch.testing.assert_close(model.found, plain.found, rtol=0, atol=0)
    engine.detach()
    assert type(up(model)) is Tagged
    with pytest.raises(ModelUnsupported, match="Counted define operators of their own"):
        cells.prepare_by_hand(tagged(Counted), zoo.batch("llama"), spec=foreign_plans.SPEC, **foreign_plans.STREAMED)
