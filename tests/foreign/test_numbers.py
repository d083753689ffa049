"""Weights as others bring them: fp16 models, quantized folders, values that are not finite."""

import json
import logging
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM
from unit.model.test_weights import emptied

import outsize
from outsize.base.errors import BadFile, ConfigError, ModelUnsupported, PlanInfeasible
from outsize.checkpoint.model_files import SINGLE
from outsize.forecast.forecast import plan
from outsize.model.build import build_model, load_config
from outsize.model.quantized import READ
from outsize.model.weights import is_unmaterialized
from outsize.setup.prepare import preview

SPEC = outsize.AdamW(lr=1e-2, weight_decay=0.1)
STREAMED: dict[str, Any] = dict(
    optimizer=SPEC, device="sim:64MiB", chunk_bytes="8KiB", pins=outsize.Pins(n_persist=0, n_optimizer_gpu=0)
)


def half(seed: int = 0) -> nn.Module:
    return zoo.make("llama", seed=seed).half()


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {param.dtype for param in model.parameters()}


# --- fp16


def test_trainable_fp16_weights_train_as_fp32_and_come_back_as_fp16(caplog: pytest.LogCaptureFixture) -> None:
    """Three steps equal a plain loop over the same values in fp32; `detach` rounds once."""
    model, data = half(), cells.batches("llama", 3)
    expected = cells.plain(half().float(), data, spec=SPEC, steps=3)
    with caplog.at_level(logging.INFO, logger="outsize"):
        engine = outsize.prepare(model, data[0], **STREAMED)
        with cells.closing(engine):
            cells.assert_same(
                cells.train(model, engine.optimizer, data, steps=3, accumulate=1, engine=engine), expected
            )
    assert dtypes(model) == {torch.float16}
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), expected.weights[name].half()), name
    assert (
        "are trained in fp32" in caplog.text
        and "rounded from fp32 to fp16" in caplog.text
        and "bf16" not in caplog.text
    )


def test_a_plan_for_a_larger_batch_and_a_new_engine_keep_the_fp32_values(tmp_path: Path) -> None:
    data = [zoo.batch("llama", tokens=8), zoo.batch("llama", tokens=24, seed=1), zoo.batch("llama", tokens=24, seed=2)]
    expected = cells.plain(half().float(), data, spec=SPEC, steps=3)
    model = half()
    with cells.closing(outsize.prepare(model, data[0], **STREAMED)) as engine:
        before = engine.plan.inputs
        cells.assert_same(cells.train(model, engine.optimizer, data, steps=3, accumulate=1, engine=engine), expected)
        assert engine.plan.inputs != before
    with trainers.closing(trainers.ours(tmp_path, model=half())) as trainer:
        trainer.train()
        trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        assert any(not torch.equal(value, value.half().float()) for value in trained.values())
        trainer._renew_engine(None)
        assert all(torch.equal(value, trained[name]) for name, value in trainer.model.state_dict().items())
    assert dtypes(trainer.model) == {torch.float16}


def test_checkpoints_and_exports_of_an_fp16_model_hold_the_fp32_values(tmp_path: Path) -> None:
    model, data = half(), cells.batches("llama", 2)
    with cells.closing(outsize.prepare(model, data[0], **STREAMED)) as engine:
        cells.train(model, engine.optimizer, data, steps=2, accumulate=1, engine=engine)
        engine.save(tmp_path / "checkpoint-2")
        engine.export(tmp_path / "out")
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    for folder in ("checkpoint-2", "out"):
        assert all(torch.equal(value, trained[name]) for name, value in load_file(tmp_path / folder / SINGLE).items())
    assert dtypes(LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")) == {torch.float32}
    other = half(seed=5)
    with cells.closing(outsize.prepare(other, data[0], **STREAMED)) as engine:
        engine.load(tmp_path / "checkpoint-2")
        assert all(torch.equal(value, trained[name]) for name, value in other.state_dict().items())


def test_fp16_weights_that_are_still_in_files_are_read_as_fp32_and_frozen_ones_as_fp16(tmp_path: Path) -> None:
    half().save_pretrained(tmp_path)
    model, data = emptied(half()), cells.batches("llama", 2)
    expected = cells.plain(half().float(), data, spec=SPEC, steps=2)
    with cells.closing(outsize.prepare(model, data[0], weights=tmp_path, **STREAMED)) as engine:
        cells.assert_same(cells.train(model, engine.optimizer, data, steps=2, accumulate=1, engine=engine), expected)
    model = emptied(half())
    engine = outsize.prepare(model, data[0], weights=tmp_path, **STREAMED)
    engine.close()
    assert dtypes(model) == {torch.float16} and all(map(is_unmaterialized, model.parameters()))


def test_lora_on_an_fp16_base_leaves_the_base_in_fp16(caplog: pytest.LogCaptureFixture) -> None:
    """PEFT's adapters are fp32 and cast; the base streams as fp16. To the bit of a plain loop."""

    def adapted() -> nn.Module:
        torch.manual_seed(3)
        return get_peft_model(half(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))

    model, data = adapted(), cells.batches("llama", 3)
    expected = cells.plain(adapted(), data, spec=SPEC, steps=3)
    caplog.set_level(logging.INFO, logger="outsize")
    with cells.closing(outsize.prepare(model, data[0], **STREAMED)) as engine:
        assert f"{sum(1 for p in model.parameters() if not p.requires_grad)} frozen parameters stay fp16" in caplog.text
        assert {(p.dtype, p.trainable) for p in engine.graph.params} == {("float16", False), ("float32", True)}
        cells.assert_same(cells.train(model, engine.optimizer, data, steps=3, accumulate=1, engine=engine), expected)


def test_fp16_that_does_not_go_together_with_fp32_is_refused_in_a_sentence() -> None:
    model = half()
    model.model.layers[1].requires_grad_(False)
    with pytest.raises(
        ModelUnsupported,
        match=r"trained in fp32 beside others that stay fp16.*model\.to\(torch\.bfloat16\) or model\.float\(\)",
    ):
        outsize.prepare(model, zoo.batch("llama"), **STREAMED)
    assert dtypes(model) == {torch.float16}
    with cells.closing(outsize.prepare(model.float(), zoo.batch("llama"), **STREAMED)):
        pass


def test_what_only_plans_and_what_is_refused_leave_fp16_as_it_was() -> None:
    model, before = half(), half().state_dict()
    preview(model, zoo.batch("llama"), **STREAMED)
    for memory in ("gpu_memory", "host_memory"):
        with pytest.raises(PlanInfeasible):
            outsize.prepare(model, zoo.batch("llama"), **{**STREAMED, memory: "1KiB"})
    with pytest.raises(ConfigError):
        outsize.prepare(model, zoo.batch("llama"), **STREAMED, blocks=["nothing"])
    assert dtypes(model) == {torch.float16} and all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


def test_values_that_fp16_cannot_hold_are_reported_when_the_model_is_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = half()
    engine = outsize.prepare(model, zoo.batch("llama"), **STREAMED)
    with engine.gathered("model.norm.weight") as values:
        values["model.norm.weight"][0] = 1e6
    engine.detach()
    assert "model.norm.weight: 1 of the parameters have values beyond the range of fp16" in caplog.text


# --- values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named_and_the_model_is_left_as_it_was(value: float, dtype: torch.dtype) -> None:
    model = zoo.make("llama", dtype)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4:6] = value
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        ModelUnsupported, match=r"model\.layers\.2\.mlp\.up_proj\.weight: 2 of its \d+ values are NaN or infinite\. "
    ):
        outsize.prepare(model, zoo.batch("llama"), **STREAMED)
    assert dtypes(model) == {dtype} and not any(map(is_unmaterialized, model.parameters()))
    assert all(
        torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in model.state_dict().items()
    )


def test_a_weight_in_a_file_that_is_not_finite_is_named(tmp_path: Path) -> None:
    zoo.make("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / SINGLE)
    state["model.norm.weight"][1] = float("nan")
    save_file(state, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(BadFile, match=r"model\.norm\.weight: 1 of its 32 values are NaN or infinite\. "):
        outsize.prepare(emptied(zoo.make("llama")), zoo.batch("llama"), weights=tmp_path, **STREAMED)


def test_a_plan_for_a_larger_batch_does_not_look_again() -> None:
    """A weight that somebody sets to infinity on purpose while training is theirs: a re-plan must not lose the model
    over it.
    """
    model = zoo.make("llama")
    with cells.closing(outsize.prepare(model, zoo.batch("llama", tokens=8), **STREAMED)) as engine:
        with engine.gathered("model.layers.3.mlp.up_proj.weight") as values:
            values["model.layers.3.mlp.up_proj.weight"][0, 0] = float("inf")
        model(**zoo.batch("llama", tokens=24))
        assert engine.plan.inputs["input_ids"] == (2, 24)


# --- quantized models

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
LAYER = "model.layers.0.mlp.up_proj"
WEIGHT = f"{LAYER}.weight"


def write_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def folder_of(folder: Path, change: Any = lambda state: None, **config: Any) -> Path:
    """A model's folder with its tensors and its config changed."""
    zoo.make("llama").save_pretrained(folder)
    state = load_file(folder / SINGLE)
    change(state)
    save_file(state, folder / SINGLE, metadata={"format": "pt"})
    write_config(folder, **config)
    return folder


def to_fp8(state: dict[str, torch.Tensor]) -> None:
    """As fp8 folders on the hub have it."""
    for name in [name for name in state if name.endswith("proj.weight")]:
        state[f"{name}_scale_inv"] = torch.ones(1, 1)
        state[name] = state[name].to(torch.float8_e4m3fn)


def reading(folder: Path) -> tuple[Any, Any]:
    """Both ways to read a folder."""
    return (
        lambda: build_model(str(folder), dtype=torch.bfloat16),
        lambda: outsize.prepare(emptied(zoo.make("llama")), zoo.batch("llama"), weights=folder, **STREAMED),
    )


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": FP8}, "fp8"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "something-new", "bits": 3}}, "something-new"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"codebook": 7}}, r"an unknown method \(its keys are codebook\)"),
        ({"text_config": {"quantization_config": FP8}}, "fp8"),
    ],
)
def test_a_quantized_config_is_refused_by_its_method(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    folder_of(tmp_path, **config)
    for read in reading(tmp_path):
        do = (
            "and only adapters can be trained on"
            if method in READ
            else "which outsize does not read. Use the unquantized"
        )
        with pytest.raises(ModelUnsupported, match=f"quantized with {method}, {do}"):
            read()


def test_a_nested_config_of_transformers_is_looked_into(tmp_path: Path) -> None:
    zoo.make("llava").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, text_config={**config["text_config"], "quantization_config": FP8})
    with pytest.raises(ModelUnsupported, match="quantized with fp8"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (to_fp8, r"(weight_scale_inv lies beside the weights|weight is stored as float8_e4m3fn)"),
        (
            lambda state: state.update({f"{WEIGHT}_scale_inv": torch.ones(1, 1)}),
            rf"{WEIGHT}_scale_inv lies beside the weights",
        ),
        (lambda state: state.update({WEIGHT: state[WEIGHT].to(torch.int8)}), rf"{WEIGHT} is stored as int8"),
        (
            lambda state: state.update({WEIGHT: state[WEIGHT].to(torch.float8_e5m2)}),
            rf"{WEIGHT} is stored as float8_e5m2",
        ),
        (
            lambda state: state.update(
                {"x.gate_up_proj_blocks": torch.ones(4).byte(), "x.gate_up_proj_scales": torch.ones(1)}
            ),
            r"x\.gate_up_proj_(blocks|scales) lies beside",
        ),
        (
            lambda state: state.update({f"{LAYER}.qweight": state.pop(WEIGHT).int(), f"{LAYER}.scales": torch.ones(1)}),
            "(qweight|scales) lies beside",
        ),
    ],
    ids=["fp8", "scale", "int8", "e5m2", "mxfp4", "gptq"],
)
def test_quantized_files_without_a_word_in_the_config_are_refused_by_what_they_hold(
    tmp_path: Path, change: Any, told: str
) -> None:
    folder_of(tmp_path, change)
    for read in reading(tmp_path):
        with pytest.raises(BadFile, match=told):
            read()


def test_extra_tensors_that_only_look_like_scales_are_passed_over_as_before(tmp_path: Path) -> None:
    """`old.scales` has no weight beside it; uint8 masks of old GPT-2 files are no weights."""
    folder_of(
        tmp_path,
        lambda state: state.update({"old.scales": torch.ones(1), "model.layers.0.attn.mask": torch.ones(4).byte()}),
        quantization_config=None,
    )
    built = build_model(str(tmp_path), dtype=torch.float32)
    assert built.weights is not None
    built.weights.close()


def test_a_quantized_model_can_be_planned_for_as_the_unquantized_one_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, quantization_config=FP8)
    assert plan(folder, sequence_len=8, hardware="64MiB", host_memory="1GiB").plan.inputs["input_ids"] == (1, 8)
    assert [
        r.getMessage()
        for r in caplog.records
        if "quantized with fp8. The plan is for the unquantized model" in r.getMessage()
    ]


@pytest.mark.parametrize(
    ("files", "dtype", "warns"),
    [
        (torch.float16, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float32, False),
    ],
)
def test_files_that_are_rounded_when_they_are_read_say_so(
    tmp_path: Path, files: torch.dtype, dtype: torch.dtype, warns: bool, caplog: Any
) -> None:
    zoo.make("llama", files).save_pretrained(tmp_path)
    built = build_model(str(tmp_path), dtype=dtype)
    assert built.weights is not None
    built.weights.close()
    assert ("stored with more precision than bfloat16 and rounded to it" in caplog.text) == warns
