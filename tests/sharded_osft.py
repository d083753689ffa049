"""Trains a model whose rows are sharded by OSFT, in one of several processes:
`python tests/sharded_osft.py store rank replicas shards result.pt`.

The first process writes what all of them found.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported
from outsize.methods.osft.factors import project_u, project_v

ROWS, STEPS = 12, 6
SETTINGS: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=0.1)
RANKS = {"up": 1, "square": 4, "down": 3}
METHODS = {
    "peft": outsize.OSFT(effective_rank=1, rank_pattern=RANKS, parametrization="factors", variant="peft"),
    # int(7 * (1 - 0.8)) = 1, int(13 * 0.35) = 4, int(5 * 0.7) = 3
    "mini_trainer": outsize.OSFT(
        unfreeze_rank_ratio=0.8,
        rank_pattern={"square": 0.65, "down": 0.3},
        parametrization="factors",
        variant="mini_trainer",
    ),
}


class Model(nn.Module):
    """Rows that 2, 3 and 4 processes divide unevenly: 13, 13 and 5. Of 4 processes, one has no row of `down`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.square = nn.Linear(7, 13), nn.Linear(13, 13)
        self.norm, self.down = nn.LayerNorm(13), nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.square(torch.tanh(self.up(x))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step))
    return x, x.roll(2, 1)[:, :5]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    norms = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, y = (t[rank * ROWS // size : (rank + 1) * ROWS // size] for t in batch(step))
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return norms


def make(mesh: Any) -> nn.Module:
    model = Model()
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
    }


def of_all(value: Any) -> list[Any]:
    """The values of all processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def refusal(model: nn.Module, method: outsize.OSFT, **settings: Any) -> str:
    try:
        outsize.osft.AdamW(model, method, **settings)
    except (ConfigError, ModelUnsupported) as error:
        return str(error)
    return ""


def main(store: str, rank: int, replicas: int, shards: int, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=replicas * shards)
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh("cpu", (replicas, shards) if replicas > 1 else (shards,), mesh_dim_names=names)
    found: dict[str, Any] = {}
    for variant, method in METHODS.items():
        model = make(mesh)
        optimizer = outsize.osft.AdamW(model, method, **SETTINGS)
        norms = train(model, optimizer, range(3))
        weights, state = {n: p.to_local().clone() for n, p in model.state_dict().items()}, optimizer.state_dict()
        resumed = make(mesh)
        again = outsize.osft.AdamW(resumed, method, **SETTINGS)
        again.load_state_dict(state)
        for name, tensor in resumed.state_dict().items():
            tensor.to_local().copy_(weights[name])
        norms += train(model, optimizer, range(3, STEPS))
        train(resumed, again, range(3, STEPS))
        final = whole(model)
        same = all(torch.equal(t, every[name]) for every in of_all(final) for name, t in final.items())
        found[variant] = {"norms": norms, "weights": final, "resumed": whole(resumed), "same": all(of_all(same))}
        # Gradients that are mostly in the frozen span, projected in shards.
        projected = found[f"{variant} projected"] = {}
        for name, weight in optimizer.split_weights.items():
            size, k = weight.shape, weight.shape.frozen_rank
            generator = torch.Generator().manual_seed(1)
            u, v = (
                torch.randn(size.rows, size.rank, generator=generator),
                torch.randn(size.rank, size.columns, generator=generator),
            )
            s = weight.shards
            gathered_u, gathered_v = s.gather(weight.frozen_u, size.rows), s.gather(weight.frozen_v, k)
            u, v = u + gathered_u.sum(1, keepdim=True), v + gathered_v.sum(0)
            own_u, own_v = u[s.part(size.rows)].clone(), v[s.part(size.rank)].clone()
            project_u([own_u], [weight.frozen_u], s)
            project_v(own_v, weight.frozen_v, k, s)
            projected[name] = (u, s.gather(own_u, size.rows), gathered_u, v, s.gather(own_v, size.rank), gathered_v)
    drift = outsize.OSFT(unfreeze_rank_ratio=0.5)
    model = make(mesh)
    found["drift"] = refusal(model, drift)
    found["fp32_grads"] = refusal(model, METHODS["peft"], fp32_grads=True)
    partly = Model()
    fully_shard(partly, mesh=mesh, ignored_params={partly.norm.weight})
    found["partly"] = refusal(partly, METHODS["mini_trainer"])
    # The first process alone has a value that is not finite, and the others must not wait for it.
    damaged = make(mesh)
    if rank == 0:
        with torch.no_grad():
            damaged.square.weight.to_local()[0, 0] = torch.nan
    found["nan"] = of_all(refusal(damaged, METHODS["peft"]))
    written = make(mesh)
    optimizer = outsize.osft.AdamW(written, METHODS["peft"], **SETTINGS)
    with torch.no_grad():
        written.square.weight.to_local().mul_(2)
    try:
        train(written, optimizer, range(1))
    except EngineMisuse as error:
        found["written"] = str(error)
    columns = Model()
    whole_mesh = init_device_mesh("cpu", (replicas * shards,))
    columns.up.weight = nn.Parameter(distribute_tensor(columns.up.weight.detach(), whole_mesh, [Shard(1)]))
    found["columns"] = refusal(columns, METHODS["peft"])
    if rank == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), str(Path(sys.argv[5])))
