"""Checkpoints and exports of quantized bases."""

from pathlib import Path
from typing import Any

import cells
import pytest
import quantized
import torch
from quantized import Quantized
from safetensors.torch import load_file
from torch import nn

import outsize
from outsize.base.errors import EngineMisuse
from outsize.model.parts import named_parts
from outsize.runtime.engine import Engine

pytest.importorskip("bitsandbytes")

NF4, TORCHAO = Quantized(quantization="nf4-double"), Quantized(quantization="torchao-int8")
BUDGET = "sim:1500KiB"


def norms_trained(case: Quantized) -> nn.Module:
    """A quantized base without adapters, of which norms are trained."""
    model = case.base().train()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    return model


def prepare(model: nn.Module, device: str = BUDGET, **how: Any) -> Engine:
    return outsize.prepare(model, quantized.batch(), optimizer=NF4.spec, device=device, chunk_bytes="16KiB", **how)


def steps(engine: Engine, count: int) -> list[float]:
    found = cells.train(engine.model, engine.optimizer, NF4.batches(), steps=count, accumulate=1, engine=engine)
    return found.losses


@pytest.mark.parametrize("case", [NF4, TORCHAO], ids=lambda case: case.quantization)
@pytest.mark.parametrize("adapted", [True, False])
def test_a_checkpoint_resumes_under_another_plan(case: Quantized, adapted: bool, tmp_path: Path) -> None:
    make = case.model if adapted else lambda: norms_trained(case)
    with cells.closing(prepare(make())) as engine:
        steps(engine, 2)
        engine.save(tmp_path / "checkpoint")
        wanted = steps(engine, 2)
        parts = dict(named_parts(engine.model))
    fresh = make()
    with torch.no_grad():
        for _, part in named_parts(fresh):
            if part.requires_grad or not adapted:  # of a PEFT model, a checkpoint has no base
                part.zero_()
    with cells.closing(prepare(fresh, "cpu")) as engine:
        engine.load(tmp_path / "checkpoint")
        assert steps(engine, 2) == wanted
    assert all(torch.equal(part, parts[name]) for name, part in named_parts(fresh))


def test_an_export_without_adapters_has_the_files_of_bitsandbytes(tmp_path: Path) -> None:
    with cells.closing(prepare(norms_trained(NF4))) as engine:
        steps(engine, 2)
        engine.export(tmp_path / "model")
    wanted = engine.model.state_dict()
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_an_export_of_weights_of_several_tensors_is_refused(tmp_path: Path) -> None:
    with (
        cells.closing(prepare(norms_trained(TORCHAO))) as engine,
        pytest.raises(EngineMisuse, match=r"export: model\.layers\.0.*is a .*Int8Tensor"),
    ):
        engine.export(tmp_path / "model")
