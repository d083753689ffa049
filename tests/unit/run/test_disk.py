"""The disk space of a run is compared with what is free before its first step."""

import io
import logging
import shutil
from pathlib import Path
from typing import Any

import folders
import pytest
from rich.console import Console
from safetensors.torch import load_file

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.config.run import RunConfig
from outsize.optim.adamw import AdamW
from outsize.run.assemble import assemble
from outsize.run.disk import DiskNeed, disk_need, require_disk_space
from outsize.run.train import train_run

KiB = 2**10


def size_of(folder: Path) -> int:
    """Of the weights and the optimizer state, without file headers."""
    files = [path for path in folder.glob("*.safetensors") if path.name != "rng.safetensors"]
    return sum(tensor.nbytes for path in files for tensor in load_file(path).values())


@pytest.mark.parametrize("keys", [{}, {"adapter": "lora", "lora_r": 2, "lora_target_linear": True}])
def test_the_needed_space_is_that_of_the_files(tmp_path: Path, keys: dict[str, Any]) -> None:
    yaml = folders.write_run(tmp_path, kind="one-block", max_steps=3, save_steps=2, **keys)
    config = read_config(yaml)
    trainer = assemble(config).trainer
    need = disk_need(trainer.model, trainer.args, AdamW().rule.layout, None, 3)
    train_run(config, Console(file=io.StringIO()))
    written = [size_of(path) for path in (tmp_path / "out").glob("checkpoint-*")]
    assert need.saves == len(written) == 2
    assert set(written) == {need.checkpoint_bytes}
    assert need.result_bytes == size_of(tmp_path / "out")
    assert need.total(None) == 2 * need.checkpoint_bytes + need.result_bytes == need.total(1)


def test_a_run_that_cannot_save_is_refused_and_one_that_can_save_less_is_told_how_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, free))  # type: ignore[attr-defined]
    config = RunConfig(base_model="", datasets=(), output_dir=str(tmp_path))
    need = DiskNeed(checkpoint_bytes=60 * KiB, result_bytes=10 * KiB, saves=5)
    free = 69 * KiB
    with pytest.raises(ConfigError, match=r"69.0 KiB free, but a checkpoint takes 60.0 KiB and the result takes 10.0"):
        require_disk_space(need, config)
    free = 200 * KiB
    with caplog.at_level(logging.WARNING, "outsize"):
        require_disk_space(need, config)
    assert "5 checkpoints of 60.0 KiB and the result take 310 KiB" in caplog.text
    assert "Set save_total_limit: 2." in caplog.text
    caplog.clear()
    free = 310 * KiB
    require_disk_space(need, config)
    assert caplog.text == ""
