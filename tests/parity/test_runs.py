"""Whole runs from YAML: through the command, through OutsizeTrainer, through a plain Trainer; whole, and killed and
resumed. One set of bits.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folders
import killed
import pytest
import torch
from safetensors.torch import load_file
from trainers import PlainTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from outsize.checkpoint.folder import checkpoints
from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.config.run import DatasetConfig
from outsize.data.build import load_rows
from outsize.data.collate import Collator
from outsize.device.choose import choose_device
from outsize.integrations.hf import OutsizeTrainer
from outsize.run.assemble import training_arguments
from outsize.run.compat_checks import with_packed_attention

TESTS = Path(__file__).parent.parent
PACKED = dict(sample_packing=True, sequence_len=64, max_grad_norm=1.0, warmup_steps=2)


def logged(history: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(PACKED, id="packed"),
        pytest.param({}, id="padded", marks=pytest.mark.full),
        pytest.param({"chat": True, "lr_scheduler": "linear"}, id="chat", marks=pytest.mark.full),
    ],
)
def test_one_yaml_trains_the_same_bits_through_the_command_through_our_trainer_and_through_a_plain_one(
    tmp_path: Path, keys: dict[str, Any], parity_cell: Callable[[object], None]
) -> None:
    yaml = folders.write_run(tmp_path, **keys, max_steps=5, save_steps=5)
    done = CliRunner().invoke(app, ["train", str(yaml), "--set", "device=sim:1MiB", "--set", "plan.n_persist=0"])
    assert done.exit_code == 0, done.output
    config = read_config(yaml, [f"output_dir={tmp_path / 'by-hand'}", "save_strategy=no", "save_steps=null"])
    tokenizer = AutoTokenizer.from_pretrained(config.base_model)
    train, _ = load_rows(
        tokenizer,
        [DatasetConfig(path=config.datasets[0].path)],
        sequence_len=config.sequence_len,
        pad_id=tokenizer.pad_token_id,
        sample_packing=config.sample_packing,
    )
    collator = Collator(tokenizer.pad_token_id, gives_boundaries=config.sample_packing)
    parts: dict[str, Any] = dict(train_dataset=train, data_collator=collator, processing_class=tokenizer)

    def model() -> Any:
        attention = with_packed_attention(config, choose_device("cpu")).attn_implementation
        return AutoModelForCausalLM.from_pretrained(
            config.base_model, dtype=torch.bfloat16, attn_implementation=attention
        )

    plain = PlainTrainer(model=model(), args=training_arguments(config, on_gpu=False), **parts)
    plain.train()
    ours = OutsizeTrainer(
        model=model(),
        args=training_arguments(config, on_gpu=False),
        chunk_bytes="4KiB",
        sequence_len=config.sequence_len,
        **parts,
    )
    ours.train()
    expected = plain.model.state_dict()
    by_command = json.loads((tmp_path / "out" / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]
    assert (
        logged(by_command) == logged(ours.state.log_history) == logged(plain.state.log_history)
        and len(logged(by_command)) == 5
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported and all(torch.equal(value, expected[name]) for name, value in exported.items())
    assert all(torch.equal(value, expected[name]) for name, value in ours.model.state_dict().items())
    parity_cell("command")
    parity_cell("trainer")


def in_a_copy_of_this_process(given: list[str]) -> None:
    """To start another and import torch there takes longer than the run."""
    child = os.fork()
    if not child:
        try:
            killed.main(given)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, given


PLANS = (
    ["device=sim:1MiB", "plan.n_persist=0", "plan.n_optimizer_gpu=0"],
    ["device=sim:3MiB", "plan.n_checkpoint=1", "plan.n_swap=1", "plan.n_offload=1"],
    ["device=cpu", "chunk_bytes=4KiB"],
)
KILLS = (["--at", "7"], ["--in-save", "12"], [])


def test_sixteen_steps_killed_twice_and_resumed_under_another_plan_each_time_equal_an_uninterrupted_run(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """Of sixteen steps: killed once between two checkpoints, in a process that begins as a user's does, and once in the
    middle of one, in a copy of this process.
    """
    yaml = folders.write_run(
        tmp_path,
        **{**PACKED, "sequence_len": 96},
        max_steps=16,
        save_steps=4,
        save_total_limit=2,
        auto_resume_from_checkpoints=True,
    )

    def run(name: str, *arguments: str, kill: Sequence[str] = ()) -> None:
        given = [str(yaml), str(tmp_path / f"{name}.jsonl"), *kill, *arguments, f"--set=output_dir={tmp_path / name}"]
        if not kill:
            return killed.main(given)
        if "--in-save" in kill:
            return in_a_copy_of_this_process(given)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
        done = subprocess.run(
            [sys.executable, str(TESTS / "killed.py"), *given], env=env, capture_output=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, (given, done.stderr[-2000:])

    run("whole")
    resumed_from = []
    for kill, plan in zip(KILLS, PLANS, strict=True):
        resumed_from.append(max((step for step, _ in checkpoints(tmp_path / "killed")), default=0))
        torch.manual_seed(99)  # where a process was before must not matter
        run("killed", *(f"--set={key}" for key in plan), kill=kill)
    assert resumed_from == [0, 4, 8], "the newest complete one each time; that of step 12 was killed in the middle"

    def read(name: str) -> tuple[dict[int, float], list[dict[int, list[Any]]]]:
        losses: dict[int, float] = {}
        batches: list[dict[int, list[Any]]] = []
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if "process" in entry:
                batches.append({})
            elif "loss" in entry:
                assert losses.setdefault(entry["step"], entry["loss"]) == entry["loss"], (
                    "a step that was made again is the same"
                )
            else:
                batches[-1].setdefault(entry["step"], []).append(entry["ids"])
        return losses, batches

    losses, (batches,) = read("whole")
    again, seen = read("killed")
    assert len(losses) == 16 and again == losses
    for process in seen:
        for step, ids in process.items():
            assert ids == batches[step][: len(ids)], (
                f"the samples of step {step}"
            )  # of its last step a killed process may have seen a part
    whole, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[name], broken[name]) for name in whole)
    assert [step for step, _ in checkpoints(tmp_path / "killed")] == [12, 16] and not list(
        (tmp_path / "killed").glob(".partial-*")
    )
    for _ in KILLS:
        parity_cell("killed")
