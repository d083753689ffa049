"""`factors` with DTensor weights, in processes over gloo, against one process in fp64."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_osft
import torch
from published_osft import Dense, Factored, published_step
from torch.func import functional_call

import outsize
from outsize.methods.osft.sharded_split import balance

SCRIPT = Path(sharded_osft.__file__)


@pytest.fixture(
    scope="module",
    params=[
        (1, 2),
        pytest.param((1, 3), marks=pytest.mark.full),
        pytest.param((1, 4), marks=pytest.mark.full),
        pytest.param((2, 2), marks=pytest.mark.full),
    ],
    ids=["2 processes", "3 processes", "4 processes", "2 replicas of 2"],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    replicas, shards = request.param
    folder = tmp_path_factory.mktemp("sharded")
    result, errors = folder / "result.pt", [folder / f"{rank}.txt" for rank in range(replicas * shards)]
    runs, environment = [], {**os.environ, "PYTHONPATH": str(Path(outsize.__file__).parents[1])}
    for rank, log in enumerate(errors):
        arguments = [folder / "store", rank, replicas, shards, result]
        with log.open("w") as file:
            runs.append(
                subprocess.Popen(
                    [sys.executable, SCRIPT, *map(str, arguments)], stdout=file, stderr=file, env=environment
                )
            )
    try:
        codes = [run.wait(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert not any(codes), "\n".join(log.read_text()[-2000:] for log in errors)
    return torch.load(result, weights_only=True)


def reference(variant: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = sharded_osft.Model()
    numbers = dict(lr=1e-2, decay=0.1, eps=1e-3)
    ranks = {f"{name}.weight": k for name, k in sharded_osft.RANKS.items()}
    names = [name for name, _ in model.named_parameters() if variant == "mini_trainer" or name in ranks]
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    weights = [Factored(params[n], ranks[n], **numbers) if n in ranks else Dense(params[n], **numbers) for n in names]
    model = model.double()
    for step in range(sharded_osft.STEPS):
        x, y = (t.double() for t in sharded_osft.batch(step))

        def loss_of(dense: list[torch.Tensor], x=x, y=y) -> torch.Tensor:
            return ((functional_call(model, dict(zip(names, dense, strict=True)), (x,)) - y) ** 2).mean()

        published_step(weights, loss_of, variant, max_norm=0.1)
    return params | {n: w.weight(w.low) for n, w in zip(names, weights, strict=True)}


@pytest.mark.parametrize("variant", ["peft", "mini_trainer"])
def test_a_sharded_run_equals_one_process_in_fp64(found: dict[str, Any], variant: str) -> None:
    """D27: neither shards nor replicas are counted twice."""
    start = {name: p.detach().double() for name, p in sharded_osft.Model().named_parameters()}
    expected = reference(variant)
    for name, weight in found[variant]["weights"].items():
        change = expected[name] - start[name]
        if not change.any():
            assert variant == "peft" and torch.equal(weight, start[name].float()), name
            continue
        assert float((weight.double() - expected[name]).norm() / change.norm()) < 1e-4, name
    assert found[variant]["same"], "the weights of all processes, replicas too, have the same bits"
    resumed = found[variant]["resumed"]
    assert all(torch.equal(weight, resumed[name]) for name, weight in found[variant]["weights"].items())


@pytest.mark.parametrize("variant", ["peft", "mini_trainer"])
def test_projections_in_shards_remove_the_frozen_span(found: dict[str, Any], variant: str) -> None:
    """D26: with uneven rows, one frozen direction, and fewer than processes."""
    ranks = []
    for u, projected_u, frozen_u, v, projected_v, frozen_v in found[f"{variant} projected"].values():
        ranks.append(len(frozen_v))
        assert float((frozen_u.T @ u).norm() / u.norm()) > 0.2 and float((v @ frozen_v.T).norm() / v.norm()) > 0.2
        assert float((frozen_u.T @ projected_u).norm() / projected_u.norm()) < 1e-5
        assert float((projected_v @ frozen_v.T).norm() / projected_v.norm()) < 1e-5
        assert torch.allclose(projected_u, u - frozen_u @ (frozen_u.T @ u), atol=1e-5)
        assert torch.allclose(projected_v, v - v @ frozen_v.T @ frozen_v, atol=1e-5)
    assert sorted(ranks) == [1, 3, 4]


def test_what_cannot_be_sharded_is_refused(found: dict[str, Any]) -> None:
    assert found["drift"].startswith("OSFT: up.weight is a DTensor, and parametrization='drift'")
    assert found["fp32_grads"].startswith("fp32_grads: DTensor gradients are summed by FSDP")
    assert "up.weight is placed as (Shard(dim=1),)" in found["columns"]
    assert "norm.weight is not sharded, but" in found["partly"]
    assert all("square.weight has NaN or infinite values" in refused for refused in found["nan"])
    assert "square.weight: it was written" in found["written"]


@pytest.mark.parametrize("workers", [1, 3, 8, 64])
def test_decompositions_are_balanced_by_cost(workers: int) -> None:
    """D35, for the weights of an 8B model."""
    sizes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    costs = [n * m * min(n, m) for n, m in sizes] * 32
    owners = balance(costs, workers)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == w) for w in range(workers)]
    assert max(loads) <= 1.2 * sum(loads) / workers
    assert sorted(balance([5.0, 1.0], 4)) == [0, 1]
