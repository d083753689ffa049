"""Runs of adapters on quantized bases."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from peft import PeftModel
from quantized_folders import of_transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.config.read import read_config
from outsize.run.chat import Chat, ChatRequest
from outsize.run.export import export_folder
from outsize.run.result_folder import load_adapted
from outsize.run.train import train_run

pytest.importorskip("bitsandbytes")

LORA = {"adapter": "lora", "lora_r": 2, "lora_target_linear": True, "max_steps": 2}


def train(yaml: Path, device: str, out: Path) -> str:
    console = Console(record=True, width=600, file=io.StringIO())
    train_run(read_config(yaml, [f"device={device}", f"output_dir={out}"]), console)
    return console.export_text()


def adapter_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def to_fp8(model: Path) -> None:
    path, config = model / "model.safetensors", model / "config.json"
    state = load_file(path)
    for name in [name for name in state if name.endswith("proj.weight")]:
        weight = state[name].float()
        scale = weight.abs().amax().view(1, 1) / 448
        state[name], state[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale
    save_file(state, path, metadata={"format": "pt"})
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": section}))


FULL = pytest.mark.full


@pytest.mark.parametrize("form", ["qlora", "fp8", pytest.param("int8", marks=FULL), pytest.param("stored", marks=FULL)])
def test_the_adapter_has_the_same_bits_under_every_plan(tmp_path: Path, form: str) -> None:
    keys: dict[str, Any] = {"qlora": {"adapter": "qlora", "load_in_4bit": True}, "int8": {"load_in_8bit": True}}.get(
        form, {}
    )
    yaml = folders.write_run(tmp_path, **{**LORA, **keys})
    if form == "fp8":
        to_fp8(tmp_path / "model")
    elif form == "stored":
        of_transformers(tmp_path / "model", load_in_4bit=True).save_pretrained(tmp_path / "model")
    text = train(yaml, "sim:215KiB", tmp_path / "streamed")
    assert "weights host" in text
    train(yaml, "cpu", tmp_path / "resident")
    streamed, resident = adapter_in(tmp_path / "streamed"), adapter_in(tmp_path / "resident")
    assert streamed.keys() == resident.keys()
    assert all(torch.equal(value, resident[name]) for name, value in streamed.items())
    assert any(value.any() for name, value in streamed.items() if "lora_B" in name)


def test_the_adapter_loads_in_transformers_and_peft_as_the_last_lines_say(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, **{**LORA, "adapter": "qlora", "load_in_4bit": True})
    text = train(yaml, "sim:1MiB", tmp_path / "out")
    code = text.split("\nload")[1].split("\nchat")[0]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    layer = names["base"].model.layers[0].mlp.up_proj.base_layer
    assert (
        layer.weight.quant_type == "nf4" and layer.weight.quant_state.nested and layer.compute_dtype == torch.bfloat16
    )
    kept = dict(names["model"].named_parameters())
    for name, value in adapter_in(tmp_path / "out").items():
        assert torch.equal(kept[name.replace(".weight", ".default.weight")], value), name


def test_a_quantized_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path)
    of_transformers(tmp_path / "model", load_in_4bit=True).save_pretrained(tmp_path / "model")
    with pytest.raises(
        ModelUnsupported, match="quantized with bitsandbytes, and only adapters can be trained on these"
    ):
        train(yaml, "cpu", tmp_path / "out")


FORMS: list[Any] = [{"load_in_4bit": True}, {"load_in_8bit": True}, "stored", "fp8"]


@pytest.mark.parametrize("form", [FORMS[0], *(pytest.param(form, marks=FULL) for form in FORMS[1:])])
def test_an_adapter_is_merged_into_bf16_and_chats_on_its_quantized_base(tmp_path: Path, form: Any) -> None:
    keys = form if isinstance(form, dict) else {}
    yaml = folders.write_run(tmp_path, **{**LORA, **keys, "learning_rate": 0.1})
    original = shutil.copytree(tmp_path / "model", tmp_path / "original")
    if form == "fp8":
        to_fp8(tmp_path / "model")
    elif form == "stored":
        of_transformers(tmp_path / "model", load_in_4bit=True).save_pretrained(tmp_path / "model")
    train(yaml, "cpu", tmp_path / "out")
    ids = torch.arange(2, 14).view(1, 12)

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=ids).logits.float()
        return found

    def merged(name: str, **settings: Any) -> Any:
        export_folder(tmp_path / "out", tmp_path / name, merge=True, **settings)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
        return AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()

    if not keys:
        with pytest.raises(ConfigError, match=r"its weights are quantized\. Name the model that"):
            merged("refused")
        assert not (tmp_path / "refused").exists()
    trained = load_adapted(tmp_path / "out", str(tmp_path / "model"))
    torch.testing.assert_close(logits(merged("rounded", dequantized=True)), logits(trained), rtol=0.05, atol=0.05)
    base: Any = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    plain: Any = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    whole = merged("whole", base=str(original))
    for name, value in plain.merge_and_unload(safe_merge=True).state_dict().items():
        assert torch.equal(whole.state_dict()[name], value), name
    assert not torch.equal(logits(whole), logits(trained)), "the rounding of the base is meant to show"
    chat = Chat(ChatRequest(folder=tmp_path / "out", max_new_tokens=4, temperature=0.0, device="cpu"))
    assert isinstance(chat.answer("one two"), str)
    chat.close()


def test_an_adapter_resumes_on_a_copy_of_its_base_and_on_no_other(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, **{**LORA, "adapter": "qlora", "load_in_4bit": True, "save_steps": 1})
    train(yaml, "cpu", tmp_path / "out")
    (tmp_path / "model").rename(tmp_path / "moved")

    def resume(*keys: str) -> None:
        given = [f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-1'}", f"base_model={tmp_path / 'moved'}"]
        to = f"output_dir={tmp_path / 'resumed'}"
        train_run(read_config(yaml, [*given, to, "device=cpu", *keys]), Console(file=io.StringIO()))

    resume()
    whole, resumed = adapter_in(tmp_path / "out"), adapter_in(tmp_path / "resumed")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    with pytest.raises(ConfigError, match="bnb_4bit_quant_type was nf4 and is fp4"):
        resume("bnb_4bit_quant_type=fp4")
    path = tmp_path / "moved" / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"][0] += 1
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"used another model than .*moved \(it was .*model\)\. Name that model"):
        resume()
