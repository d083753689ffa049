"""Wrappers that replicate or shard a prepared model, process groups, engines that are dropped, cells that are run
twice.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import foreign_plans
import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn

import outsize
from outsize.base.errors import ConfigError, EngineMisuse, ModelUnsupported


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrap_fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("wrap", "name"),
    [(wrap_ddp, "DistributedDataParallel"), (nn.DataParallel, "DataParallel"), (wrap_fsdp, "FullyShardedDataParallel")],
    ids=["ddp", "dp", "fsdp"],
)
def test_wrappers_of_a_prepared_model_are_refused(wrap: Any, name: str, one_process: Any) -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
    with pytest.raises(EngineMisuse, match=name):
        wrap(model)
    engine.detach()


def test_a_model_whose_parameters_were_exchanged_is_refused(one_process: Any) -> None:
    """fully_shard puts other parameters into the model; so does a parametrization."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def add(model: nn.Module) -> None:
        model.extra = nn.Parameter(torch.ones(1))

    def exchange(model: nn.Module) -> None:
        model.model.norm.weight = nn.Parameter(torch.ones(zoo.HIDDEN))

    def append(model: nn.Module) -> None:
        model.model.layers.append(nn.Linear(2, 2))

    def exchange_module(model: nn.Module) -> None:
        model.lm_head = nn.Linear(zoo.HIDDEN, zoo.VOCAB)

    for change, name in (
        (append, r"model.layers.4.weight"),
        (exchange_module, "lm_head.weight"),
        (lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))), "embed_tokens.weight"),
        (add, "extra"),
        (exchange, "model.norm.weight"),
    ):
        model = zoo.make("llama")
        engine = foreign_plans.prepared(model, zoo.batch("llama"), "streamed")
        change(model)
        with pytest.raises(
            EngineMisuse, match=rf"{name} is not the parameter that the model was prepared with.*detach"
        ):
            model(**zoo.batch("llama"))
        engine.close()


def test_resizing_an_embedding_is_refused() -> None:
    _, (model, engine) = foreign_plans.both("streamed")
    with pytest.raises(EngineMisuse, match=r"embed_tokens\.weight.*keeps its shape.*detach.*prepare it again"):
        model.resize_token_embeddings(zoo.VOCAB + 3)
    engine.detach()


def test_a_wrapped_model_is_refused_by_prepare(one_process: Any) -> None:
    with pytest.raises(ModelUnsupported, match=r"DistributedDataParallel.*\.module"):
        outsize.prepare(wrap_ddp(zoo.make("llama")), zoo.batch("llama"), device="cpu")
    engine = outsize.prepare(
        zoo.make("llama"), zoo.batch("llama"), device="cpu"
    )  # a group of one process is no obstacle
    engine.detach()


@pytest.fixture
def two_processes() -> Any:
    """The first process of a group of two, without the second: torch's backend for tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_two_processes_are_refused(two_processes: None) -> None:
    """Each would train on its own data and drift apart from the other."""
    with pytest.raises(EngineMisuse, match="2 processes"):
        outsize.prepare(nn.Linear(2, 2), {"input": torch.ones(1, 2)}, device="cpu")


# --- engines and notebooks

CELL = """
torch.manual_seed(0)
model = zoo.make("llama")
engine = outsize.prepare(model, zoo.batch("llama"), device=device, chunk_bytes="16KiB")
for seed in range(2):
    loss = model(**zoo.batch("llama", seed=seed)).loss
    loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
"""


@pytest.mark.parametrize("device", ["cpu", "sim:24MiB"])
def test_a_cell_that_is_run_twice_works(device: str) -> None:
    """The first engine held the whole device: 'gpu_memory 0 B is too small'."""
    names: dict[str, Any] = {"torch": torch, "outsize": outsize, "zoo": zoo, "device": device}
    exec(CELL, names)
    first, loss = names["engine"], float(names["loss"].detach())
    exec(CELL, names)
    assert float(names["loss"].detach()) == loss
    if device != "cpu":
        with pytest.raises(EngineMisuse, match=r"a later outsize\.prepare took the device's memory.*gpu_memory"):
            _ = first.plan
    names["engine"].detach()


@pytest.mark.parametrize("device", ["cpu", "sim:24MiB"])
def test_preparing_a_model_again_resumes_from_its_weights(device: str) -> None:
    model = zoo.make("llama")
    first = outsize.prepare(model, zoo.batch("llama"), device=device, chunk_bytes="16KiB")
    model(**zoo.batch("llama")).loss.backward()
    first.optimizer.step()
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    loss = model(**zoo.batch("llama")).loss  # a forward that waits for its backward is no obstacle
    second = outsize.prepare(model, zoo.batch("llama"), device=device, chunk_bytes="16KiB")
    assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items()) and loss.isfinite()
    with pytest.raises(EngineMisuse, match=r"outsize\.prepare was called again for its model"):
        first.optimizer.step()
    model(**zoo.batch("llama")).loss.backward()
    second.optimizer.step()
    second.detach()


def test_a_part_of_a_prepared_model_is_refused() -> None:
    model = zoo.make("llama")
    engine = foreign_plans.prepared(model, zoo.batch("llama"), "resident")
    with pytest.raises(EngineMisuse, match="belongs to a prepared model already"):
        outsize.prepare(model.model, {"input_ids": zoo.batch("llama")["input_ids"]}, device="cpu")
    engine.detach()


def test_an_engine_that_is_dropped_gives_its_memory_to_the_next() -> None:
    def prepare() -> Any:
        return outsize.prepare(
            zoo.make("llama"), zoo.batch("llama"), device="sim:25MiB", gpu_memory="20MiB", chunk_bytes="16KiB"
        )

    gc.disable()
    try:
        gone = weakref.ref(prepare())
        engine = prepare()
        assert gone() is None
    finally:
        gc.enable()
    engine.detach()


def test_a_full_device_is_reported_truthfully() -> None:
    first = outsize.prepare(
        zoo.make("llama"), zoo.batch("llama"), device="sim:26MiB", gpu_memory="26MiB", chunk_bytes="16KiB"
    )
    with pytest.raises(ConfigError, match=r"has no free memory: other engines hold 26\.0 MiB.*gpu_memory"):
        outsize.prepare(zoo.make("llama"), zoo.batch("llama"), device="sim:26MiB", chunk_bytes="16KiB")
    first.detach()
