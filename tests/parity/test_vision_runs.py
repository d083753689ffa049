"""Conversations with images from YAML: the losses and weights of a plain Trainer over the processor's own batches."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_folders
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from trainers import PlainTrainer
from transformers import AutoModelForImageTextToText, AutoProcessor, set_seed
from typer.testing import CliRunner

import outsize
from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.run.assemble import training_arguments

LORA = dict(adapter="lora", lora_r=2, lora_alpha=4, lora_target_linear=True, lora_dropout=0.1)
PLANS = {
    "cpu": ["device=cpu"],
    "streamed": ["device=sim:3MiB", "plan.n_persist=0", "plan.n_optimizer_gpu=0"],
    "mixed": ["device=sim:3MiB", "plan.n_persist=1", "plan.n_checkpoint=1", "plan.n_offload=1"],
}
OPENS = {
    "llava": "ASSISTANT: ",
    "qwen": "<|im_start|>assistant\n",
    "idefics3": "<|im_start|>assistant\n",
    "gemma3": "<|im_start|>assistant\n",
}
"""What comes before the answer, which is the end of every row."""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + result.stderr
    return result.output


def in_parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    user, answer = row["messages"]
    content = user["content"]
    if isinstance(content, str):
        images = row.get("images", [])
        text = content.removeprefix("<image>\n" * len(images))
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    content = [{"type": "image"} if part["type"] == "image" else part for part in content]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]},
    ]


def collate(kind: str, processor: Any, folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As somebody would write it who knows these rows."""
    texts = [processor.apply_chat_template(in_parts(row)) for row in rows]
    names = [
        row.get("images") or [part["path"] for part in row["messages"][0]["content"] if "path" in part] for row in rows
    ]
    images = [[Image.open(folder / name).convert("RGB") for name in one] for one in names]
    batch = processor(
        text=texts,
        images=images if any(images) else None,
        padding=True,
        padding_side="right",
        return_tensors="pt",
        add_special_tokens=kind != "gemma3",  # its template has them
    )
    opening = processor.tokenizer(OPENS[kind], add_special_tokens=False)["input_ids"]
    labels = torch.full_like(batch["input_ids"], -100)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        start = next(n for n in range(len(ids)) if ids[n - len(opening) : n] == opening)
        end = int(batch["attention_mask"][row].sum())
        labels[row, start:end] = batch["input_ids"][row, start:end]
    return {**batch, "labels": labels}


def history(folder: Path, step: int) -> list[float]:
    log = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


@pytest.mark.parametrize(
    ("kind", "keys", "plans"),
    [
        pytest.param("llava", {}, ["streamed"], id="llava"),
        pytest.param("qwen", LORA, ["streamed"], id="qwen-lora"),
        pytest.param("llava", {}, ["cpu", "mixed"], id="llava-more", marks=pytest.mark.full),
        pytest.param("qwen", {}, ["cpu", "mixed"], id="qwen", marks=pytest.mark.full),
        pytest.param("idefics3", {}, ["cpu", "streamed"], id="idefics3", marks=pytest.mark.full),
        pytest.param("gemma3", {}, ["streamed"], id="gemma3", marks=pytest.mark.full),
        pytest.param("idefics3", LORA, ["mixed"], id="idefics3-lora", marks=pytest.mark.full),
    ],
)
def test_a_run_equals_a_plain_trainer_over_the_processors_own_batches(
    tmp_path: Path, kind: str, keys: dict[str, Any], plans: list[str], parity_cell: Callable[[object], None]
) -> None:
    yaml = vision_folders.write_run(tmp_path, kind, max_grad_norm=1.0, **keys)
    config = read_config(yaml, [f"output_dir={tmp_path / 'plain'}", "save_strategy=no"])
    processor = AutoProcessor.from_pretrained(config.base_model)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    set_seed(config.seed)
    model = AutoModelForImageTextToText.from_pretrained(config.base_model, dtype=torch.bfloat16)
    if keys:
        settings = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
        model = outsize.fuse_lora(get_peft_model(model, settings, autocast_adapter_dtype=False))
    plain = PlainTrainer(
        model=model,
        args=training_arguments(config, on_gpu=False),
        train_dataset=rows,
        data_collator=lambda batch: collate(kind, processor, tmp_path, batch),
    )
    plain.train()
    plain.save_model()
    file = "adapter_model.safetensors" if keys else "model.safetensors"
    expected = load_file(tmp_path / "plain" / file)
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert len(set(losses)) == 4
    for name in plans:
        out = tmp_path / f"out-{name}"
        given = [f"output_dir={out}", *PLANS[name]]
        shown = run("train", str(yaml), *(x for key in given for x in ("--set", key)))
        saved = load_file(out / file)
        assert history(out, 4) == losses, shown
        assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in saved)
        assert type(AutoProcessor.from_pretrained(out)) is type(processor)
        assert f'processor = AutoProcessor.from_pretrained("{out}")' in shown.replace("\n", "")
        parity_cell((kind, name))


def test_a_run_with_images_resumes_to_the_same_bits_and_refuses_other_images(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    evaluated = vision_folders.write_chats(tmp_path, 4, name="eval.jsonl")
    yaml = vision_folders.write_run(
        tmp_path, save_steps=2, test_datasets=[str(evaluated)], eval_steps=2, dataloader_num_workers=1
    )
    run("train", str(yaml), "--set", "device=sim:3MiB")
    half = tmp_path / "out" / "checkpoint-2"
    resumed = [
        "train",
        str(yaml),
        "--set",
        f"resume_from_checkpoint={half}",
        "--set",
        f"output_dir={tmp_path / 'again'}",
    ]
    run(*resumed)
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert history(tmp_path / "again", 4) == history(tmp_path / "out", 4)
    log = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [2, 4]
    parity_cell("resumed")
    vision_folders.picture(16, 16, seed=99).save(tmp_path / "1-0.png")
    refused = CliRunner().invoke(app, resumed)
    assert refused.exit_code != 0 and "the content of" in refused.output + refused.stderr
