"""What is trained may change after prepare: parameters are frozen and unfrozen, and groups are added, as in a plain
loop.
"""

from typing import Any

import pytest
import torch
import zoo
from torch import nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, PlanInfeasible
from outsize.reference import AdamW as Reference

KIND = "llama-untied"
BATCH = zoo.batch(KIND)


def freeze(model: nn.Module) -> nn.Module:
    """All but the head."""
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def prepare(model: nn.Module, gpu_memory: str | int, **how: Any) -> Any:
    return outsize.prepare(
        model,
        BATCH,
        device="sim:64MiB",
        gpu_memory=gpu_memory,
        chunk_bytes="16KiB",
        **{"optimizer": outsize.AdamW(lr=1e-2), **how},
    )


def least(model: nn.Module) -> int:
    with pytest.raises(PlanInfeasible) as caught:
        prepare(model, 1)
    return caught.value.needed_bytes


def steps(model: nn.Module, optimizer: Any, count: int = 2) -> list[float]:
    losses = []
    for i in range(count):
        loss = model(**zoo.batch(KIND, seed=i)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(model: nn.Module, engine: Any, plain: nn.Module, optimizer: Any) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    theirs = {name: param for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        if optimizer.state.get(theirs[name]):
            for key, value in optimizer.state[theirs[name]].items():
                assert torch.equal(
                    engine.optimizer.state[param][key],
                    torch.as_tensor(value, dtype=engine.optimizer.state[param][key].dtype),
                ), (name, key)
    engine.detach()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("room", ["tight", "roomy"])
def test_progressive_unfreezing_plans_again_and_keeps_the_state(room: str) -> None:
    """One optimizer over all parameters, of which those below the head are unfrozen by and by; some are frozen
    again.
    """

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps(model, optimizer)
        model.model.layers[-1].requires_grad_(True)
        losses += steps(model, optimizer)
        model.lm_head.requires_grad_(False)
        model.model.requires_grad_(True)
        losses += steps(model, optimizer)
        model.requires_grad_(True)
        return losses + steps(model, optimizer)

    plain = freeze(zoo.make(KIND))
    optimizer = Reference(plain.named_parameters(), lr=1e-2)
    expected = loop(plain, optimizer)
    model = freeze(zoo.make(KIND))
    engine = prepare(model, least(zoo.make(KIND)) if room == "tight" else "32MiB")
    assert loop(model, engine.optimizer) == expected
    assert engine.device.peak_bytes <= engine.plan.gpu_budget_bytes
    assert_equal(model, engine, plain, optimizer)


def test_gradients_that_wait_are_carried_over_and_schedulers_go_on() -> None:
    def loop(model: nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        steps(model, optimizer)
        scheduler.step()
        model(**BATCH).loss.backward()
        model.model.layers[0].requires_grad_(True)
        model(**zoo.batch(KIND, seed=5)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        steps(model, optimizer)

    plain = freeze(zoo.make(KIND))
    optimizer = Reference(plain.named_parameters(), lr=1e-2)
    loop(plain, optimizer)
    model = freeze(zoo.make(KIND))
    engine = prepare(model, "32MiB")
    loop(model, engine.optimizer)
    assert_equal(model, engine, plain, optimizer)


def test_groups_say_how_an_unfrozen_parameter_is_trained() -> None:
    """Groups of AdamW may name frozen parameters; others are added with add_param_group, as in torch."""

    def loop(model: nn.Module, optimizer: Any) -> None:
        steps(model, optimizer)
        model.model.norm.requires_grad_(True)
        steps(model, optimizer)
        model.model.layers[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.model.layers[1].parameters()), "lr": 3e-3})
        steps(model, optimizer)

    plain = freeze(zoo.make(KIND))
    optimizer = Reference(
        [{"params": [plain.model.norm.weight], "weight_decay": 0.0}, {"params": [plain.lm_head.weight]}], lr=1e-2
    )
    loop(plain, optimizer)
    model = freeze(zoo.make(KIND))
    spec = outsize.AdamW(lr=1e-2, groups=[{"params": ["model.norm.weight"], "weight_decay": 0.0}])
    engine = prepare(model, "32MiB", optimizer=spec)
    loop(model, engine.optimizer)
    assert len(engine.optimizer.param_groups) == 3
    assert_equal(model, engine, plain, optimizer)


def test_an_unfrozen_parameter_that_no_group_has_is_refused_and_nothing_is_lost() -> None:
    model = freeze(zoo.make(KIND))
    engine = prepare(model, "32MiB", optimizer=outsize.AdamW(groups=[{"params": ["lm_head.weight"]}]))
    steps(model, engine.optimizer)
    model.model.norm.requires_grad_(True)
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight: it was frozen when .* give it to engine\.optimizer\.add_param_group"
    ):
        model(**BATCH)
    model.model.norm.requires_grad_(False)
    steps(model, engine.optimizer)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is in a group already"):
        engine.optimizer.add_param_group({"params": model.lm_head.parameters()})
    with pytest.raises(ConfigError, match="not the prepared model's"):
        engine.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    engine.detach()


def test_without_room_for_what_is_unfrozen_the_old_plan_stays() -> None:
    model = freeze(zoo.make(KIND))
    engine = prepare(model, least(freeze(zoo.make(KIND))))
    first = steps(model, engine.optimizer)
    model.requires_grad_(True)
    with pytest.raises(PlanInfeasible):
        model(**BATCH)
    freeze(model)
    again = steps(model, engine.optimizer)
    plain = freeze(zoo.make(KIND))
    optimizer = Reference([plain.lm_head.weight], lr=1e-2)
    assert first + again == steps(plain, optimizer) + steps(plain, optimizer)
    assert_equal(model, engine, plain, optimizer)


def test_a_parameter_that_would_change_its_dtype_is_not_unfrozen() -> None:
    model = freeze(zoo.make(KIND))
    model.model.layers[0].mlp.half().register_forward_pre_hook(lambda module, args: tuple(x.half() for x in args))
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out.float())
    engine = prepare(model, "32MiB")
    steps(model, engine.optimizer)
    model.requires_grad_(True)
    with pytest.raises(
        EngineMisuse,
        match=r"proj\.weight was unfrozen, but it is float16, .* Call engine\.detach\(\) and prepare the model again",
    ):
        model(**BATCH)
    engine.detach()
