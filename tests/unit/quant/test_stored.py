"""Folders whose weights are quantized already: those that transformers saves are read, others are refused by name."""

import json
from collections.abc import Callable
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
from torch import Tensor

from outsize.base.errors import BadFile, ConfigError, ModelUnsupported
from outsize.model.build import build_model
from outsize.quant.settings import Quantization

FORMS: dict[str, dict[str, Any]] = {
    "nf4 double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4 double": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
    "bf16 storage": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=BF16),
    "skip": dict(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "up_proj"]),
    "int8": dict(load_in_8bit=True),
}


def saved(folder: Path, **settings: Any) -> Path:
    """A folder that transformers quantized and saved."""
    of_transformers(bf16_folder(folder / "bf16"), **settings).save_pretrained(folder / "saved")
    return folder / "saved"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    edit(state)
    save_file(state, path, metadata={"format": "pt"})


def write_section(folder: Path, section: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_folder_saved_by_transformers_computes_as_in_transformers(tmp_path: Path, form: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    folder = saved(tmp_path, **form)
    mine, theirs = load(folder), of_transformers(folder)
    if form.get("bnb_4bit_quant_storage") is None:
        assert_same_parts(mine, theirs)
    else:  # the same bytes
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(parts_of(mine)[name], parts_of(theirs)[name].view(-1).view(torch.uint8).view(-1, 1))
    assert torch.equal(logits(mine), logits(theirs))
    assert torch.equal(input_gradient(mine), input_gradient(theirs))


def test_folders_with_other_names_are_converted_by_transformers(tmp_path: Path) -> None:
    """Experts that the files have one by one."""
    pytest.importorskip("bitsandbytes")
    config = transformers.Qwen3MoeConfig(
        **{name: value for name, value in CONFIG.items() if name != "attention_bias"},
        moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    folder = bf16_folder(tmp_path / "bf16", transformers.Qwen3MoeForCausalLM, config)
    theirs = of_transformers(folder, **FORMS["nf4 double"])
    assert_same_parts(load(folder, load_in_4bit=True), theirs)
    theirs.save_pretrained(tmp_path / "saved")
    mine = load(tmp_path / "saved")
    assert_same_parts(mine, theirs)
    assert torch.equal(logits(mine), logits(theirs))
    of_transformers(folder, load_in_8bit=True).save_pretrained(tmp_path / "int8")
    with pytest.raises(ModelUnsupported, match="converts such folders with 4-bit weights of bitsandbytes only"):
        load(tmp_path / "int8")


def test_its_own_kind_may_be_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = saved(tmp_path, **FORMS["nf4"])
    model = load(folder, load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32
    assert not model.model.layers[0].mlp.up_proj.weight.quant_state.nested, "as in the files"
    with pytest.raises(
        ConfigError, match=r"load_in_8bit: the weights of .* are quantized already \(bitsandbytes, 4 bits"
    ):
        load(folder, load_in_8bit=True)


def test_without_an_adapter_it_is_refused(tmp_path: Path) -> None:
    folder = bf16_folder(tmp_path)
    write_section(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(
        ModelUnsupported, match="quantized with bitsandbytes, and only adapters can be trained on these"
    ):
        build_model(str(folder), dtype=BF16)


LAYER = "model.layers.1.mlp.up_proj"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


def with_state(**changes: Any) -> Callable[[dict[str, Tensor]], Any]:
    def edit(state: dict[str, Tensor]) -> None:
        held = {**json.loads(bytes(state[STATE].tolist())), **changes}
        state[STATE] = torch.tensor(list(json.dumps(held).encode()), dtype=torch.uint8)

    return edit


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no absmax": (lambda state: state.pop(f"{LAYER}.weight.absmax"), rf"lacks {LAYER}\.weight\.absmax\. Use the folder"),
    "no nested scales": (
        lambda state: state.pop(f"{LAYER}.weight.nested_absmax"),
        rf"lacks {LAYER}\.weight\.nested_absmax\. Use the folder",
    ),
    "no table": (lambda state: state.pop(f"{LAYER}.weight.quant_map"), rf"lacks {LAYER}\.weight\.quant_map\. Get"),
    "no state": (lambda state: state.pop(STATE), rf"{LAYER}\.weight has scales, but lacks its quant_state"),
    "no weight": (lambda state: state.pop(f"{LAYER}.weight"), rf"lacks {LAYER}\.weight\. Use the folder"),
    "short weight": (
        lambda state: state.update({f"{LAYER}.weight": state[f"{LAYER}.weight"][:-1]}),
        rf"{LAYER}\.weight has 4607 bytes instead of 4608\. Get the folder again",
    ),
    "other scales": (
        lambda state: state.update({f"{LAYER}.weight.absmax": state[f"{LAYER}.weight.absmax"].float()}),
        rf"{LAYER}\.weight\.absmax is stored as float32 instead of uint8",
    ),
    "table of another size": (
        lambda state: state.update({f"{LAYER}.weight.quant_map": torch.ones(15)}),
        r"quant_map has 15 values of float32 instead of 16 of float32",
    ),
    "no JSON": (
        lambda state: state.update({STATE: torch.tensor([1, 2, 3], dtype=torch.uint8)}),
        rf"{STATE} cannot be read \(JSONDecodeError",
    ),
    "no offset": (with_state(nested_offset=None), r"cannot be read \(TypeError"),
    "another shape": (with_state(shape=[144, 63]), r"has the shape \(144, 63\), but \(144, 64\) in the model"),
    "another type": (with_state(quant_type="fp4"), "says fp4"),
    "a block size": (with_state(blocksize=48), "has the block size 48"),
    "a nested block size": (with_state(nested_blocksize=128), "has the nested block size 128, which is not supported"),
    "a dtype": (with_state(dtype="int8"), "has the dtype int8"),
    "an expert": (
        lambda state: state.update({f"model.extra.weight{end}": state[f"{LAYER}.weight{end}"].clone() for end in ("", ".absmax")}),
        r"model\.extra\.weight\.absmax lies beside the weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder_is_refused_with_one_message(tmp_path: Path, fault: str) -> None:
    pytest.importorskip("bitsandbytes")
    folder = saved(tmp_path, **FORMS["nf4 double"])
    edit, told = FAULTS[fault]
    change(folder, edit)
    with pytest.raises(BadFile, match=told):
        load(folder)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = saved(tmp_path, **FORMS["nf4"])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadFile, match=r"has \d+ bytes instead of \d+"):
        load(folder)


def test_a_config_that_promises_quantized_weights_is_compared_with_the_files(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = bf16_folder(tmp_path)
    write_section(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(BadFile, match="config says that weights are quantized, but no linear layer of LlamaFor"):
        load(folder)


@pytest.mark.parametrize(("method", "shown"), [("gptq", "gptq"), ("awq", "awq"), ("mxfp4", "mxfp4")])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str, shown: str) -> None:
    folder = bf16_folder(tmp_path)
    write_section(folder, {"quant_method": method, "bits": 4})
    with pytest.raises(
        ModelUnsupported, match=f"quantized with {shown}, which outsize does not read. Use the unquantized"
    ):
        load(folder)


# --- fp8

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}


def to_fp8(state: dict[str, Tensor], scale_dtype: torch.dtype = torch.float32) -> None:
    """Quantize the projections in blocks of 32 × 48; the last columns and rows are no whole block."""
    for name in [name for name in state if name.endswith("proj.weight")]:
        weight = state[name].float()
        rows, columns = weight.shape
        scale = torch.empty(-(-rows // 32), -(-columns // 48))
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(len(scale)):
            for j in range(scale.shape[1]):
                part = (slice(32 * i, 32 * i + 32), slice(48 * j, 48 * j + 48))
                scale[i, j] = (weight[part].abs().amax() / 448).to(scale_dtype).float()
                codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
        state[name], state[f"{name}_scale_inv"] = codes, scale.to(scale_dtype)


def dequantized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In fp32, block by block."""
    found = {}
    for name, value in state.items():
        if name.endswith("_scale_inv"):
            continue
        found[name] = value.float()
        if (scale := state.get(f"{name}_scale_inv")) is not None:
            for i in range(len(scale)):
                for j in range(scale.shape[1]):
                    found[name][32 * i : 32 * i + 32, 48 * j : 48 * j + 48] *= scale[i, j].float()
    return found


@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16, torch.float8_e8m0fnu])
def test_fp8_folders_compute_with_the_dequantized_weights(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    folder = bf16_folder(tmp_path)
    change(folder, lambda state: to_fp8(state, scale_dtype))
    write_section(folder, FP8)
    model = load(folder)
    weight = model.model.layers[1].mlp.up_proj.weight
    assert weight.dtype == torch.float8_e4m3fn and model.model.embed_tokens.weight.dtype == BF16
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    reference.load_state_dict(dequantized(load_file(folder / "model.safetensors")))
    want = logits(reference)
    assert (logits(model) - want).norm() < 0.01 * want.norm(), "activations are rounded to bf16"
    for param in reference.parameters():  # with weights that are rounded once, it is the same computation
        param.data = param.data.to(BF16)
    assert torch.equal(logits(model), logits(reference))
    assert torch.equal(input_gradient(model), input_gradient(reference))


def test_fp8_computes_as_in_transformers_without_a_gpu(tmp_path: Path) -> None:
    """It dequantizes to bf16, weights of whole blocks only."""
    folder = bf16_folder(tmp_path)

    def quantize(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith("proj.weight")]:
            blocks = state[name].float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            state[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            state[name] = (blocks / scale).view(state[name].shape).to(torch.float8_e4m3fn)

    change(folder, quantize)
    write_section(folder, {**FP8, "weight_block_size": [16, 16]})
    assert torch.equal(logits(load(folder)), logits(of_transformers(folder)))


def test_adapters_on_fp8_are_in_the_models_dtype_and_cannot_be_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = bf16_folder(tmp_path)
    change(folder, to_fp8)
    write_section(folder, FP8)
    model = peft.get_peft_model(
        load(folder), peft.LoraConfig(target_modules="all-linear", r=2), autocast_adapter_dtype=False
    )
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert layer.lora_A["default"].weight.dtype == BF16
    before = layer.base_layer.weight.view(torch.uint8).clone()
    for safe in (False, True):
        with pytest.raises((RuntimeError, NotImplementedError)):
            model.merge_adapter(safe_merge=safe)
        assert torch.equal(layer.base_layer.weight.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"weight_block_size": None}, "its fp8 weights have weight_block_size None, which outsize does not read"),
        ({"activation_scheme": "static"}, "its fp8 weights have activation_scheme static, which outsize does not read"),
    ],
)
def test_other_fp8_folders_are_refused(tmp_path: Path, section: dict[str, Any], told: str) -> None:
    folder = bf16_folder(tmp_path)
    change(folder, to_fp8)
    write_section(folder, {**FP8, **section})
    with pytest.raises(ModelUnsupported, match=told):
        load(folder)


FP8_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (
        lambda state: state.pop(f"{LAYER}.weight_scale_inv"),
        rf"{LAYER}\.weight is stored as float8_e4m3fn, which outsize does not read as a weight",
    ),
    "not quantized": (
        lambda state: state.update({f"{LAYER}.weight": state[f"{LAYER}.weight"].to(BF16)}),
        rf"{LAYER}\.weight is stored as bfloat16 instead of float8_e4m3fn",
    ),
    "e5m2": (
        lambda state: state.update({f"{LAYER}.weight": state[f"{LAYER}.weight"].to(torch.float8_e5m2)}),
        rf"{LAYER}\.weight is stored as float8_e5m2",
    ),
    "another block": (
        lambda state: state.update({f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}),
        rf"{LAYER}\.weight_scale_inv has the shape \(1, 1\), but \(5, 2\) in the model",
    ),
    "integer scales": (
        lambda state: state.update({f"{LAYER}.weight_scale_inv": torch.ones(5, 2, dtype=torch.int32)}),
        rf"{LAYER}\.weight_scale_inv is stored as int32, which is no dtype of scales",
    ),
}


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_a_damaged_fp8_folder_is_refused_with_one_message(tmp_path: Path, fault: str) -> None:
    folder = bf16_folder(tmp_path)
    change(folder, to_fp8)
    edit, told = FP8_FAULTS[fault]
    change(folder, edit)
    write_section(folder, FP8)
    with pytest.raises(BadFile, match=told):
        load(folder)


def test_fp8_needs_no_bitsandbytes_and_4_bits_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from outsize.quant.installed import bitsandbytes

    folder = bf16_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "outsize.quant.modules", raising=False)
    bitsandbytes.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"need bitsandbytes, which is not installed. Run: pip install 'outsize\[quant"
        ):
            build_model(str(folder), dtype=BF16, quantization=Quantization(load_in_4bit=True))
        change(folder, to_fp8)
        write_section(folder, FP8)
        assert logits(load(folder)).isfinite().all()
    finally:
        bitsandbytes.cache_clear()
