"""Checkpoints and whole runs on a real GPU: the bits of an uninterrupted run, whatever lives where."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import outsize
from outsize.cli.main import app
from outsize.runtime.engine import Engine

pytestmark = pytest.mark.gpu

PLANS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"pins": outsize.Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0, n_offload=2)},
    "on the GPU, weights streamed": {"pins": outsize.Pins(n_persist=0, n_optimizer_gpu=10, n_checkpoint=2)},
    "state streamed": {"pins": outsize.Pins(n_persist=4, n_optimizer_gpu=0, n_optimizer_streamed=10)},
    "weights on the GPU, updated on the host": {
        "pins": outsize.Pins(n_persist=8, n_optimizer_gpu=0, n_optimizer_streamed=0)
    },
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
        use_cache=False,
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 2048, (2, 128), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def prepare(seed: int, plan: str, **settings: Any) -> Engine:
    spec = outsize.AdamW(lr=1e-3, max_grad_norm=1.0)
    return outsize.prepare(
        model(seed),
        batch(0),
        optimizer=spec,
        device="cuda",
        gpu_memory="8GiB",
        chunk_bytes="1MiB",
        **PLANS[plan],
        **settings,
    )


def train(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine.model(**batch(step)).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("saved", PLANS)
def test_a_save_in_the_background_continues_under_every_other_plan_to_the_same_bits(tmp_path: Path, saved: str) -> None:
    engine = prepare(0, saved)
    losses = train(engine, 0, 2)
    engine.save(tmp_path / "checkpoint", background=True)
    losses += train(engine, 2, 4)
    engine.finish_saving()
    with engine.gathered() as values:
        expected = dict(values)
    engine.close()
    for loaded in PLANS:
        other = prepare(7, loaded)
        other.load(tmp_path / "checkpoint")
        assert train(other, 2, 4) == losses[2:], (saved, loaded)
        with other.gathered() as values:
            assert all(torch.equal(values[name], expected[name]) for name in expected), (saved, loaded)
        other.close()


def test_weights_are_streamed_from_files_to_every_home_and_exported_from_there(tmp_path: Path) -> None:
    from accelerate import init_empty_weights

    plain = model(3)
    plain.save_pretrained(tmp_path / "model")
    for plan in PLANS:
        with init_empty_weights(include_buffers=False):
            empty = model(4)
        engine = outsize.prepare(
            empty,
            batch(0),
            weights=tmp_path / "model",
            device="cuda",
            gpu_memory="8GiB",
            chunk_bytes="1MiB",
            **PLANS[plan],
        )
        engine.export(tmp_path / plan)
        assert (tmp_path / plan / "model.safetensors").read_bytes() == (
            tmp_path / "model" / "model.safetensors"
        ).read_bytes()
        engine.close()


def test_a_run_from_yaml_continues_under_another_budget_and_plan_to_the_same_bits(tmp_path: Path) -> None:
    yaml = folders.write_run(
        tmp_path, sample_packing=True, save_steps=2, full_determinism=True, device="cuda", gpu_memory="2GiB"
    )
    other = [
        f"resume_from_checkpoint={tmp_path / 'whole' / 'checkpoint-2'}",
        "gpu_memory=3GiB",
        "plan.n_persist=0",
        "plan.n_optimizer_gpu=0",
    ]
    for keys in ([f"output_dir={tmp_path / 'whole'}"], other):
        result = CliRunner().invoke(app, ["train", str(yaml), *(x for key in keys for x in ("--set", key))])
        assert result.exit_code == 0, result.output
    whole, resumed = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == resumed.read_bytes()
