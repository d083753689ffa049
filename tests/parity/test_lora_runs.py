"""LoRA from YAML, with the base streamed from its files: the bits of plain PEFT, PEFT's own files, and a merged model
that speaks the same.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import zoo
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from trainers import PlainTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from typer.testing import CliRunner

import outsize
from outsize.checkpoint.folder import checkpoints
from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.config.run import DatasetConfig
from outsize.data.build import load_rows
from outsize.data.collate import Collator
from outsize.run.assemble import training_arguments

KERNELS = {"lora_mlp_kernel": "mlp", "lora_qkv_kernel": "qkv", "lora_o_kernel": "o"}
CASES: dict[str, dict[str, Any]] = {
    "lora": dict(lora_target_linear=True, lora_dropout=0.1),
    "rslora": dict(lora_target_modules=["q_proj", "down_proj"], peft_use_rslora=True),
    "dora": dict(lora_target_modules=["v_proj"], peft_use_dora=True),
    "head": dict(lora_target_modules=["v_proj"], lora_modules_to_save=["lm_head"], kind="llama-untied"),
    "fp32": dict(lora_target_modules=["q_proj"], lora_fp32=True),
    "mlp": dict(lora_target_linear=True, lora_qkv_kernel=False, lora_o_kernel=False),
    "unfused": dict(lora_target_linear=True, lora_dropout=0.1, **dict.fromkeys(KERNELS, False)),
}
PLANS = (
    ["device=cpu"],
    ["device=sim:1MiB", "plan.n_persist=0"],
    ["device=sim:1MiB", "plan.n_checkpoint=2", "plan.n_offload=1", "chunk_bytes=4KiB"],
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + result.stderr
    return result.output


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        *(
            pytest.param(
                case,
                PLANS[1:] if case == "lora" else PLANS[i % 3 :][:1],
                marks=pytest.mark.full if case in ("rslora", "mlp") else [],
            )
            for i, case in enumerate(CASES)
        ),
        *(pytest.param(case, PLANS, marks=pytest.mark.full, id=f"{case}-every-plan") for case in CASES),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}",
)
def test_a_run_equals_plain_peft_under_its_plans_and_its_files_are_pefts(
    tmp_path: Path, case: str, plans: Sequence[list[str]], parity_cell: Callable[[object], None]
) -> None:
    yaml = folders.write_run(tmp_path, **CASES[case], adapter="lora", lora_r=2, lora_alpha=4, max_steps=3, chat=True)
    config = read_config(yaml, [f"output_dir={tmp_path / 'plain'}", "save_strategy=no"])
    tokenizer = AutoTokenizer.from_pretrained(config.base_model)
    train, _ = load_rows(
        tokenizer,
        [DatasetConfig(path=config.datasets[0].path)],
        sequence_len=config.sequence_len,
        pad_id=tokenizer.pad_token_id,
    )
    set_seed(config.seed)
    settings = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if config.lora_target_linear else list(config.lora_target_modules),
        modules_to_save=list(config.lora_modules_to_save) or None,
        use_rslora=config.peft_use_rslora,
        use_dora=config.peft_use_dora,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(config.base_model, dtype=torch.bfloat16),
        settings,
        autocast_adapter_dtype=config.lora_fp32,
    )
    if parts := [part for key, part in KERNELS.items() if getattr(config, key)]:
        outsize.fuse_lora(model, parts)
    plain = PlainTrainer(
        model=model,
        args=training_arguments(config, on_gpu=False),
        train_dataset=train,
        data_collator=Collator(tokenizer.pad_token_id),
    )
    plain.train()
    plain.save_model()
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    for number, plan in enumerate(plans):
        out = tmp_path / f"out-{number}"
        run("train", str(yaml), "--set", f"output_dir={out}", *(x for key in plan for x in ("--set", key)))
        saved = load_file(out / "adapter_model.safetensors")
        assert any(t.dtype == torch.float32 for t in saved.values()) == config.lora_fp32
        assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved), plan
        history = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
        assert [entry["loss"] for entry in history if "loss" in entry] == losses
        theirs, ours = (
            json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "plain", out)
        )
        assert {**ours, "target_modules": sorted(ours["target_modules"])} == {
            **theirs,
            "target_modules": sorted(theirs["target_modules"]),
        }
        parity_cell((case, plan))
    outsize.fuse_lora(model, parts=())
    # Stock PEFT reads it, and the merged model says the same as base and adapter.
    base = AutoModelForCausalLM.from_pretrained(config.base_model, dtype=torch.bfloat16)
    batch = zoo.batch("llama")
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "out-0"), autocast_adapter_dtype=config.lora_fp32)
        adapted = loaded.eval()(input_ids=batch["input_ids"]).logits
        assert torch.equal(adapted, model.eval()(input_ids=batch["input_ids"]).logits)
        run("export", str(tmp_path / "out-0"), str(tmp_path / "merged"), "--merge")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=batch["input_ids"]).logits
    torch.testing.assert_close(
        merged.float(), adapted.float(), rtol=0.05, atol=0.05
    )  # the sum is rounded to bf16 once, not at every product


def test_an_adapter_run_resumes_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    yaml = folders.write_run(tmp_path, **CASES["lora"], adapter="lora", lora_r=2, max_steps=4, save_steps=2)
    run("train", str(yaml), "--set", "device=sim:1MiB")
    half = tmp_path / "out" / "checkpoint-2"
    run(
        "train",
        str(yaml),
        "--set",
        f"resume_from_checkpoint={half}",
        "--set",
        f"output_dir={tmp_path / 'resumed'}",
        "--set",
        "plan.n_checkpoint=3",
    )
    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [step for step, _ in checkpoints(tmp_path / "resumed")] == [4]
    parity_cell("resumed")
    # A run of an earlier version was not fused, and its checkpoints do not say so.
    text = (half / "run.json").read_text()
    settings = {key: value for key, value in json.loads(text).items() if key not in KERNELS}
    (half / "run.json").write_text(json.dumps(settings).ljust(len(text)))  # checkpoints know the sizes of their files
    given = ["--set", f"resume_from_checkpoint={half}", "--set", f"output_dir={tmp_path / 'unfused'}"]
    refused = CliRunner().invoke(app, ["train", str(yaml), *given])
    assert refused.exit_code == 2 and "lora_mlp_kernel was false and is true. Set it back" in refused.stderr
    run("train", str(yaml), *given, *(x for key in KERNELS for x in ("--set", f"{key}=false")))


def test_a_checkpoint_is_exported_as_a_plain_folder(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, max_steps=2, save_steps=2)
    run("train", str(yaml))
    run("export", str(tmp_path / "out" / "checkpoint-2"), str(tmp_path / "plain"))
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "prompt_format.json",
    }
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    result = CliRunner().invoke(app, ["export", str(tmp_path / "out"), str(tmp_path / "plain")])
    assert result.exit_code == 2 and "not empty" in result.stderr
    result = CliRunner().invoke(app, ["export", str(tmp_path / "out"), str(tmp_path / "other"), "--merge"])
    assert result.exit_code == 2 and "--merge" in result.stderr
