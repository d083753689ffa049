"""Runs with `rl: dpo`: the bits of TRL's plain DPOTrainer, which reads and tokenizes the same file itself."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import trainers
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import outsize
from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.run.assemble import assemble, training_arguments
from outsize.run.plan import plan_request
from outsize.run.train import preview_run, train_run

trl, datasets, peft = (pytest.importorskip(name) for name in ("trl", "datasets", "peft"))

STREAMED = ["device=sim:16MiB", "plan.n_persist=0", "plan.n_optimizer_gpu=0"]
LORA = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports its use to the hub, but not from CI."""
    monkeypatch.setenv("CI", "1")


def write_run(folder: Path, **keys: Any) -> Path:
    """A run of four steps on twelve pairs of messages."""
    texts = folders.sentences(36, words=2)
    speak = lambda role, text: [{"role": role, "content": text}]
    rows = [
        {"prompt": speak("user", q), "chosen": speak("assistant", a), "rejected": speak("assistant", b)}
        for q, a, b in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"rl": "dpo", "rl_beta": 0.2, "datasets": [str(data)], "sequence_len": 64, "save_steps": 2}
    return folders.write_run(folder, **{**given, **keys})


def train(yaml: Path, *changes: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, the exported tensors, and what was printed."""
    config = read_config(yaml, changes)
    console = Console(record=True, width=200, file=io.StringIO())
    outcome = train_run(config, console)
    (file,) = Path(config.output_dir).glob("*model.safetensors")
    return [loss for _, loss in outcome.losses], load_file(file), console.export_text()


def plain(yaml: Path, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """TRL's own trainer with the reference optimizer, on the rows as the file has them."""
    config = read_config(yaml, [f"output_dir={folder / 'plain'}", "save_strategy=no", "save_steps=null"])
    set_seed(config.seed)
    model = AutoModelForCausalLM.from_pretrained(config.base_model, dtype=torch.bfloat16)
    if config.adapter is not None:
        settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = outsize.fuse_lora(peft.get_peft_model(model, settings, autocast_adapter_dtype=False))
    rows = [json.loads(line) for line in Path(config.datasets[0].path).read_text().splitlines()]
    trainer: Any = type("Plain", (trainers.WithReference, trl.DPOTrainer), {})(
        model=model,
        args=training_arguments(config, on_gpu=False),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(config.base_model),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if config.adapter is not None:
        weights = peft.get_peft_model_state_dict(trainer.model)
    else:
        weights = {name: value for name, value in trainer.model.state_dict().items()}
    return losses, weights, trainer


@pytest.mark.parametrize(
    ("keys", "plan"),
    [
        pytest.param({}, STREAMED, id="whole"),
        pytest.param(LORA, STREAMED, id="lora"),
        pytest.param({"dpo_loss_type": ["ipo", "sft"]}, ["device=cpu"], id="losses", marks=pytest.mark.full),
    ],
)
def test_a_run_equals_plain_trl_and_resumes_to_the_same_bits(
    tmp_path: Path, keys: dict[str, Any], plan: list[str], parity_cell: Callable[[object], None]
) -> None:
    yaml = write_run(tmp_path, **keys)
    expected, weights, reference = plain(yaml, tmp_path)
    assembled = assemble(read_config(yaml))
    assert (assembled.num_rows, assembled.trainer.train_dataset.column_names) == (
        12,
        ["prompt_ids", "chosen_ids", "rejected_ids"],
    )
    for ours, theirs in zip(assembled.trainer.train_dataset, reference.train_dataset, strict=True):
        assert ours == {name: theirs[name] for name in ours}
    losses, exported, _ = train(yaml, *plan)
    assert losses == expected and len(set(losses)) == 4
    assert exported and all(torch.equal(value, weights[name]) for name, value in exported.items())
    if keys != LORA:
        parity_cell(("dpo", *keys))
        return
    resumed, again, _ = train(yaml, "device=cpu", f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-2'}")
    assert resumed == expected[2:]
    assert all(torch.equal(value, again[name]) for name, value in exported.items())
    assert not (tmp_path / "out" / "checkpoint-2" / "ref").exists() and not any("ref" in name for name in exported)
    parity_cell(("dpo", "lora"))
    parity_cell(("dpo", "resumed"))


def test_a_full_run_resumes_with_the_reference_of_its_beginning(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """Its evaluation data are pairs too, and the micro-batch is chosen beside the reference."""
    split = {"batch_size": 2, "micro_batch_size": None, "gradient_accumulation_steps": None}
    yaml = write_run(tmp_path, **split, val_set_size=4, eval_steps=2, max_steps=3)
    losses, exported, text = train(yaml, "device=sim:16MiB")
    assert "8 pairs to train on, 4 to evaluate on" in text and text.count("eval loss") == 2
    assert "the reference model has" in text and "split micro-batches" in text
    resumed, again, _ = train(yaml, *STREAMED, f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-2'}")
    assert resumed == losses[2:] and all(torch.equal(value, again[name]) for name, value in exported.items())
    parity_cell(("dpo", "resumed full"))
    yaml.write_text(yaml.read_text().replace("rl_beta: 0.2", "rl_beta: 0.3"))
    with pytest.raises(ConfigError, match=r"rl_beta was 0\.2 and is 0\.3\. It cannot be changed on resume"):
        assemble(read_config(yaml, ["resume_from_checkpoint=true"]))


def test_a_run_is_planned_before_it_is_made(tmp_path: Path) -> None:
    yaml = write_run(tmp_path)
    console = Console(record=True, width=200, file=io.StringIO())
    planned = preview_run(read_config(yaml, ["device=sim:16MiB"]), console)
    text = console.export_text()
    assert planned.plan.inputs["completion_mask"] == planned.plan.inputs["input_ids"] == (4, 53)
    assert "also  the reference model has " in text
    for keys, said in (({}, "its weights take"), (LORA, "is the base model")):
        found = plan_request(read_config(write_run(tmp_path, **keys)), "64MiB")
        assert found.request.batch_of is not None and found.filled == 1
        assert found.request.batch_of(2)["input_ids"].shape == (4, 53)
        assert found.notes[-1].startswith("rl: dpo: a pair is planned as two rows") and said in found.notes[-1]
        assert (found.request.reserved_host_bytes > 60_000) == (not keys)


def test_without_trl_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match=r"rl: dpo needs trl, .* pip install 'outsize\[rl\]'"):
        assemble(read_config(yaml))
    assert plan_request(read_config(yaml), "64MiB").notes[-1].startswith("rl: dpo: a pair is planned as two rows")


def test_the_head_cannot_be_trained_beside_an_adapter(tmp_path: Path) -> None:
    yaml = write_run(tmp_path, **LORA, lora_modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"lora_modules_to_save: the loss of rl: dpo reads the weight of the output"):
        assemble(read_config(yaml))
