"""The settings of `outsize plan` for a run file: its model, adapter, data, batch and budgets."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outsize.base.errors import OutsizeError
from outsize.config.run import RunConfig
from outsize.data.collate import Collator, pad_id_of, widest_batch
from outsize.device.choose import choose_device
from outsize.forecast.forecast import ForecastRequest
from outsize.hardware.spec import HardwareSpec
from outsize.integrations.arguments import optimizer_of
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.build import load_config
from outsize.run.adapters import adapter_of, method_of
from outsize.run.assemble import pins_of, rows, training_arguments
from outsize.run.row_lengths import longest_row, rows_text, tokens_per_row
from outsize.run.tokenizer import load_tokenizer

DEFAULT_HARDWARE = "rtx4090"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    request: ForecastRequest
    notes: tuple[str, ...]
    filled: float
    """Share of the planned tokens that the average row has. 1 if rows are packed, or the data are unknown."""


def plan_request(config: RunConfig, hardware: str | None) -> RunRequest:
    """`hardware`: as `--hardware`. None: the GPU that the file simulates, this machine's, or one of the catalog."""
    notes = []
    tokens, filled, pad_id = config.sequence_len, 1.0, 0
    if not config.sample_packing and not config.pad_to_sequence_len:
        try:
            tokens, filled, pad_id = _rows_of(config)
            notes += [text] if (text := rows_text(tokens, config.sequence_len)) else []
        except OutsizeError as error:
            notes.append(f"planned for rows of sequence_len tokens, because the data cannot be read here: {error}")
    machine = hardware or _machine_of(config)
    if machine is None:
        notes.append(f"planned for {DEFAULT_HARDWARE}, because this machine has no GPU; --hardware names another")
    if config.plan_file is not None:
        notes.append("plan: the plan file is not used here; `outsize train --dry-run` shows it")
    arguments = training_arguments(config, on_gpu=False)
    collator = Collator(pad_id, tokens if config.pad_to_sequence_len else None)
    vocabulary: int = load_config(config.base_model, may_be_quantized=True).get_text_config().vocab_size

    def batch_of(rows: int) -> dict[str, Tensor]:
        return widest_batch(collator, rows=rows, tokens=tokens, packed=config.sample_packing, vocab_size=vocabulary)

    request = ForecastRequest(
        hardware=machine or DEFAULT_HARDWARE,
        optimizer=optimizer_of(arguments, (), (), config.nonfinite),
        sequence_len=tokens,
        micro_batch_size=config.micro_batch_size,
        batch_size=config.batch_size,
        accumulate=config.gradient_accumulation_steps,
        gpu_memory=config.gpu_memory,
        host_memory=config.host_memory,
        pins=pins_of(config),
        dtype="bfloat16" if config.bf16 else "float32",
        chunk_bytes=config.chunk_bytes or DEFAULT_CHUNK_BYTES,
        chunked_loss=config.chunked_loss,
        adapter=adapter_of(config) if config.adapter == "lora" else None,
        method=method_of(config),
        batch_of=batch_of,
    )
    return RunRequest(request=request, notes=tuple(notes), filled=filled)


def _rows_of(config: RunConfig) -> tuple[int, float, int]:
    """Tokens of the longest row, the share of them that the average training row has, and the padding token."""
    tokenizer = load_tokenizer(config)
    pad_id = pad_id_of(tokenizer)
    train, evaluated, _ = rows(config, tokenizer, pad_id)
    longest = longest_row(config, [train] if evaluated is None else [train, evaluated])
    return longest, tokens_per_row(train) / longest, pad_id


def _machine_of(config: RunConfig) -> str | HardwareSpec | None:
    kind, _, name = (config.device or "").partition(":")
    if kind == "sim":
        return name
    device: Any = choose_device(config.device)
    return device.spec if device.is_gpu else None
