"""OSFT on CUDA: every plan has the bits of `outsize.osft.AdamW` in a plain loop on the same GPU, and products have the
precision that they have on the CPU.

Run with CUBLAS_WORKSPACE_CONFIG=:4096:8, as torch's deterministic mode asks for.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import zoo
from cells import CHUNK_BYTES, Cell, Outcome, closing
from torch import Tensor

import outsize
from outsize.methods.osft.bases import Bases, split
from outsize.methods.osft.products import contract, merge, spread
from outsize.model.tensors import map_tensors
from outsize.runtime.engine import Engine

pytestmark = pytest.mark.gpu
HOST: dict[str, Any] = dict(weights="host", optimizer="host")
PLANS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": dict(**HOST, strategy="recompute"),
    "host-state": dict(optimizer="host", clip=True, accumulate=2),
    "in-backward": dict(**HOST, strategy="offload", update="in_backward"),
    "streamed-state": dict(weights="host", optimizer="streamed", strategy="swap", clip=True),
    "gpu-state": dict(weights="host", optimizer="gpu", accumulate=2, depth=2),
}
CELLS = [
    Cell(kind=kind, dtype=dtype, osft=0.5, **plan)  # type: ignore[arg-type]
    for kind, dtype, plans in (
        ("plain", "bf16", PLANS),
        ("plain", "fp32", ("resident", "streamed", "host-state")),
        ("gpt2", "bf16", ("resident", "streamed-state")),
        ("mixtral", "bf16", ("streamed", "host-state")),
        ("looped", "bf16", ("resident", "streamed")),
    )
    for plan in (PLANS[name] for name in plans)
]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    matmul = torch.backends.cuda.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "tf32"  # products of OSFT must not use it
    yield
    matmul.fp32_precision = precision
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def on(device: str, values: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), values)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_plans_equal_the_plain_loop(cell: Cell) -> None:
    data = on("cuda", cells.batches(cell.kind, 3))
    how: dict[str, Any] = dict(spec=cell.spec, accumulate=cell.accumulate, method=cell.method)
    expected = cells.plain(cell.model().cuda(), data, **how)
    found = cells.run(cell, "cuda")
    for outcome in (expected, found):
        outcome.weights, outcome.state = on("cpu", outcome.weights), on("cpu", outcome.state)
    cells.assert_same(found, expected)


def projectors(bases: Bases) -> tuple[Tensor, Tensor]:
    """On the frozen directions of the smaller and of the larger side, in fp64."""
    free, frozen = bases.free.double(), bases.frozen.double()
    if bases.free_lo is not None and bases.frozen_lo is not None:
        free, frozen = free + bases.free_lo.double(), frozen + bases.frozen_lo.double()
    span = torch.linalg.qr(frozen.T)[0]
    return torch.eye(len(free), device="cuda").double() - free @ free.T, span @ span.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(512, 1792), (1024, 1024), (1792, 512)])
def test_precision_of_products(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, dense = (torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2))
    bases = split(weight, 256)
    shape = bases.shape
    small, large = projectors(bases)
    wide = dense.double().T if shape.is_mirrored else dense.double()
    exact = bases.free.double().T @ wide @ (torch.eye(len(large), device="cuda").double() - large)
    gradient = torch.empty(shape.drift, device="cuda")
    scratch = torch.full((shape.contract_scratch_bytes(weight.itemsize, accumulate=True),), 255, dtype=torch.uint8)
    scratch = scratch.cuda()
    contract(dense, bases, out=gradient, scratch=scratch)
    found = (gradient.T if shape.is_mirrored else gradient).double()
    assert (found - exact).norm() < {torch.bfloat16: 1e-2, torch.float32: 1e-5}[dtype] * exact.norm()
    total = gradient.clone()
    contract(dense, bases, out=total, scratch=scratch, accumulate=True)
    assert torch.equal(total, gradient + gradient)

    drift = torch.randn(shape.drift, device="cuda")
    change = spread(drift, bases).double()
    change = change.T if shape.is_mirrored else change
    for leaked in (small @ change, change @ large):
        assert leaked.norm() < 1e-5 * change.norm()
    merged, master = torch.empty_like(weight), torch.empty(rows, columns, device="cuda")
    workspace = torch.full((shape.merge_scratch_bytes(weight.itemsize),), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    merge(weight, drift, bases, out=merged, scratch=workspace)
    contract(dense, bases, out=gradient, scratch=scratch)
    assert torch.cuda.max_memory_allocated() == before, "products allocate nothing beside the workspace"
    merge(weight, drift, bases, out=master, scratch=workspace)
    assert torch.equal(master.to(dtype), merged)
    merge(weight, torch.zeros_like(drift), bases, out=merged, scratch=workspace)
    assert torch.equal(merged, weight), "a drift of zeros is the checkpoint"


def prepare(pins: outsize.Pins | None = None) -> Engine:
    return outsize.prepare(
        zoo.make("plain", torch.bfloat16),
        zoo.batch("plain"),
        optimizer=outsize.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05),
        method=outsize.OSFT(unfreeze_rank_ratio=0.5),
        device="cuda",
        gpu_memory="4GiB",
        pins=pins,
        chunk_bytes=CHUNK_BYTES,
    )


def train(engine: Engine, seeds: list[int]) -> list[float]:
    losses = []
    for seed in seeds:
        loss = engine.model(**zoo.batch("plain", seed=seed)).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    with engine.gathered() as found:
        return {name: value.detach().cpu().clone() for name, value in found.items()}


def test_resume_and_the_next_task_under_another_plan(tmp_path: Path) -> None:
    streamed = outsize.Pins(n_persist=0, n_buffer=1, n_optimizer_gpu=0, n_optimizer_streamed=0)
    mixed = outsize.Pins(n_persist=4, n_optimizer_gpu=4, n_optimizer_streamed=3)
    with closing(prepare()) as engine:
        expected = [*train(engine, [0, 1, 2])]
        engine.next_task()
        expected += train(engine, [3, 4])
        final = weights(engine)
    with closing(prepare(streamed)) as engine:
        found = train(engine, [0, 1])
        engine.save(tmp_path / "checkpoint", background=True)
        engine.finish_saving()
    with closing(prepare(mixed)) as engine:
        engine.load(tmp_path / "checkpoint")
        found += train(engine, [2])
        engine.next_task()
        found += train(engine, [3, 4])
        assert found == expected
        for name, value in weights(engine).items():
            assert torch.equal(value, final[name]), name


def test_all_directions_free_is_full_fine_tuning() -> None:
    cell = Cell(kind="plain", dtype="bf16", clip=True, **HOST)
    full, free = (cells.run(dataclasses.replace(cell, osft=osft), "cuda") for osft in (None, 1.0))
    assert isinstance(full, Outcome) and free.losses == full.losses
    for name, value in full.weights.items():
        assert torch.equal(free.weights[name], value), name
