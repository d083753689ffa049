"""What loops and libraries do with `p.grad` between backward and step: clip, read, edit, assign, scale. And optimizers
that are not the engine's.
"""

from collections.abc import Callable
from typing import Any

import cells
import foreign_plans
import pytest
import torch
import zoo
from torch import Tensor, nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, StaleParameter

torch_clip_grad_norm_ = nn.utils.clip_grad_norm_
"""Torch's own function, as a script that imported it before has it."""
EVERY_PLAN = foreign_plans.EVERY_PLAN
Edit = Callable[[nn.Module], Any]


def train(
    model: nn.Module, optimizer: Any, edit: Edit, *, steps: int = 3, accumulate: int = 1
) -> tuple[list[float], list[Any]]:
    losses, seen = [], []
    for seed in range(steps):
        for micro in range(accumulate):
            loss = model(**zoo.batch("llama", seed=10 * seed + micro)).loss
            (loss / accumulate).backward()
            losses.append(float(loss.detach()))
        seen.append(edit(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, seen


def assert_same_run(
    plan: str, edit: Edit, *, dtype: torch.dtype = torch.float32, accumulate: int = 1, plain_edit: Edit | None = None
) -> None:
    (plain, reference), (model, engine) = foreign_plans.both(plan, dtype=dtype)
    expected, wanted = train(plain, reference, plain_edit or edit, accumulate=accumulate)
    losses, seen = train(model, engine.optimizer, edit, accumulate=accumulate)
    assert losses == expected
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0)
    engine.detach()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# --- reading


def read(model: nn.Module) -> dict[str, Any]:
    """Lightning's grad_norm, wandb.watch, and others."""
    return {
        "clones": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "norms": {n: p.grad.data.norm(2) for n, p in model.named_parameters()},
        "foreach": torch._foreach_norm([p.grad for p in model.parameters()]),
        "histogram": {n: torch.histc(p.grad.detach().float(), 5) for n, p in model.named_parameters()},
        "largest": max(float(p.grad.abs().max()) for p in model.parameters()),
    }


@EVERY_PLAN
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_readable_after_backward(plan: str, accumulate: int) -> None:
    assert_same_run(plan, read, accumulate=accumulate)


def test_bf16_gradients_are_readable() -> None:
    assert_same_run("streamed", read, dtype=torch.bfloat16)


@EVERY_PLAN
def test_gradients_stay_until_zero_grad_as_in_torch(plan: str) -> None:
    """After step() they are still there; a backward without zero_grad() adds to them; a second step() applies them
    again.
    """
    (plain, reference), (model, engine) = foreign_plans.both(plan)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        run(**zoo.batch("llama", seed=0)).loss.backward()
        optimizer.step()
        run.after_step = [p.grad.clone() for p in run.parameters()]
        optimizer.step()
        run(**zoo.batch("llama", seed=1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in run.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.after_step, plain.after_step, strict=True))
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_gradient_that_is_held_too_long_is_refused() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    model(**zoo.batch("llama")).loss.backward()
    held = model.lm_head.weight.grad
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    with pytest.raises(StaleParameter, match=r"grad: this gradient was cleared by zero_grad\(\).*clone\(\)"):
        held.sum()
    engine.detach()


def test_gradients_of_a_backward_that_updates_are_refused_not_none() -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed", spec=outsize.AdamW(update="in_backward"))
    with engine.last_backward():
        model(**zoo.batch("llama")).loss.backward()
    for when in ("before step", "after step"):
        with pytest.raises(EngineMisuse, match="kept none"):
            _ = model.lm_head.weight.grad
        if when == "before step":
            engine.optimizer.step()
    engine.optimizer.zero_grad()
    assert model.lm_head.weight.grad is None
    with pytest.raises(EngineMisuse, match="keeps no gradients, so none can be assigned"):
        model.lm_head.weight.grad = torch.zeros(zoo.VOCAB, zoo.HIDDEN)
    engine.detach()


# --- clipping


@EVERY_PLAN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_clip_grad_norm_goes_through_the_engine(plan: str, dtype: torch.dtype) -> None:
    """It returned 0.0 and clipped nothing. The result is that of max_grad_norm, and the norm returned is the
    true one.
    """
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM)
    plain, model = zoo.make("llama", dtype=dtype), zoo.make("llama", dtype=dtype)
    reference = foreign_plans.reference(plain, spec)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    expected, true_norms = train(plain, reference, true_norm)
    losses, norms = train(
        model, engine.optimizer, lambda m: float(nn.utils.clip_grad_norm_(m.parameters(), cells.MAX_GRAD_NORM))
    )
    assert losses == expected and min(norms) > cells.MAX_GRAD_NORM
    assert norms == pytest.approx(true_norms, rel=1e-6)
    engine.detach()
    assert nn.utils.clip_grad_norm_ is torch_clip_grad_norm_
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def true_norm(model: nn.Module) -> float:
    return float(sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5)


@EVERY_PLAN
@pytest.mark.parametrize(
    "clip",
    [
        lambda m: torch_clip_grad_norm_(m.parameters(), 0.05),
        lambda m: torch_clip_grad_norm_(list(m.parameters()), 0.05, foreach=True),
        lambda m: nn.utils.clip_grad_norm_(m.model.layers.parameters(), 0.03),
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.02, norm_type=float("inf")),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    ],
    ids=["torchs own", "torchs foreach", "a part", "largest", "value"],
)
def test_clipping_of_other_kinds_edits_the_gradients(plan: str, clip: Edit) -> None:
    assert_same_run(plan, clip)


@EVERY_PLAN
def test_gradients_read_after_clipping_are_clipped(plan: str) -> None:
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM)
    plain, model = zoo.make("llama"), zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)

    def clip_and_read(m: nn.Module) -> float:
        nn.utils.clip_grad_norm_(m.parameters(), cells.MAX_GRAD_NORM)
        return true_norm(m)

    expected, _ = train(plain, foreign_plans.reference(plain, spec), lambda m: None)
    losses, norms = train(model, engine.optimizer, clip_and_read)
    assert losses == expected and max(norms) == pytest.approx(cells.MAX_GRAD_NORM, rel=1e-4)
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_error_if_nonfinite_is_heard() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    (model(**zoo.batch("llama")).loss * float("nan")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    engine.optimizer.zero_grad()
    engine.detach()


# --- editing and assigning


def scale(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad *= 0.5
        param.grad.data = param.grad.data + 1e-4


def add_noise(model: nn.Module) -> None:
    torch.manual_seed(3)
    for param in model.parameters():
        param.grad.add_(torch.randn_like(param) * 1e-3)


def assign(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad.clone().sign() * 1e-2


def freeze_by_none(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if "layers.1" in name:
            param.grad = None


def zero_rows(model: nn.Module) -> None:
    model.get_input_embeddings().weight.grad[5:] = 0
    del model.model.layers[0].mlp.up_proj.weight.grad


@EVERY_PLAN
@pytest.mark.parametrize("edit", [scale, add_noise, assign, freeze_by_none, zero_rows], ids=lambda f: f.__name__)
def test_edits_and_assignments_are_used(plan: str, edit: Edit) -> None:
    assert_same_run(plan, edit)


@EVERY_PLAN
def test_edits_between_micro_batches_are_used(plan: str) -> None:
    (plain, reference), (model, engine) = foreign_plans.both(plan)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        for seed in range(3):
            for micro in range(2):
                run(**zoo.batch("llama", seed=10 * seed + micro)).loss.backward()
                scale(run)
            optimizer.step()
            optimizer.zero_grad()
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@EVERY_PLAN
@pytest.mark.parametrize("fp32_grads", [False, True], ids=["bf16 sums", "fp32 sums"])
@pytest.mark.parametrize("planned", [1, 2, 4])
def test_three_micro_batches_add_up_under_plans_for_fewer_and_more(plan: str, planned: int, fp32_grads: bool) -> None:
    """A hook sees the sums, another one drops a gradient once, and a parameter has no gradient in the first one."""
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=cells.MAX_GRAD_NORM, fp32_grads=fp32_grads)
    plain, model = (zoo.make("llama", dtype=torch.bfloat16) for _ in range(2))
    reference = foreign_plans.reference(plain, spec)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan, spec=spec, accumulate=planned)
    norms: dict[nn.Module, list[float]] = {plain: [], model: []}
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        seen = norms[run]
        late, dropped = run.model.layers[0].mlp.up_proj.weight, run.model.layers[1].mlp.up_proj.weight
        if not fp32_grads:  # the reference takes the gradients from `.grad`
            run.model.norm.weight.register_post_accumulate_grad_hook(
                lambda p, seen=seen: seen.append(float(p.grad.norm()))
            )
        for seed in range(2):
            for micro in range(3):
                handles = []
                if micro == 0 and not fp32_grads:
                    handles.append(late.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
                if micro == 1 and not fp32_grads:
                    handles.append(dropped.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)))
                run(**zoo.batch("llama", seed=10 * seed + micro)).loss.backward()
                for handle in handles:
                    handle.remove()
            optimizer.step()
            seen.append(float(reference.grad_norm if run is plain else engine.grad_norm))
            optimizer.zero_grad()
    assert norms[model] == norms[plain]
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@EVERY_PLAN
def test_sharpness_aware_minimisation(plan: str) -> None:
    """SAM by hand: weights move along the gradient, a second backward, weights move back, step."""

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for seed in range(3):
            batch = zoo.batch("llama", seed=seed)
            model(**batch).loss.backward()
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                old = [p.data.clone() for p in model.parameters()]
                for param in model.parameters():
                    param.add_(param.grad * (0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            with torch.no_grad():
                for param, value in zip(model.parameters(), old, strict=True):
                    param.data = value
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    (plain, reference), (model, engine) = foreign_plans.both(plan)
    assert run(model, engine.optimizer) == run(plain, reference)
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@EVERY_PLAN
def test_grad_scaler(plan: str) -> None:
    """It failed with 'No inf checks were recorded'."""

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        losses = []
        for seed in range(3):
            loss = model(**zoo.batch("llama", seed=seed)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    (plain, reference), (model, engine) = foreign_plans.both(plan)
    assert run(model, engine.optimizer) == run(plain, reference)
    engine.detach()


@EVERY_PLAN
def test_hooks_on_parameters(plan: str) -> None:
    """A gradient hook changes what arrives; a post-accumulate hook sees `param.grad`, registered before prepare or
    after.
    """

    def hooked(model: nn.Module, seen: list[float]) -> None:
        model.lm_head.weight.register_hook(lambda grad: grad * 0.5)
        model.model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))

    plain, model, wanted, found = zoo.make("llama-untied"), zoo.make("llama-untied"), [], []
    batches = [zoo.batch("llama-untied", seed=seed) for seed in range(2)]
    engine = foreign_plans.prepared(model, batches[0], plan)
    hooked(plain, wanted)
    hooked(model, found)
    reference = foreign_plans.reference(plain)
    for run, optimizer in ((plain, reference), (model, engine.optimizer)):
        for batch in batches:
            run(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found == wanted and len(found) == 2
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_autograd_grad_is_refused_by_name() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    loss = model(**zoo.batch("llama")).loss
    with pytest.raises(EngineMisuse, match=r"torch\.autograd\.grad.*loss\.backward\(\) and read p\.grad"):
        torch.autograd.grad(loss, list(model.parameters()))
    loss.backward()
    engine.optimizer.step()
    engine.detach()


# --- steps


def test_a_step_with_nothing_to_apply_is_refused() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    with pytest.raises(EngineMisuse, match="nothing to apply"):
        engine.optimizer.step()
    model(**zoo.batch("llama")).loss.backward()
    engine.optimizer.zero_grad()
    with pytest.raises(EngineMisuse, match="nothing to apply"):
        engine.optimizer.step()
    engine.detach()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("made", ["before", "after"])
@EVERY_PLAN
def test_an_optimizer_that_is_not_the_engines_is_refused_at_its_first_step(
    plan: str, kind: type[torch.optim.Optimizer], made: str
) -> None:
    """It trained nothing, without a message."""
    model = zoo.make("llama")
    optimizer = kind(model.parameters(), lr=1e-3) if made == "before" else None
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    optimizer = optimizer or kind(model.parameters(), lr=1e-3)
    model(**zoo.batch("llama")).loss.backward()
    with pytest.raises(
        EngineMisuse, match=rf"{kind.__name__}\.step: it holds .* of a prepared model.*engine\.optimizer"
    ):
        optimizer.step()
    engine.optimizer.zero_grad()
    engine.detach()
    model(**zoo.batch("llama")).loss.backward()
    optimizer.step()  # of a plain model again


def test_an_optimizer_of_another_model_is_left_alone() -> None:
    _, (_, engine) = foreign_plans.both("streamed")
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(other.parameters(), 0.1)) > 0
    optimizer.step()
    engine.detach()


@pytest.mark.parametrize("lr", [-1.0, float("nan"), "fast", None])
def test_an_invalid_learning_rate_is_refused_before_anything_is_updated(lr: Any) -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    before = [p.detach().clone() for p in model.parameters()]
    model(**zoo.batch("llama")).loss.backward()
    engine.optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\] is .*, but it is a number from 0"):
        engine.optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    engine.optimizer.step()
    with pytest.raises(ConfigError, match="not the prepared model's"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    engine.detach()


def test_plain_tensors_stay_plain() -> None:
    """Nothing of ours leaks into results."""
    _, (model, engine) = foreign_plans.both("streamed")
    model(**zoo.batch("llama")).loss.backward()
    param = model.lm_head.weight
    for made in (
        param.grad + 1,
        param.data.clone(),
        param.detach().float() * 2,
        torch.stack([param, param]),
        param.cpu() * 1,
    ):
        assert type(made) is Tensor
    engine.optimizer.step()
    engine.detach()
