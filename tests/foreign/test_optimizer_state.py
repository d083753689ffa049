"""`engine.optimizer` as other code uses a torch optimizer: state dicts in files, state by parameter, hooks,
schedulers.
"""

import io
from pathlib import Path
from typing import Any

import foreign_plans
import pytest
import torch
import zoo
from torch import nn

import outsize

EVERY_PLAN = foreign_plans.EVERY_PLAN


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> float:
    loss = model(**zoo.batch("llama", seed=seed)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(plan: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
    model = zoo.make("llama", dtype=dtype)
    engine = foreign_plans.prepared(model, zoo.batch("llama"), plan)
    step(model, engine.optimizer)
    return model, engine


def through_torch_save(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_safetensors(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    save_file(
        {f"{i}/{key}": value for i, values in state["state"].items() for key, value in values.items()},
        folder / "state.safetensors",
    )
    read: dict[int, dict[str, Any]] = {}
    for name, value in load_file(folder / "state.safetensors").items():
        read.setdefault(int(name.split("/")[0]), {})[name.split("/")[1]] = value
    return {"state": read, "param_groups": state["param_groups"]}


def through_dcp(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    dcp.save({"optimizer": state}, checkpoint_id=folder / "dcp", no_dist=True)
    empty = {i: {key: torch.zeros_like(value) for key, value in values.items()} for i, values in state["state"].items()}
    target = {"optimizer": {"state": empty, "param_groups": state["param_groups"]}}
    dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)
    return target["optimizer"]


@EVERY_PLAN
@pytest.mark.parametrize("through", [through_torch_save, through_safetensors, through_dcp], ids=lambda f: f.__name__)
def test_a_state_dict_goes_through_files(plan: str, through: Any, tmp_path: Path) -> None:
    """torch.save failed for bf16 models: their state was views of one buffer as several dtypes."""
    model, engine = trained(plan)
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    saved = through(engine.optimizer.state_dict(), tmp_path)
    expected = [step(model, engine.optimizer, seed) for seed in (1, 2)]
    engine.detach()
    other = zoo.make("llama", dtype=torch.bfloat16)
    again = foreign_plans.prepared(other, zoo.batch("llama"), "streamed" if plan != "streamed" else "resident")
    other.load_state_dict(weights)
    again.optimizer.load_state_dict(saved)
    assert [step(other, again.optimizer, seed) for seed in (1, 2)] == expected
    again.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_file_of_one_parameters_state_is_as_large_as_that_state() -> None:
    _, engine = trained("streamed")
    state = engine.optimizer.state_dict()["state"][3]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert buffer.tell() < sum(v.nbytes for v in state.values()) + 4096
    engine.detach()


@EVERY_PLAN
def test_state_by_parameter(plan: str) -> None:
    model, engine = trained(plan)
    optimizer, weight = engine.optimizer, model.model.layers[1].mlp.up_proj.weight
    state = optimizer.state[weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "lo"} and float(state["step"]) == 1
    assert state["exp_avg"].shape == weight.shape and bool(state["exp_avg"].any())
    assert weight in optimizer.state and len(optimizer.state) == len(list(model.parameters())) == len(
        dict(optimizer.state.items())
    )
    optimizer.state[weight] = {**state, "exp_avg": torch.ones_like(state["exp_avg"])}
    assert bool((optimizer.state[weight]["exp_avg"] == 1).all())
    optimizer.state[weight] = {}
    assert weight not in optimizer.state and optimizer.state[weight] == {}
    with pytest.raises(KeyError):
        optimizer.state[nn.Parameter(torch.ones(1))]
    engine.detach()


def test_a_fresh_optimizer_has_no_state() -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
    assert not engine.optimizer.state and engine.optimizer.state_dict()["state"] == {}
    assert engine.optimizer.state[model.lm_head.weight] == {}
    engine.detach()


def test_hooks_of_state_dicts_and_steps_are_called() -> None:
    model, engine = trained("streamed")
    calls: list[str] = []
    optimizer = engine.optimizer
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append(f"load pre {state.pop('extra')}"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step post"))
    optimizer.load_state_dict(optimizer.state_dict())
    step(model, optimizer, 1)
    assert calls == ["state_dict pre", "load pre 1", "load post", "step pre", "step post"]
    engine.detach()


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": dict(lr_lambda=lambda i: 0.9**i),
    "MultiplicativeLR": dict(lr_lambda=lambda i: 0.9),
    "StepLR": dict(step_size=1),
    "MultiStepLR": dict(milestones=[1, 2]),
    "ConstantLR": dict(total_iters=2),
    "LinearLR": dict(total_iters=3),
    "ExponentialLR": dict(gamma=0.5),
    "PolynomialLR": dict(total_iters=3),
    "CosineAnnealingLR": dict(T_max=3),
    "CosineAnnealingWarmRestarts": dict(T_0=2),
    "CyclicLR": dict(base_lr=1e-4, max_lr=1e-2, step_size_up=1, cycle_momentum=False),
    "OneCycleLR": dict(max_lr=1e-2, total_steps=5),
    "ReduceLROnPlateau": dict(patience=0),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    from torch.optim import lr_scheduler

    combined = {"LRScheduler", "SequentialLR", "ChainedScheduler"}
    assert set(SCHEDULERS) == set(lr_scheduler.__all__) - combined


@pytest.mark.parametrize("name", [*SCHEDULERS, "SequentialLR", "ChainedScheduler"])
def test_schedulers(name: str) -> None:
    """OneCycleLR and CyclicLR change betas as well, by momentum."""
    from torch.optim import lr_scheduler

    def make(optimizer: Any) -> Any:
        if name in ("SequentialLR", "ChainedScheduler"):
            parts = [
                lr_scheduler.ConstantLR(optimizer, total_iters=1),
                lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
            ]
            return (
                lr_scheduler.SequentialLR(optimizer, parts, [1])
                if name == "SequentialLR"
                else lr_scheduler.ChainedScheduler(parts)
            )
        return getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name])

    def run(model: nn.Module, optimizer: Any) -> list[Any]:
        scheduler, seen = make(optimizer), []
        for seed in range(3):
            loss = step(model, optimizer, seed)
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            seen.append((loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return seen

    (plain, reference), (model, engine) = foreign_plans.both("streamed", "plain")
    assert run(model, engine.optimizer) == run(plain, reference)
    engine.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_closure_is_called() -> None:
    (plain, reference), (model, engine) = foreign_plans.both("streamed")

    def closure_of(run: nn.Module, optimizer: Any) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = run(**zoo.batch("llama")).loss
            loss.backward()
            return loss

        return closure

    for _ in range(2):
        assert float(engine.optimizer.step(closure_of(model, engine.optimizer)).detach()) == float(
            reference.step(closure_of(plain, reference)).detach()
        )
    engine.detach()


def test_swa_learning_rate() -> None:
    from torch.optim.swa_utils import SWALR

    _, (model, engine) = foreign_plans.both("streamed", spec=outsize.AdamW(lr=1e-2))
    scheduler = SWALR(engine.optimizer, swa_lr=1e-4, anneal_epochs=1)
    step(model, engine.optimizer)
    scheduler.step()
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    engine.detach()
