"""A run whose file has settings of Axolotl: what runs instead of them is said, and a resumed run is the same."""

import io
import logging
from pathlib import Path

import folders
import pytest
from rich.console import Console

from outsize.config.read import read_config
from outsize.run.assemble import assemble
from outsize.run.train import train_run


def test_a_run_with_settings_of_axolotl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="outsize")
    yaml = folders.write_run(
        tmp_path,
        kind="one-block",
        max_steps=None,
        num_epochs=2,
        saves_per_epoch=2,
        micro_batch_size=2,
        optimizer="adamw_bnb_8bit",
        attn_implementation="flash_attention_2",
        dataset_exact_deduplication=True,
        tf32=True,
        train_sampling_strategy="sequential",
        unfrozen_parameters=["model.layers"],
        liger_rope=True,
        wandb_project="",
    )
    data = folders.write_text(tmp_path / "data.jsonl", 16)
    data.write_text(data.read_text() * 2)
    console = Console(record=True, width=200, file=io.StringIO())
    train_run(read_config(yaml), console)
    text = console.export_text()
    assert "16 rows to train on, of at most" in text and ": 8 steps in 2 epochs." in text  # of 32 rows
    assert "note Without effect here: liger_rope (docs/axolotl.md says why)." in text
    assert "note excess_length_strategy: drop, Axolotl's default" in text
    assert "note optimizer: adamw_bnb_8bit runs as exact AdamW. Its state takes " in text
    assert "flash_attention_2 needs the package flash_attn, which is not installed: sdpa is used" in caplog.text
    # Eight steps of four rows in two epochs.
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (2, 4, 6, 8)}
    resumed = assemble(read_config(yaml, [f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-4'}"]))
    model = resumed.trainer.model
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("model.layers")
    }
