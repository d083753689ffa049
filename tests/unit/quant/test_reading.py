"""A bf16 folder read with load_in_4bit or load_in_8bit has the parts that transformers makes of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_folders import (
    BF16,
    CONFIG,
    assert_same_parts,
    bf16_folder,
    input_gradient,
    load,
    logits,
    of_transformers,
    parts_of,
)
from safetensors.torch import load_file, save_file
from torch import nn

from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.model.build import build_model
from outsize.model.weights import is_unmaterialized
from outsize.quant.reading import quantize_in_memory
from outsize.quant.settings import Quantization

bnb = pytest.importorskip("bitsandbytes")

FORMS = {
    "nf4 double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_4_bit_parts_logits_and_gradients_are_those_of_transformers(tmp_path: Path, form: dict[str, Any]) -> None:
    folder = bf16_folder(tmp_path)
    mine, theirs = load(folder, **form), of_transformers(folder, **form)
    assert_same_parts(mine, theirs)
    assert torch.equal(logits(mine), logits(theirs))
    assert torch.equal(input_gradient(mine), input_gradient(theirs))


def test_int8_parts_and_dequantized_products_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    """In training on the CPU, its products are weight-only too."""
    folder = bf16_folder(tmp_path)
    mine, theirs = load(folder, load_in_8bit=True), of_transformers(folder, load_in_8bit=True)
    assert_same_parts(mine, theirs)
    assert torch.equal(logits(mine), logits(theirs))
    assert torch.equal(input_gradient(mine), input_gradient(theirs))


@pytest.mark.parametrize("form", ["nf4 double", "int8"])
def test_transposed_layers_of_gpt2(tmp_path: Path, form: str) -> None:
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    folder = bf16_folder(tmp_path, transformers.GPT2LMHeadModel, config)
    settings = FORMS.get(form, dict(load_in_8bit=True))
    mine, theirs = load(folder, **settings).eval(), of_transformers(folder, **settings).eval()
    assert_same_parts(mine, theirs)
    if form != "int8":
        for module in theirs.modules():
            module.support_avx512bf16_for_cpu = False
        assert torch.equal(logits(mine), logits(theirs))


def test_embeddings_head_and_skipped_modules_stay_as_they_are(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    model = load(folder, load_in_4bit=True, llm_int8_skip_modules=("k_proj", "model.layers.1.mlp"))
    kept = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert kept == {
        "lm_head", *(f"model.layers.{n}.self_attn.k_proj" for n in (0, 1)),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert {type(module) for module in model.modules()} & {bnb.nn.Linear4bit}
    assert {p.dtype for n, p in model.named_parameters() if "norm" in n or "embed" in n or "lm_head" in n} == {BF16}


def test_the_layers_are_those_that_transformers_quantizes(tmp_path: Path) -> None:
    for number, tied in enumerate((False, True)):
        folder = bf16_folder(tmp_path / str(number), tie_word_embeddings=tied)
        mine, theirs = load(folder, load_in_4bit=True), of_transformers(folder, load_in_4bit=True)
        found = [
            [name for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]
            for model in (mine, theirs)
        ]
        assert found[0] == found[1] and len(found[0]) == 14


def test_nothing_is_read_before_it_is_placed(tmp_path: Path) -> None:
    built = build_model(str(bf16_folder(tmp_path)), dtype=BF16, quantization=Quantization(load_in_4bit=True))
    assert all(is_unmaterialized(part) for part in parts_of(built.model).values())
    assert built.weights is not None
    built.weights.close()


def test_parts_can_be_read_in_any_order_and_again(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    want = parts_of(load(folder, load_in_4bit=True))
    built = build_model(str(folder), dtype=BF16, quantization=Quantization(load_in_4bit=True))
    names = list(want)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    assert built.weights is not None
    for at in (*order, *order[:7]):
        found = torch.empty_like(want[names[at]])
        built.weights.read_into(names[at], found)
        assert torch.equal(found, want[names[at]]), names[at]
    built.weights.close()


def test_compute_dtype_is_the_models_or_as_given(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    for given, dtype in ((None, BF16), ("float32", torch.float32)):
        model = load(folder, load_in_4bit=True, bnb_4bit_compute_dtype=given)
        assert model.model.layers[0].mlp.up_proj.compute_dtype == dtype
        assert logits(model).isfinite().all()


def test_transformers_and_peft_take_it_for_their_own(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = bf16_folder(tmp_path / "bf16")
    for form, kind in ((dict(load_in_4bit=True), "Linear4bit"), (dict(load_in_8bit=True), "Linear8bitLt")):
        model = load(folder, **form)
        assert model.is_quantized and model.quantization_method == "bitsandbytes"
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(target_modules="all-linear", r=2), autocast_adapter_dtype=False
        )
        layer = wrapped.base_model.model.model.layers[0].mlp.up_proj
        assert type(layer).__name__ == kind and type(layer).__module__ == "peft.tuners.lora.bnb"
        assert layer.lora_A["default"].weight.dtype == BF16


@pytest.mark.parametrize("form", ["4", "8"])
def test_a_saved_model_is_read_by_transformers(tmp_path: Path, form: str) -> None:
    model = load(bf16_folder(tmp_path / "bf16"), **{f"load_in_{form}bit": True})
    model.save_pretrained(tmp_path / "saved")
    assert_same_parts(model, of_transformers(tmp_path / "saved"))


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    name, path = "model.layers.1.mlp.up_proj.weight", tmp_path / "model.safetensors"
    state = load_file(path)
    for value in (float("nan"), float("inf")):
        state[name][3, 5] = value
        save_file(state, path, metadata={"format": "pt"})
        for form in (*FORMS.values(), dict(load_in_8bit=True)):
            with pytest.raises(BadFile, match=f"{name}: 1 of its 9216 values are NaN or infinite"):
                load(folder, **form)


def test_values_beyond_fp16_cannot_become_int8(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"up_proj.weight: a value of 7.01e\+04 exceeds fp16"):
        load(folder, load_in_8bit=True)
    load(folder, load_in_4bit=True)


def test_rows_of_zeros_become_zeros(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"][3] = 0
    save_file(state, path, metadata={"format": "pt"})
    mine = load(folder, load_in_8bit=True)
    assert not mine.model.layers[1].mlp.up_proj.weight[3].any()
    assert_same_parts(mine, of_transformers(folder, load_in_8bit=True))


def test_a_model_in_memory_is_quantized_too() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.LlamaForCausalLM(config).to(BF16)
    weight = model.model.layers[1].mlp.down_proj.weight.data.clone()
    quantize_in_memory(model, Quantization(load_in_4bit=True))
    packed, _ = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, packed)
    assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (dict(), "load_in_4bit, load_in_8bit: neither is true. Set one of them."),
        (dict(load_in_4bit=True, load_in_8bit=True), "both are true. Remove one of them."),
        (dict(load_in_4bit=True, bnb_4bit_quant_type="nf5"), "bnb_4bit_quant_type: 'nf5' is unknown. Use nf4 or fp4."),
        (dict(load_in_4bit=True, bnb_4bit_compute_dtype="int8"), "bnb_4bit_compute_dtype: 'int8' is not a dtype"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Quantization(**settings)


def test_a_weight_of_two_layers_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(BF16)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(
        ModelUnsupported, match=r"layers\.1\.mlp\.up_proj\.weight is the same weight as model\.layers\.0"
    ):
        quantize_in_memory(model, Quantization(load_in_4bit=True))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="LlamaForCausalLM has no linear layers that can be quantized"):
        load(bf16_folder(tmp_path), load_in_4bit=True, llm_int8_skip_modules=("model",))


PEAK = """
import pathlib, sys
import torch
from quantized_folders import BF16, Built, bf16_folder, build_model, load, materialized, named_parts
from outsize.hardware.host import peak_rss_bytes
from outsize.quant.settings import Quantization
import psutil

folder, settings = pathlib.Path(sys.argv[1]), {sys.argv[2]: True}
load(bf16_folder(folder / "small"), **settings)  # imports, kernels
before = psutil.Process().memory_info().rss
model = load(folder / "large", **settings)
homes = sum(part.nbytes for _, part in named_parts(model))
print(peak_rss_bytes() - before, homes)
"""


@pytest.mark.full
@pytest.mark.parametrize("setting", ["load_in_4bit", "load_in_8bit"])
def test_host_memory_holds_the_quantized_weights_and_one_bf16_weight(tmp_path: Path, setting: str) -> None:
    config = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16)
    model = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**{**CONFIG, **config, "num_key_value_heads": 16}), dtype=BF16
    )
    model.save_pretrained(tmp_path / "large")
    del model
    path = os.pathsep.join(["src", "tests", *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), setting],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, homes = map(int, found.stdout.split()[-2:])
    assert peak <= 1.05 * (homes + 2 * 2048 * 8192), (peak, homes)
