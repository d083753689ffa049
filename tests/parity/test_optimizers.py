"""Every optimizer trains to the bit as its class in outsize.reference, under plans that cover homes, strategies and
update modes.
"""

from collections.abc import Callable
from typing import Any

import cells
import pytest
import torch
import zoo

import outsize
from outsize import reference
from outsize.optim.spec import OptimizerSpec

OPTIMIZERS: dict[str, tuple[type[OptimizerSpec], type[reference.Optimizer], dict[str, Any]]] = {
    "sgd": (outsize.SGD, reference.SGD, dict(lr=0.05, weight_decay=0.1)),
    "momentum": (outsize.SGD, reference.SGD, dict(lr=0.02, momentum=0.9, weight_decay=0.01)),
    "nesterov": (outsize.SGD, reference.SGD, dict(lr=0.02, momentum=0.8, nesterov=True)),
    "lion": (outsize.Lion, reference.Lion, dict(lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)),
}
PLANS: list[dict[str, Any]] = [
    dict(weights="host", optimizer="host", strategy="recompute", device="sim:1GiB"),
    dict(weights="gpu", optimizer="host", strategy="offload", update="in_backward"),
    dict(weights="host", optimizer="gpu", strategy="keep", max_grad_norm=cells.MAX_GRAD_NORM),
    dict(weights="gpu", optimizer="gpu", strategy="swap", accumulate=2, fp32_grads=True),
    dict(weights="host", optimizer="host", strategy="swap", accumulate=2, max_grad_norm=cells.MAX_GRAD_NORM),
    dict(weights="host", optimizer="streamed", strategy="keep", accumulate=2, max_grad_norm=cells.MAX_GRAD_NORM),
    dict(weights="gpu", optimizer="streamed", strategy="recompute", update="in_backward", device="sim:1GiB"),
]
STEPS = 3


def train(
    model: torch.nn.Module, optimizer: Any, accumulate: int, declare: Callable[[], Any] | None = None
) -> list[float]:
    losses = []
    for step in range(STEPS):
        for number in range(accumulate):
            loss = model(**zoo.batch("llama", seed=10 * step + number)).loss
            if declare is not None:
                with declare():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("name", "plan", "dtype"),
    [  # every optimizer in both dtypes and every plan with two optimizers, by turns; the others in `make test-all`
        pytest.param(
            name,
            plan,
            dtype,
            marks=[] if (i + j + 2 * k) % 4 == 1 else [pytest.mark.full],
            id=f"{name}-{plan['weights']}-{plan['optimizer']}-{plan['strategy']}-{dtype}",
        )
        for i, name in enumerate(OPTIMIZERS)
        for j, plan in enumerate(PLANS)
        for k, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
)
def test_an_optimizer_trains_as_its_reference(
    name: str, plan: dict[str, Any], dtype: torch.dtype, parity_cell: Callable[[object], None]
) -> None:
    spec, of_reference, settings = OPTIMIZERS[name]
    how = dict(plan)
    accumulate, update = how.pop("accumulate", 1), how.pop("update", "after_step")
    common = {key: how.pop(key) for key in ("max_grad_norm", "fp32_grads") if key in how}
    plain = zoo.make("llama").to(dtype)
    plain_optimizer = of_reference(plain.parameters(), **settings, **common)
    expected = train(plain, plain_optimizer, accumulate)
    model = zoo.make("llama").to(dtype)
    engine = cells.prepare_by_hand(
        model,
        zoo.batch("llama"),
        spec=spec(**settings, **common, update=update),
        accumulate=accumulate,
        budget=None,
        **how,
    )
    with cells.closing(engine):
        declare = engine.last_backward if update == "in_backward" else None
        assert train(model, engine.optimizer, accumulate, declare) == expected
        state = engine.optimizer.state_dict()["state"]
        for number, (ours, theirs) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            kept = plain_optimizer.state[theirs]
            assert torch.equal(ours, theirs)
            assert state[number].keys() == kept.keys()
            assert all(
                torch.equal(torch.as_tensor(state[number][k]).cpu().float(), torch.as_tensor(kept[k]).float())
                for k in kept
            )
    parity_cell((name, plan, dtype))
