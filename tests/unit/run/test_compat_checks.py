"""Checks of model and settings before the first step: attention of packed rows, and the model's positions."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.config.run import RunConfig
from outsize.device.choose import choose_device
from outsize.device.cpu import CpuDevice
from outsize.device.sdp_kernel import KERNELS, allowed_kernels
from outsize.forecast.forecast import forecast
from outsize.model.build import overridden, require_positions
from outsize.model.packed_attention import VARLEN
from outsize.run.assemble import assemble, start
from outsize.run.compat_checks import with_packed_attention
from outsize.run.plan import plan_request
from outsize.run.plan_batch import collator_of


def run(folder: Path, *, kind: str = "llama", **keys: Any) -> RunConfig:
    return read_config(folders.write_run(folder, kind=kind, **{"sample_packing": True, "sequence_len": 64, **keys}))


def test_packed_rows_have_attention_without_masks_unless_the_user_chose_another(tmp_path: Path) -> None:
    cpu = choose_device("cpu")
    assert with_packed_attention(run(tmp_path), cpu).attn_implementation == VARLEN
    assert with_packed_attention(run(tmp_path, attn_implementation="sdpa"), cpu).attn_implementation == "sdpa"
    assert with_packed_attention(run(tmp_path, sample_packing=False), cpu).attn_implementation is None


class OldGpu(CpuDevice):
    is_gpu = True
    has_flash_attention = False


@pytest.mark.parametrize(
    ("kind", "keys", "old", "reason"),
    [
        ("gemma2", {}, False, "Gemma2ForCausalLM need .* its attention scores are capped"),
        ("llama", {"bf16": False}, False, r"its weights are float32 \(bf16: false\)"),
        ("llama", {}, True, "this GPU has no flash attention"),
    ],
)
def test_models_that_need_a_mask_get_one_with_a_note(
    tmp_path: Path, kind: str, keys: dict[str, Any], old: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = run(tmp_path, kind=kind, **keys)
    device = OldGpu() if old else None
    with caplog.at_level(logging.WARNING, "outsize"):
        assert with_packed_attention(config, device).attn_implementation is None
    (message,) = caplog.messages
    assert re.search(reason, message)
    with pytest.raises(ConfigError, match=f"cannot have {VARLEN}"):
        with_packed_attention(run(tmp_path, kind=kind, attn_implementation=VARLEN, **keys), device)


def test_a_kernel_of_sdpa_is_for_sdpa(tmp_path: Path) -> None:
    for keys in ({"sample_packing": True}, {"sample_packing": False, "attn_implementation": "eager"}):
        with pytest.raises(ConfigError, match=r"sdp_kernel: flash is a kernel of sdpa, and attention is \w+\. Remove"):
            assemble(run(tmp_path, sdp_kernel="flash", **keys))
    with pytest.raises(ConfigError, match="cudnn is a kernel of CUDA GPUs, and this run computes on the CPU"):
        assemble(run(tmp_path, sample_packing=False, sdp_kernel="cudnn", device="cpu"))
    with pytest.raises(ConfigError, match=r"sdp_kernel: 'fast' is not .*auto"):
        run(tmp_path, sdp_kernel="fast")


def test_the_kernel_of_sdpa_holds_for_the_whole_run(tmp_path: Path) -> None:
    """And `auto` gives torch its choice back."""
    for name, attention in (("math", ""), ("flash", "flash"), ("auto", "flash")):
        config = run(tmp_path / name, sample_packing=False, sdp_kernel=name, device="cpu")
        assembled = assemble(config)
        assert allowed_kernels() == (KERNELS if name == "auto" else (name,))
        start(assembled, config)
        assert assembled.trainer.engine.plan.attention == attention


def test_attention_of_packed_rows_without_packing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is for packed rows. Set sample_packing: true"):
        with_packed_attention(run(tmp_path, sample_packing=False, attn_implementation=VARLEN), choose_device("cpu"))


def test_the_plan_of_packed_rows_is_for_the_documents_of_the_average_row_and_covers_all_batches(tmp_path: Path) -> None:
    """Memory does not depend on the documents. A batch of others is covered: nothing is planned again."""
    assembled = assemble(run(tmp_path, device="sim:16MiB", sequence_len=96, max_steps=6))
    trainer = assembled.trainer
    rows = trainer.train_dataset
    batch = trainer._plan_batch
    average = rows.average_row()
    assert batch["document_offsets"].shape == (2, rows.most_documents + 1)
    assert batch["document_offsets"][0, : len(average) + 1].diff().tolist() == average.tolist()
    deterministic = replace(run(tmp_path), full_determinism=True, attn_implementation=VARLEN)
    always = collator_of(deterministic, 0, 96, None, [rows])([rows[0]])
    assert always["document_offsets"].shape == (1, rows.most_documents + 1)
    start(assembled, run(tmp_path, device="sim:16MiB", sequence_len=96, max_steps=6))
    plan = trainer.engine.plan
    trainer.train()
    assert trainer.engine.plan is plan
    assert trainer.engine.report().gpu_peak_bytes <= trainer.engine.report().planned_gpu_bytes
    trainer.engine.close()


def test_a_forecast_of_packed_rows_has_no_mask(tmp_path: Path) -> None:
    """Activations that grow with tokens, not with their square."""
    peaks = []
    for attention in (None, "sdpa"):
        config = run(tmp_path, sequence_len=96, device="sim:16GiB", attn_implementation=attention)
        found = forecast(config.base_model, plan_request(config, None).request)
        peaks.append(found.plan.estimate.gpu_bytes)
    rows, tokens = 2, 96
    assert peaks[1] - peaks[0] > rows * tokens**2 / 2


# --- positions


def llama(**settings: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=64, vocab_size=97, **settings)


YARN = {"rope_type": "yarn", "factor": 4.0}


def test_rows_beyond_the_models_positions_need_scaled_rotary_embeddings() -> None:
    with pytest.raises(ConfigError, match=r"65 exceeds the model's 64 positions. Set rope_parameters \(rope_type and"):
        require_positions(llama(), 65)
    with pytest.raises(ConfigError, match=r"65 exceeds the model's 64 positions. Lower it; longer examples are split"):
        require_positions(GPT2Config(n_positions=64), 65)
    require_positions(llama(), 64)
    for given in ({"rope_parameters": YARN}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}):
        config = llama()
        overridden(config, given, None)
        assert config.rope_parameters["original_max_position_embeddings"] == 64
        assert config.rope_parameters["rope_theta"] == 10000.0, "the saved value"
        require_positions(config, 256)
        with pytest.raises(ConfigError, match="257 exceeds the model's 256 positions"):
            require_positions(config, 257)


def test_rope_parameters_per_kind_of_layer() -> None:
    config = Gemma3TextConfig(max_position_embeddings=64)
    overridden(config, None, {"full_attention": {"rope_type": "linear", "factor": 8.0}})
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    require_positions(config, 512)
    with pytest.raises(ConfigError, match=r"has parameters per kind of layer, and rope_type, factor were given. Put"):
        overridden(config, None, YARN)


def test_wrong_rope_parameters_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters: GPT2Config has no rotary embeddings. Remove it"):
        overridden(GPT2Config(), None, YARN)
    with pytest.raises(ConfigError, match=r"rope_parameters: Missing required keys .*'factor'.* Correct them"):
        overridden(llama(), None, {"rope_type": "yarn"})


def test_rope_parameters_of_a_run_file_reach_the_model_and_the_forecast(tmp_path: Path) -> None:
    config = run(tmp_path, sequence_len=512, rope_parameters=YARN, sample_packing=False, pad_to_sequence_len=True)
    rotary = assemble(config).trainer.model.model.rotary_emb
    assert (rotary.rope_type, rotary.config.rope_parameters["factor"]) == ("yarn", 4.0)
    assert forecast(config.base_model, plan_request(config, "64MiB").request).plan.inputs["input_ids"] == (2, 512)
    long = run(tmp_path, sequence_len=512)
    for refused in (lambda: assemble(long), lambda: plan_request(long, "64MiB")):
        with pytest.raises(ConfigError, match="512 exceeds the model's 128 positions"):
            refused()
