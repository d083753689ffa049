"""The optimizer's two faces: what a user may ask for, and the torch optimizer they get."""

import copy
from collections.abc import Iterator
from typing import Any

import cells
import pytest
import torch
import zoo
from torch import nn

from outsize.base.errors import ConfigError
from outsize.optim.adamw import AdamW
from outsize.reference import AdamW as Reference
from outsize.runtime.engine import Engine

CELL = cells.Cell(kind="plain", weights="host", optimizer="host")
SPEC = CELL.spec


@pytest.fixture
def engine() -> Iterator[Engine]:
    with cells.closing(cells.prepare(CELL)) as made:
        yield made


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    model(**zoo.batch("plain", seed=seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(state_dict)


# --- what is asked for


def test_all_problems_of_a_spec_are_reported_at_once() -> None:
    wrong: dict[str, Any] = dict(
        lr=-1.0, betas=(0.9, 1.0), eps=0.0, weight_decay=-0.1, max_grad_norm=0.0, nonfinite="ignore", update="sometime"
    )
    with pytest.raises(ConfigError) as error:
        AdamW(**wrong)
    for name, value in wrong.items():
        assert f"{name} " in str(error.value) and repr(value) in str(error.value), name


@pytest.mark.parametrize(
    "wrong",
    [
        dict(lr=float("nan")),
        dict(betas=(0.9,)),
        dict(betas=(-0.1, 0.9)),
        dict(eps=-1e-8),
        dict(weight_decay=float("nan")),
        dict(max_grad_norm=-1.0),
    ],
)
def test_each_problem_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdamW(**wrong)


@pytest.mark.parametrize("other", [dict(max_grad_norm=1.0), dict(nonfinite="skip")])
def test_updates_in_backward_go_without_what_needs_all_gradients(other: dict[str, Any]) -> None:
    """Trap D9."""
    with pytest.raises(ConfigError, match="in_backward"):
        AdamW(update="in_backward", **other)


@pytest.mark.parametrize("wrong", [dict(lr="1e-3"), dict(betas=0.9), dict(eps=None)])
def test_a_value_of_another_type_is_a_config_error(wrong: dict[str, Any]) -> None:
    """YAML reads 1e-3 as text."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdamW(**wrong)


def test_the_edges_are_allowed() -> None:
    AdamW(lr=0.0, betas=(0.0, 0.0), weight_decay=0.0, max_grad_norm=1e-30)
    AdamW(update="in_backward")


# --- groups


def grouped(*groups: dict[str, Any], model: nn.Module | None = None) -> list[dict[str, Any]]:
    return AdamW(groups=groups).param_groups((model or zoo.make("plain")).named_parameters())


def names(group: dict[str, Any]) -> list[str]:
    return [name for name, _ in group["params"]]


def test_groups_by_name_and_by_parameter_are_the_same() -> None:
    model = zoo.make("plain")
    norms = [n for n, _ in model.named_parameters() if "norm" in n]
    by_name = grouped({"params": norms, "weight_decay": 0.0}, model=model)
    by_parameter = grouped(
        {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0}, model=model
    )
    generator = grouped({"params": (n for n in norms), "weight_decay": 0.0}, model=model)
    mixed = grouped(
        {"params": [norms[0], *(model.get_parameter(n) for n in norms[1:])], "weight_decay": 0.0}, model=model
    )
    assert (
        [names(g) for g in by_name]
        == [names(g) for g in by_parameter]
        == [names(g) for g in generator]
        == [names(g) for g in mixed]
    )
    assert by_name[0]["weight_decay"] == 0.0 and "weight_decay" not in by_name[1]
    assert sorted(names(by_name[0]) + names(by_name[1])) == sorted(n for n, _ in model.named_parameters()), (
        "the rest is a group of its own"
    )


def test_without_groups_there_is_one_and_with_all_named_there_is_no_rest() -> None:
    model = zoo.make("plain")
    everything = [n for n, _ in model.named_parameters()]
    assert [names(g) for g in grouped(model=model)] == [everything]
    assert [names(g) for g in grouped({"params": everything[::-1]}, model=model)] == [everything[::-1]]


@pytest.mark.parametrize(
    "groups",
    [
        [{"params": ["head.weight", "haed.weight"]}],
        [{"params": ["head.weight"]}, {"params": ["head.weight"]}],
        [{"params": ["head.weight", "head.weight"]}],
        [{"params": [nn.Parameter(torch.ones(2))]}],
    ],
    ids=["unknown", "in two groups", "twice in one", "of another model"],
)
def test_what_is_no_parameter_of_the_model_or_comes_twice_is_refused(groups: list[dict[str, Any]]) -> None:
    """Trap D8: each parameter has its settings from one place."""
    with pytest.raises(ConfigError, match="or is in two groups"):
        grouped(*groups, model=zoo.make("plain"))


def test_a_group_may_name_frozen_parameters() -> None:
    model = zoo.make("plain")
    model.embed.weight.requires_grad_(False)
    groups = grouped({"params": ["embed.weight", "head.weight"]}, model=model)
    assert names(groups[0]) == ["head.weight"] and "embed.weight" not in names(groups[1])


def test_groups_reach_the_updates() -> None:
    """Traps D8, D22: no-decay norms and a faster head, to the bit."""
    spec = AdamW(
        lr=1e-2,
        weight_decay=0.1,
        groups=[
            {"params": [n for n, _ in zoo.make("plain").named_parameters() if "norm" in n], "weight_decay": 0.0},
            {"params": ["head.weight"], "lr": 5e-2},
        ],
    )
    data = cells.batches("plain", 3)
    expected = cells.plain(zoo.make("plain"), data, spec=spec, steps=3)
    with cells.closing(cells.prepare(CELL, spec=spec)) as engine:
        cells.assert_same(
            cells.train(engine.model, engine.optimizer, data, steps=3, accumulate=1, engine=engine), expected
        )
        assert [g["lr"] for g in engine.optimizer.param_groups] == [1e-2, 5e-2, 1e-2]
        assert [g["weight_decay"] for g in engine.optimizer.param_groups] == [0.0, 0.1, 0.1]


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"weight_decya": 0.0}], ids=["value", "name"])
def test_a_wrong_setting_of_a_group_is_refused(wrong: dict[str, Any]) -> None:
    """Trap I2: an explicit setting is obeyed or rejected."""
    with pytest.raises(ConfigError):
        grouped({"params": ["head.weight"], **wrong})


def test_no_group_of_other_parameters_is_added_later(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="not the prepared model's"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


# --- the torch optimizer


def test_the_state_dict_has_torchs_layout(engine: Engine) -> None:
    """Trap D14: integer keys, one entry per parameter, everything in it."""
    model = zoo.make("plain")
    theirs = torch.optim.AdamW(list(model.named_parameters()), lr=1e-2, weight_decay=0.1)
    assert engine.optimizer.state_dict()["state"] == {}, "nothing before the first step, as in torch"
    step(model, theirs)
    step(engine.model, engine.optimizer)
    mine, expected = engine.optimizer.state_dict(), theirs.state_dict()
    assert mine.keys() == expected.keys() and mine["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert {k: v.shape for k, v in mine["state"][number].items()} == {k: v.shape for k, v in state.items()}
        assert float(mine["state"][number]["step"]) == 1.0
    for a, b in zip(mine["param_groups"], expected["param_groups"], strict=True):
        assert a["params"] == b["params"] and a["param_names"] == b["param_names"]
        assert all(a[key] == b[key] for key in ("lr", "betas", "eps", "weight_decay"))


def test_masters_of_bf16_weights_are_in_the_state() -> None:
    """Traps D14, D19: without the lower halves a resumed run would not be the same run."""
    with cells.closing(
        cells.prepare(cells.Cell(kind="plain", dtype="bf16", weights="host", optimizer="gpu"))
    ) as engine:
        step(engine.model, engine.optimizer)
        state = engine.optimizer.state_dict()["state"]
        assert all(s["lo"].dtype == torch.int16 and s["exp_avg"].dtype == torch.float32 for s in state.values())
        assert any(bool(s["lo"].any()) for s in state.values())


def test_a_state_that_is_saved_and_loaded_is_the_same_and_so_is_what_follows(engine: Engine) -> None:
    step(engine.model, engine.optimizer)
    saved, weights = copied(engine.optimizer.state_dict()), {n: v.clone() for n, v in engine.model.state_dict().items()}
    step(engine.model, engine.optimizer, seed=1)
    expected = {n: v.clone() for n, v in engine.model.state_dict().items()}
    engine.model.load_state_dict(weights)
    engine.optimizer.load_state_dict(copied(saved))
    again = engine.optimizer.state_dict()
    assert all(torch.equal(again["state"][i][k], v) for i, s in saved["state"].items() for k, v in s.items())
    assert again["param_groups"] == saved["param_groups"]
    step(engine.model, engine.optimizer, seed=1)
    assert all(torch.equal(engine.model.state_dict()[n], v) for n, v in expected.items())


def test_loading_goes_by_name_where_names_are_given_and_by_position_otherwise(engine: Engine) -> None:
    step(engine.model, engine.optimizer)
    saved = copied(engine.optimizer.state_dict())
    before = copied(saved["state"])
    count = len(before)
    turned = {
        **saved,
        "state": {count - 1 - i: s for i, s in before.items()},
        "param_groups": copied(saved["param_groups"]),
    }
    turned["param_groups"][0]["param_names"].reverse()
    engine.optimizer.load_state_dict(turned)
    after = engine.optimizer.state_dict()
    assert all(torch.equal(after["state"][i][k], v) for i, s in before.items() for k, v in s.items())
    assert after["param_groups"][0]["param_names"] == saved["param_groups"][0]["param_names"], (
        "the engine's own order stays"
    )
    unnamed = copied(saved)
    del unnamed["param_groups"][0]["param_names"]
    engine.optimizer.load_state_dict(unnamed)
    after = engine.optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], v) for i, s in before.items() for k, v in s.items())


def test_a_state_without_an_entry_resets_it(engine: Engine) -> None:
    step(engine.model, engine.optimizer)
    saved = copied(engine.optimizer.state_dict())
    del saved["state"][0]
    engine.optimizer.load_state_dict(saved)
    assert (
        0 not in engine.optimizer.state_dict()["state"]
        and float(engine.optimizer_state("embed.weight")["exp_avg"].abs().sum()) == 0.0
    )


@pytest.mark.parametrize("kind", ["llama", "one-block", "looped"])
def test_the_state_of_another_model_is_refused_and_nothing_changes(kind: str, engine: Engine) -> None:
    step(engine.model, engine.optimizer)
    before = copied(engine.optimizer.state_dict())
    other = zoo.make(kind)
    theirs = Reference(list(other.named_parameters()), lr=0.5)
    other(**zoo.batch(kind)).loss.backward()
    theirs.step()
    with pytest.raises(ConfigError, match="must be the same"):
        engine.optimizer.load_state_dict(theirs.state_dict())
    after = engine.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i][k], v) for i, s in before["state"].items() for k, v in s.items())


@pytest.mark.parametrize("width", [1, 16])
def test_the_state_of_a_model_of_another_width_is_refused(width: int) -> None:
    """Trap H5: the names are the same, the parameters are not."""

    class Net(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8)])
            self.out = nn.Linear(8, width)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.out(self.layers[0](x)).square().sum()}

    def run(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 8))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    narrow, model = Net(width), Net(8)
    theirs = Reference(list(narrow.named_parameters()), lr=1e-2, weight_decay=0.1)
    run(narrow, theirs)
    with cells.closing(
        cells.prepare_by_hand(model, {"x": torch.ones(2, 8)}, spec=SPEC, weights="host", optimizer="host")
    ) as engine:
        run(model, engine.optimizer)
        with pytest.raises(ConfigError):
            engine.optimizer.load_state_dict(theirs.state_dict())


def test_step_returns_what_the_closure_returns_and_plain_step_returns_nothing(engine: Engine) -> None:
    """Trap D23."""

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        loss = engine.model(**zoo.batch("plain")).loss
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(engine.optimizer.step(closure)) > 0
    assert engine.optimizer.step() is None and engine.num_steps == 2


def test_it_is_a_torch_optimizer_with_live_groups(engine: Engine) -> None:
    """Traps D7, I4: schedulers write into the groups that the updates read."""
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    called: list[str] = []
    engine.optimizer.register_step_post_hook(lambda *_: called.append("post"))
    engine.optimizer.param_groups[0]["lr"] = 0.0
    engine.optimizer.param_groups[0]["weight_decay"] = 0.0
    before = {n: v.clone() for n, v in engine.model.state_dict().items()}
    step(engine.model, engine.optimizer)
    assert all(torch.equal(engine.model.state_dict()[n], v) for n, v in before.items()) and called == ["post"]
    engine.optimizer.param_groups[0]["lr"] = 1e-2
    step(engine.model, engine.optimizer)
    assert not any(torch.equal(engine.model.state_dict()[n], v) for n, v in before.items())


# --- behind accelerate


def test_behind_accelerates_wrapper_steps_are_the_reference_and_the_state_is_complete() -> None:
    """Trap D15."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    cell = cells.Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", strategy="recompute")
    plain = cell.model()
    reference = Reference(list(plain.named_parameters()), lr=1e-2, weight_decay=0.1)
    try:
        with cells.closing(cells.prepare(cell)) as engine:
            accelerator = accelerate.Accelerator(cpu=True)
            optimizer = accelerator.prepare(engine.optimizer)
            assert optimizer is not engine.optimizer
            for seed in range(3):
                for model, wrapped in ((plain, reference), (engine.model, optimizer)):
                    loss = model(**zoo.batch("llama", seed=seed)).loss
                    accelerator.backward(loss)
                    wrapped.step()
                    wrapped.zero_grad()
            assert engine.num_steps == 3 and not optimizer.step_was_skipped
            assert all(torch.equal(engine.model.state_dict()[n], p) for n, p in plain.named_parameters())
            found, expected = optimizer.state_dict(), reference.state_dict()
            assert found["state"].keys() == expected["state"].keys() and len(found["state"]) == len(
                list(plain.parameters())
            )
            for number, state in expected["state"].items():
                assert found["state"][number].keys() == state.keys()
                assert all(
                    torch.equal(found["state"][number][k], torch.as_tensor(v).to(found["state"][number][k].dtype))
                    for k, v in state.items()
                )
            assert [group["lr"] for group in optimizer.param_groups] == [1e-2]
            optimizer.load_state_dict(copied(found))
            assert float(engine.optimizer_state("model.norm.weight")["step"]) == 3.0
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
