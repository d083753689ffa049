"""Loops that are not the textbook one: evaluation in between, two forwards, exceptions, NaN, other batches, other
orders.
"""

from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from torch import nn

import outsize
from outsize.base.errors import (
    ConfigError,
    EngineMisuse,
    NonFiniteGradient,
    OrderMismatch,
    PlanInfeasible,
    UpdateFailed,
)
from outsize.runtime.engine import Engine

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
EVERY = pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "swap"])


def both(
    name: str = "llama", *, spec: outsize.AdamW = SPEC, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> tuple[nn.Module, Any, nn.Module, Engine]:
    """A plain model with the reference, and the same one prepared."""
    plain, model = zoo.make(name, dtype=dtype), zoo.make(name, dtype=dtype)
    reference = cells.Reference(
        plain.parameters(),
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        max_grad_norm=spec.max_grad_norm,
        nonfinite=spec.nonfinite,
    )
    engine = cells.prepare_by_hand(model, zoo.batch(name), spec=spec, **{"weights": "host", "optimizer": "host", **how})
    return plain, reference, model, engine


def step(model: nn.Module, optimizer: Any, name: str = "llama", seed: int = 0) -> float:
    torch.manual_seed(seed)
    out = model(**zoo.batch(name, seed=seed))
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(out.loss.detach())


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@EVERY
def test_eval_between_steps_and_between_forward_and_backward_changes_nothing(strategy: str) -> None:
    plain, reference, model, engine = both(strategy=strategy, depth=0)
    for seed in range(3):
        assert step(plain, reference, seed=seed) == step(model, engine.optimizer, seed=seed)
        losses = []
        for m in (plain, model):
            m.eval()
            with torch.no_grad():
                losses.append(float(m(**zoo.batch("llama", size=3, tokens=24, seed=9)).loss))
            m.train()
        assert losses[0] == losses[1]
    results = []
    for m, o in ((plain, reference), (model, engine.optimizer)):
        out = m(**zoo.batch("llama", seed=5))
        with torch.no_grad():
            aside = float(m(**zoo.batch("llama", seed=6)).loss)
        out.loss.backward()
        o.step()
        o.zero_grad()
        results.append((aside, float(out.loss.detach())))
    assert results[0] == results[1] and same_weights(plain, model)
    engine.detach()


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_generate_between_steps_gives_the_plain_models_tokens(name: str) -> None:
    plain, reference, model, engine = both(name, dtype=torch.float32)
    prompt = zoo.batch(name)["input_ids"][:, :5]
    for seed in range(2):
        tokens = []
        for m, o in ((plain, reference), (model, engine.optimizer)):
            step(m, o, name, seed)
            m.eval()
            tokens.append(m.generate(input_ids=prompt, max_new_tokens=6, do_sample=False))
            m.train()
        assert torch.equal(*tokens)
    engine.detach()


@EVERY
def test_a_second_forward_before_backward_is_an_error_that_names_both(strategy: str) -> None:
    _, _, model, engine = both(strategy=strategy)
    first = model(**zoo.batch("llama"))
    with pytest.raises(EngineMisuse, match="forward 2 begins before the backward of forward 1"):
        model(**zoo.batch("llama"))
    first.loss.backward()  # the first is as it was
    second = model(**zoo.batch("llama"))
    del second
    model(**zoo.batch("llama")).loss.backward()  # the second is gone: abandoned, not in the way
    engine.optimizer.step()
    engine.detach()


def test_a_second_backward_of_one_forward_is_refused() -> None:
    _, _, model, engine = both()
    out = model(**zoo.batch("llama"))
    out.loss.backward(retain_graph=True)
    with pytest.raises(EngineMisuse, match="each forward has one backward"):
        out.loss.backward()
    engine.optimizer.zero_grad()
    step(model, engine.optimizer)
    engine.detach()


class Detour(nn.Module):
    """Runs its blocks in a given order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return {"loss": x.square().sum()}


@pytest.mark.parametrize(
    ("order", "expected", "found"),
    [
        ([0, 2, 1, 3], "layers.3", "layers.1"),
        ([0, 1, 1, 2, 3], "layers.2", "layers.1"),
        ([3, 0], "the end of forward", "layers.0"),
    ],
)
def test_another_order_of_blocks_stops_with_both_named_and_the_next_step_is_clean(
    order: list[int], expected: str, found: str
) -> None:
    x = {"x": torch.ones(2, 8)}
    plain, model = Detour(), Detour()
    engine = cells.prepare_by_hand(model, x, spec=SPEC, weights="host", optimizer="host", chunk_bytes=512)
    model.order = order
    with pytest.raises(OrderMismatch, match=rf"{expected}.*{found}"):
        model(**x)
    model.order = [0, 1, 2, 3]
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for m, o in ((plain, reference), (model, engine.optimizer)):
        m(**x)["loss"].backward()
        o.step()
        o.zero_grad()
    assert same_weights(plain, model)
    engine.detach()


def test_a_block_that_runs_several_times_is_planned_for() -> None:
    """Trap A16: the same block, several times in one forward, each recomputed."""
    for strategy in ("keep", "recompute", "offload", "swap"):
        plain, reference, model, engine = both("looped", strategy=strategy)
        assert [step(plain, reference, "looped", s) for s in range(3)] == [
            step(model, engine.optimizer, "looped", s) for s in range(3)
        ]
        assert same_weights(plain, model)
        engine.detach()


class Skipping(nn.Module):
    """An expert that most batches do not use (trap D20), and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Chooser() for _ in range(3))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, expert: int) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x, expert)
        return {"loss": x.square().sum()}


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[expert](self.always(x)))


@EVERY
@pytest.mark.parametrize("accumulate", [1, 2])
def test_unused_parameters_keep_their_bits_and_their_step_count(strategy: str, accumulate: int) -> None:
    experts = [0, 1, 1, 0, 1, 1, 1, 0]
    data = [
        {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(i)), "expert": e} for i, e in enumerate(experts)
    ]

    def run(model: nn.Module, optimizer: Any) -> tuple[list[float], dict[int, float]]:
        losses = []
        for i, batch in enumerate(data):
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(float(loss))
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, {i: float(s["step"]) for i, s in optimizer.state_dict()["state"].items()}

    plain, model = Skipping(), Skipping()
    expected = run(plain, cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1))
    engine = cells.prepare_by_hand(
        model,
        data[0],
        spec=SPEC,
        weights="host",
        optimizer="host",
        strategy=strategy,
        accumulate=accumulate,
        chunk_bytes=1024,
    )
    assert run(model, engine.optimizer) == expected
    assert same_weights(plain, model)
    engine.detach()


class Breaks(nn.Module):
    """Raises in forward or in backward on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Breaking() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().sum()}


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(8, 8)
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise RuntimeError("broken forward")
        if self.where == "interrupted":
            raise KeyboardInterrupt
        y = x + torch.tanh(self.linear(x))
        if self.where == "backward" and y.requires_grad:
            y.register_hook(_break)
        return y


def _break(_: torch.Tensor) -> None:
    raise RuntimeError("broken backward")


@EVERY
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_is_followed_by_a_clean_step(strategy: str, where: str) -> None:
    """Traps A6, A20, D43: nothing leaks over many broken passes, and weights are those of a run without them."""
    batches = [{"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(i))} for i in range(4)]
    plain, model = Breaks(), Breaks()
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    engine = cells.prepare_by_hand(
        model,
        batches[0],
        spec=SPEC,
        device="sim:1MiB",
        weights="host",
        optimizer="host",
        strategy=strategy,
        chunk_bytes=512,
    )
    resting = None
    for i, batch in enumerate(batches * 3):
        model.layers[2].where = where
        with pytest.raises(RuntimeError, match=f"broken {where}"):
            model(**batch)["loss"].backward()
        model.layers[2].where = ""
        if where == "backward" and i % 2:
            with pytest.raises(EngineMisuse, match=r"the last one failed in layers\.\d"):
                engine.optimizer.step()
        engine.optimizer.zero_grad()
        for m, o in ((plain, reference), (model, engine.optimizer)):
            loss = m(**batch)["loss"]
            loss.backward()
            o.step()
            o.zero_grad()
            del loss
        live = engine.device.observer.live_bytes  # type: ignore[attr-defined]
        assert resting in (None, live)
        resting = live
    assert same_weights(plain, model)
    engine.detach()


@EVERY
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluating"])
def test_after_ctrl_c_in_a_forward_one_may_save_and_go_on(strategy: str, grad: bool, tmp_path: Path) -> None:
    """torch calls no module hook after a KeyboardInterrupt."""
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    plain, model = Breaks(), Breaks()
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    engine = cells.prepare_by_hand(
        model, batch, spec=SPEC, device="sim:1MiB", weights="host", optimizer="host", strategy=strategy, chunk_bytes=512
    )
    for i in range(3):
        model.layers[2].where = "interrupted"
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(grad):
            model(**batch)
        model.layers[2].where = ""
        assert torch.is_autocast_cache_enabled(), "which is off while the model runs"
        engine.save(tmp_path / str(i))
        for m, o in ((plain, reference), (model, engine.optimizer)):
            m(**batch)["loss"].backward()
            o.step()
            o.zero_grad()
    assert same_weights(plain, model)
    engine.detach()
    assert "forward" not in model.__dict__


def test_a_forward_that_is_wrapped_meanwhile_stays_wrapped() -> None:
    """As accelerate does for autocast; a re-plan detaches and attaches."""
    plain, model = zoo.make("llama"), zoo.make("llama")
    reference = cells.Reference(plain.parameters(), lr=SPEC.lr, weight_decay=SPEC.weight_decay)
    engine = outsize.prepare(model, zoo.batch("llama"), optimizer=SPEC, device="cpu", chunked_loss=False)
    calls: list[int] = []
    inner = model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = wrapped
    for seed in range(3):
        calls.clear()
        assert step(plain, reference, seed=seed) == step(model, engine.optimizer, seed=seed)
        assert len(calls) == 1
        engine.replan(zoo.batch("llama"), engine.plan.step_config)
    engine.detach()
    assert same_weights(plain, model)
    calls.clear()
    model(**zoo.batch("llama"))
    assert len(calls) == 1


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_a_nan_gradient_is_raised_with_its_block_and_nothing_is_changed(where: str) -> None:
    """Trap D12: found before any state changes."""
    _, _, model, engine = both(optimizer=where)
    step(model, engine.optimizer)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    moments = {i: {k: v.clone() for k, v in s.items()} for i, s in engine.optimizer.state_dict()["state"].items()}
    with engine.gathered("model.layers.2.mlp.down_proj.weight") as values:
        kept = values["model.layers.2.mlp.down_proj.weight"].clone()
        values["model.layers.2.mlp.down_proj.weight"].fill_(float("nan"))
    model(**zoo.batch("llama")).loss.backward()
    with pytest.raises(NonFiniteGradient, match="block"):
        engine.optimizer.step()
    with engine.gathered("model.layers.2.mlp.down_proj.weight") as values:
        values["model.layers.2.mlp.down_proj.weight"].copy_(kept)
    assert all(torch.equal(model.state_dict()[n], v) for n, v in before.items())
    after = engine.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], v) for i, s in moments.items() for k, v in s.items() if k != "lo")
    step(model, engine.optimizer)
    engine.detach()


def test_nan_gradients_are_skipped_by_option_as_in_the_reference() -> None:
    spec = outsize.AdamW(lr=1e-2, weight_decay=0.1, nonfinite="skip", max_grad_norm=1.0)
    plain, reference, model, engine = both(spec=spec)
    for seed in range(4):
        for m, o in ((plain, reference), (model, engine.optimizer)):
            out = m(**zoo.batch("llama", seed=seed))
            (out.loss * (float("nan") if seed == 2 else 1.0)).backward()
            o.step()
            o.zero_grad()
    assert engine.num_skipped == reference.skipped == 1
    assert same_weights(plain, model)
    engine.detach()


def test_a_nan_gradient_in_backward_mode_names_its_block_before_anything_is_saved_or_stepped(tmp_path: Path) -> None:
    _, _, model, engine = both(spec=outsize.AdamW(lr=1e-2, update="in_backward"))
    with engine.last_backward():
        (model(**zoo.batch("llama")).loss * float("nan")).backward()
    engine.optimizer.step()  # the weights are made of it already: nothing waits here to look
    with pytest.raises(NonFiniteGradient, match=r"block head.*last checkpoint"):
        engine.save(tmp_path / "bad")
    with pytest.raises(UpdateFailed, match="last checkpoint"):
        model(**zoo.batch("llama"))
    engine.detach()


def test_in_backward_mode_every_backward_is_declared_and_followed_by_step() -> None:
    _, _, model, engine = both(spec=outsize.AdamW(lr=1e-2, update="in_backward"))
    with pytest.raises(EngineMisuse, match="last_backward"):
        model(**zoo.batch("llama")).loss.backward()
    engine.optimizer.zero_grad()
    with engine.last_backward():
        model(**zoo.batch("llama")).loss.backward()
    with pytest.raises(EngineMisuse, match=r"step\(\) is missing"):
        engine.optimizer.zero_grad()
    with pytest.raises(EngineMisuse, match=r"step\(\) is missing"):
        model(**zoo.batch("llama"))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.detach()


def test_zero_grad_discards_pending_gradients() -> None:
    """Traps B7, D4, D21; also through the model's own zero_grad, which Trainer calls."""
    plain, reference, model, engine = both()
    for m, o in ((plain, reference), (model, engine.optimizer)):
        m(**zoo.batch("llama", seed=1)).loss.backward()
        m.zero_grad()
        m(**zoo.batch("llama", seed=2)).loss.backward()
        o.zero_grad(set_to_none=True)
        step(m, o, seed=3)
    assert same_weights(plain, model)
    assert all(p.grad is None for p in model.parameters())  # trap D5
    engine.detach()


def test_step_honours_a_closure_and_clip_grad_norm_clips_the_coming_step() -> None:
    """Traps D10, D11, D23."""
    plain, _, model, engine = both(spec=SPEC)
    clipped = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=0.25)
    plain(**zoo.batch("llama")).loss.backward()
    clipped.step()

    def closure() -> torch.Tensor:
        loss = model(**zoo.batch("llama")).loss
        loss.backward()
        assert float(engine.clip_grad_norm_(0.25)) == float(clipped.grad_norm)
        return loss

    assert float(engine.optimizer.step(closure)) > 0
    assert same_weights(plain, model)
    engine.detach()


def test_a_smaller_batch_runs_and_a_larger_one_is_planned_for_before_its_forward() -> None:
    plain = zoo.make("llama", dtype=torch.bfloat16)
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    model = zoo.make("llama", dtype=torch.bfloat16)
    engine = outsize.prepare(model, zoo.batch("llama"), optimizer=SPEC, device="sim:400KiB", chunk_bytes="8KiB")
    small = engine.plan
    shapes = [(2, 16), (1, 8), (2, 16), (3, 20), (2, 16), (2, 24)]
    for seed, (size, tokens) in enumerate(shapes):
        for m, o in ((plain, reference), (model, engine.optimizer)):
            out = m(**zoo.batch("llama", size=size, tokens=tokens, seed=seed))
            out.loss.backward()
            if seed != 2:  # a re-plan in the middle of accumulation keeps the pending gradients
                o.step()
                o.zero_grad()
            del out
    assert engine.plan.inputs["input_ids"] == (3, 24) and small.inputs["input_ids"] == (2, 16), (
        "3 × 20 and 2 × 24 are planned for together"
    )
    assert same_weights(plain, model)
    engine.detach()


def test_a_batch_too_large_for_any_plan_is_refused_and_training_continues() -> None:
    plain = zoo.make("llama", dtype=torch.bfloat16)
    reference = cells.Reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
    model = zoo.make("llama", dtype=torch.bfloat16)
    engine = outsize.prepare(model, zoo.batch("llama"), optimizer=SPEC, device="sim:256KiB", chunk_bytes="8KiB")
    assert step(plain, reference) == step(model, engine.optimizer)
    with pytest.raises(PlanInfeasible, match="gpu_memory"):
        model(**zoo.batch("llama", size=64, tokens=64))
    assert step(plain, reference, seed=1) == step(model, engine.optimizer, seed=1)
    assert same_weights(plain, model)
    engine.detach()


def test_max_shape_plans_for_the_largest_batch_at_once() -> None:
    model = zoo.make("llama")
    engine = outsize.prepare(model, zoo.batch("llama"), device="sim:4MiB", max_shape=(4, 32), chunk_bytes="16KiB")
    before = engine.plan
    step(model, engine.optimizer)
    model(**zoo.batch("llama", size=4, tokens=32)).loss.backward()
    engine.optimizer.step()
    assert engine.plan is before and before.inputs == {"input_ids": (4, 32), "labels": (4, 32)}
    engine.detach()


def test_schedulers_of_torch_and_transformers_drive_the_engine() -> None:
    """Traps D7, D22: one param_groups object, read at each step."""
    from transformers import get_cosine_schedule_with_warmup

    plain, reference, model, engine = both()
    for m, o in ((plain, reference), (model, engine.optimizer)):
        schedules = [get_cosine_schedule_with_warmup(o, 2, 8), torch.optim.lr_scheduler.StepLR(o, 3, 0.5)]
        for seed in range(6):
            step(m, o, seed=seed)
            for schedule in schedules:
                schedule.step()
    assert same_weights(plain, model)
    engine.detach()


def test_optimizer_state_moves_between_plans_and_the_reference() -> None:
    """Traps D13, D14, H5, H9: torch's layout, by parameter, whatever lives where."""
    plain, reference, model, engine = both()
    for seed in range(2):
        step(plain, reference, seed=seed), step(model, engine.optimizer, seed=seed)
    saved, weights = engine.optimizer.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}
    assert (
        saved["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))
        and saved["param_groups"][0]["param_names"]
    )
    saved["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}
    engine.detach()
    again = zoo.make("llama", dtype=torch.bfloat16)
    other = cells.prepare_by_hand(again, zoo.batch("llama"), spec=SPEC, weights="gpu", optimizer="gpu", strategy="swap")
    again.load_state_dict(weights)
    other.optimizer.load_state_dict(saved)
    for seed in range(2, 4):
        assert step(plain, reference, seed=seed) == step(again, other.optimizer, seed=seed)
    assert same_weights(plain, again)
    other.detach()


def test_a_loss_made_outside_keeps_its_forward_alive_over_zero_grad() -> None:
    """The outputs' tensors are gone into the loss; their graph is what counts."""
    plain, reference, model, engine = both("llama", dtype=torch.float32)
    batch = {"input_ids": zoo.batch("llama")["input_ids"]}
    for m, o in ((plain, reference), (model, engine.optimizer)):
        loss = m(**batch).logits.square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        o.zero_grad()
    assert same_weights(plain, model)
    loss = model(**batch).logits.square().mean()
    with pytest.raises(EngineMisuse, match="begins before the backward of forward"):
        model(**batch)
    loss.backward()
    engine.detach()


def test_broken_gradients_stay_broken_over_a_new_plan() -> None:
    model = zoo.make("llama")
    engine = outsize.prepare(model, zoo.batch("llama"), optimizer=SPEC, device="sim:8MiB", chunk_bytes="8KiB")
    out = model(**zoo.batch("llama"))
    out.logits.register_hook(_break)
    with pytest.raises(RuntimeError, match="broken backward"):
        out.loss.backward()
    del out
    model(**zoo.batch("llama", size=3)).loss.backward()
    with pytest.raises(EngineMisuse, match="the last one failed in"):
        engine.optimizer.step()
    engine.optimizer.zero_grad()
    step(model, engine.optimizer)
    engine.detach()


def test_a_new_plan_takes_positional_and_keyword_inputs() -> None:
    model = zoo.make("llama")
    batch, larger = zoo.batch("llama"), zoo.batch("llama", size=4)
    engine = outsize.prepare(model, batch, optimizer=SPEC, device="sim:8MiB", chunk_bytes="8KiB")
    out = model(larger["input_ids"], labels=larger["labels"])
    out.loss.backward()
    engine.optimizer.step()
    assert engine.plan.inputs == {"input_ids": (4, 16), "labels": (4, 16)}
    assert engine.report().gpu_peak_bytes <= engine.plan.estimate.gpu_bytes
    engine.detach()


def test_events_do_not_pile_up() -> None:
    for how in ({"weights": "host", "optimizer": "gpu"}, {"weights": "gpu", "optimizer": "gpu"}):
        _, _, model, engine = both(device="sim:64MiB", **how)
        counts = []
        for seed in range(6):
            step(model, engine.optimizer, seed=seed)
            with torch.no_grad():
                model(**zoo.batch("llama"))
            counts.append(engine.runtime.executor.lanes.num_events)
        assert counts[1] == counts[-1]
        engine.detach()


@pytest.mark.usefixtures("_profiles_anew")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_config_with_the_cache_on_is_traced_and_trained_without_it(name: str) -> None:
    """Trap A17: `use_cache` is on by default in transformers; eager attention would fill it twice under recompute."""
    model = zoo.make(name)
    model.config.use_cache = True
    engine = outsize.prepare(
        model, zoo.batch(name), optimizer=SPEC, device="sim:4MiB", chunk_bytes="8KiB", pins=outsize.Pins(n_checkpoint=4)
    )
    for seed in range(2):
        out = model(**zoo.batch(name, seed=seed))
        out.loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes
    engine.detach()
    assert model.config.use_cache is True


def test_a_given_plan_and_other_arguments_must_agree() -> None:
    model = zoo.make("llama")
    engine = outsize.prepare(model, zoo.batch("llama"), device="cpu")
    plan = engine.plan
    engine.detach()
    for other in (
        {"accumulate": 3},
        {"optimizer": outsize.AdamW(fp32_grads=True)},
        {"gpu_memory": "1KiB"},
        {"pins": outsize.Pins(n_swap=1)},
    ):
        with pytest.raises(ConfigError, match="plan: it contradicts the other arguments"):
            outsize.prepare(zoo.make("llama"), zoo.batch("llama"), device="cpu", plan=plan, **other)
    engine = outsize.prepare(model, zoo.batch("llama"), device="cpu", plan=plan)
    assert engine.plan is plan
    engine.detach()


def test_a_failed_update_is_remembered_until_state_is_loaded() -> None:
    _, _, model, engine = both()
    step(model, engine.optimizer)
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    saved = engine.optimizer.state_dict()
    saved["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}
    expected = step(model, engine.optimizer, seed=1)
    updates = engine.runtime.updates
    updates.update_chunk = _fail  # type: ignore[method-assign]
    with pytest.raises(UpdateFailed):
        step(model, engine.optimizer, seed=2)
    del updates.update_chunk
    for act in (engine.optimizer.step, lambda: model(**zoo.batch("llama"))):
        with pytest.raises(UpdateFailed):
            act()
    model.load_state_dict(weights)
    engine.optimizer.load_state_dict(saved)
    assert step(model, engine.optimizer, seed=1) == expected
    engine.detach()


def _fail(*_: Any) -> None:
    raise OSError("disk on fire")


def test_weights_loaded_after_their_optimizer_keep_their_masters() -> None:
    """A weight that is loaded unchanged keeps the lower half of its master."""
    plain, reference, model, engine = both()
    for seed in range(2):
        step(plain, reference, seed=seed), step(model, engine.optimizer, seed=seed)
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
    assert step(plain, reference, seed=2) == step(model, engine.optimizer, seed=2)
    assert same_weights(plain, model) and all(
        torch.equal(a["lo"], b["lo"])
        for a, b in zip(
            reference.state_dict()["state"].values(), engine.optimizer.state_dict()["state"].values(), strict=True
        )
    )
    engine.detach()


def test_modes_of_the_caller_survive_prepare_and_detach() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import FlopCounterMode

    before = list(_get_current_dispatch_mode_stack())
    with FlopCounterMode(display=False) as counter:
        _, _, model, engine = both()
        step(model, engine.optimizer)
    assert counter not in _get_current_dispatch_mode_stack() and counter.get_total_flops() > 0
    step(model, engine.optimizer)
    engine.detach()
    assert _get_current_dispatch_mode_stack() == before
