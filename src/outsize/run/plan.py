"""The settings of `outsize plan` for a run file: its model, adapter, data, batch and budgets."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from outsize.base.errors import OutsizeError
from outsize.base.units import show_bytes
from outsize.config.run import RunConfig
from outsize.device.choose import choose_device
from outsize.forecast.forecast import ForecastRequest
from outsize.hardware.catalog import DEFAULT_HARDWARE
from outsize.hardware.spec import HardwareSpec
from outsize.integrations.arguments import optimizer_of
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.build import load_config, overridden, require_positions, trainable_class
from outsize.model.packed_attention import VARLEN
from outsize.run.adapters import adapter_of, method_of
from outsize.run.assemble import pins_of, training_arguments
from outsize.run.compat_checks import require_sdpa, with_packed_attention
from outsize.run.inputs import load_inputs
from outsize.run.plan_batch import AnyCollator, batches_to_plan_for, collator_of
from outsize.run.row_lengths import longest_row, rows_text, tokens_per_row
from outsize.run.vision import load_vision, takes_images


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    request: ForecastRequest
    notes: tuple[str, ...]
    filled: float
    """Share of the planned tokens that the average row has. 1 if rows are packed or cannot be, or are unknown."""


def plan_request(config: RunConfig, hardware: str | None) -> RunRequest:
    """`hardware`: as `--hardware`. None: the GPU that the file simulates, this machine's, or one of the catalog."""
    notes = []
    here = choose_device(config.device) if hardware is None else None
    config = with_packed_attention(config, here if here is not None and (here.is_gpu or here.is_simulated) else None)
    model_config = load_config(config.base_model, may_be_quantized=True)
    overridden(model_config, config.overrides_of_model_config, config.rope_parameters)
    require_positions(model_config, config.sequence_len)
    tokens, filled, collator = config.sequence_len, 1.0, collator_of(config, 0, config.sequence_len, None)
    parts: list[Any] = []
    if not config.sample_packing and (not config.pad_to_sequence_len or takes_images(config)):
        try:
            tokens, filled, collator, parts = _rows_of(config)
            notes += [text] if (text := rows_text(tokens, config.sequence_len)) else []
        except OutsizeError as error:
            notes.append(f"planned for rows of sequence_len tokens, because the data cannot be read here: {error}")
    require_sdpa(config)
    if config.sdp_kernel == "math":
        notes.append("planned for a fused attention kernel; sdp_kernel: math also holds tokens × tokens scores")
    if config.attn_implementation == VARLEN:
        notes.append("planned for packed rows of one document each, whose attention takes longest")
    machine = hardware or _machine_of(config)
    if machine is None:
        notes.append(f"planned for {DEFAULT_HARDWARE}, because this machine has no GPU; --hardware names another")
    if config.plan_file is not None:
        notes.append("plan: the plan file is not used here; `outsize train --dry-run` shows it")
    arguments = training_arguments(replace(config, rl=None), on_gpu=False)  # without TRL, which may not be installed
    vocabulary: int = model_config.get_text_config().vocab_size
    batch_of = batches_to_plan_for(config, collator, parts, tokens, vocabulary)
    reserved = 0
    if config.rl is not None or config.teacher_model is not None:
        reserved, note = _reference(config) if config.rl is not None else _teacher(config)
        notes.append(note)
    request = ForecastRequest(
        hardware=machine or DEFAULT_HARDWARE,
        optimizer=optimizer_of(arguments, (), (), config.nonfinite),
        sequence_len=tokens,
        micro_batch_size=config.micro_batch_size,
        batch_size=config.batch_size,
        accumulate=config.gradient_accumulation_steps,
        gpu_memory=config.gpu_memory,
        host_memory=config.host_memory,
        reserved_host_bytes=reserved,
        pins=pins_of(config),
        dtype="bfloat16" if config.bf16 else "float32",
        chunk_bytes=config.chunk_bytes or DEFAULT_CHUNK_BYTES,
        chunked_loss=config.chunked_loss,
        tile_tokens=config.tile_tokens,
        adapter=adapter_of(config) if config.adapter == "lora" else None,
        quantization=config.quantization,
        method=method_of(config),
        config_overrides=config.overrides_of_model_config,
        rope_parameters=config.rope_parameters,
        attn_implementation=VARLEN if config.attn_implementation == VARLEN else None,
        batch_of=batch_of if config.rl is None else lambda pairs: batch_of(2 * pairs),
    )
    return RunRequest(request=request, notes=tuple(notes), filled=filled if config.rl is None else 1.0)


def _reference(config: RunConfig) -> tuple[int, str]:
    """Host memory of the reference model of `rl: dpo`, and what the plan leaves out."""
    note = (
        "rl: dpo: a pair is planned as two rows; TRL's loss and the forward of the reference are not in the prediction "
        "(`outsize train --dry-run` measures them)"
    )
    if config.adapter == "lora":
        return 0, f"{note}; the reference is the base model without the adapter, which needs no memory of its own"
    needed = _weight_bytes(config.base_model, config)
    return needed, f"{note}; its weights take {show_bytes(needed)} of host memory, which the plan leaves free"


def _teacher(config: RunConfig) -> tuple[int, str]:
    """Host memory of the teacher, and what the plan leaves out."""
    assert config.teacher_model is not None
    needed = _weight_bytes(config.teacher_model, config)
    return needed, (
        "teacher_model: its forward and GPU memory are not in the prediction (`outsize train --dry-run` measures "
        f"them); its weights take {show_bytes(needed)} of host memory, which the plan leaves free"
    )


def _weight_bytes(path: str, config: RunConfig) -> int:
    model_config = load_config(path, may_be_quantized=True)
    with torch.device("meta"):
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        model = trainable_class(model_config)._from_config(model_config, dtype=dtype)
    return sum(param.nbytes for param in model.parameters())


def _rows_of(config: RunConfig) -> tuple[int, float, AnyCollator, list[Any]]:
    """Tokens of the longest row, the share of them that the average training row has, the collator, and the rows."""
    vision = load_vision(config)
    inputs = load_inputs(config, vision)
    longest = longest_row(config, inputs.parts)
    # Packing, which this is about, is refused with images.
    filled = tokens_per_row(inputs.train) / longest if vision is None else 1.0
    return longest, filled, collator_of(config, inputs.pad_id, longest, vision), inputs.parts


def _machine_of(config: RunConfig) -> str | HardwareSpec | None:
    kind, _, name = (config.device or "").partition(":")
    if kind == "sim":
        return name
    device: Any = choose_device(config.device)
    return device.spec if device.is_gpu else None
