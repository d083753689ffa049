"""Checks before the first step that model, tokenizer, data and settings fit together."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainerCallback, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.base.log import log
from outsize.config.convert import TRACKER_SWITCHES
from outsize.config.run import RunConfig
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows
from outsize.device.device import Device
from outsize.model.build import load_config, trainable_class
from outsize.model.packed_attention import VARLEN, register, why_masked


def first_line(error: Exception) -> str:
    """The first line of another library's error, as part of a sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def make_trackers(names: list[str]) -> list[TrainerCallback]:
    made = []
    for name in names:
        try:
            made += [kind() for kind in get_reporting_integration_callbacks([name])]
        except (ImportError, RuntimeError, ValueError) as error:
            keys = ["report_to", *(key for key, tracker in TRACKER_SWITCHES.items() if tracker == name)]
            raise ConfigError(
                f"report_to: {name}: {first_line(error)}. Or remove what sets it ({', '.join(keys)})."
            ) from None
    return made


def with_installed_attention(config: RunConfig) -> RunConfig:
    """Replaces a flash implementation whose package is not installed by sdpa, which computes the same attention."""
    name = config.attn_implementation or ""
    needs = "kernels" if "/" in name else "flash_attn_interface" if name.endswith("_3") else "flash_attn"
    if ("flash" not in name and "/" not in name) or find_spec(needs) is not None:
        return config
    log.warning("attn_implementation: %s needs the package %s, which is not installed: sdpa is used", name, needs)
    return replace(config, attn_implementation="sdpa")


def with_packed_attention(config: RunConfig, device: Device | None = None) -> RunConfig:
    """Sets attention without masks for packed rows, if the user chose none and the model can have it.

    `device`: the one that computes. None: the device of a forecast, which need not be present.
    """
    if not config.sample_packing:
        if config.attn_implementation == VARLEN:
            raise ConfigError(
                f"attn_implementation: {VARLEN} is for packed rows. Set sample_packing: true, or remove it."
            )
        return config
    if config.attn_implementation not in (None, VARLEN):
        return config
    model_config = load_config(config.base_model, may_be_quantized=True)
    kind = trainable_class(model_config)
    on_gpu = device is None or device.is_gpu
    reason = why_masked(kind, model_config, on_gpu=on_gpu)
    if not reason and device is not None and not device.has_flash_attention:
        reason = "this GPU has no flash attention"
    if not reason and on_gpu and not config.bf16:
        reason = "its weights are float32 (bf16: false)"
    if reason and config.attn_implementation == VARLEN:
        raise ConfigError(f"attn_implementation: {kind.__name__} cannot have {VARLEN}: {reason}. Remove it.")
    if reason:
        log.warning(
            "sample_packing: rows of %s need a mask of tokens × tokens, which is slower and takes memory, because %s",
            kind.__name__,
            reason,
        )
        return config
    register()
    return replace(config, attn_implementation=VARLEN)


def require_sdpa(config: RunConfig) -> None:
    """Check that a kernel of sdpa is chosen only where sdpa computes attention."""
    name = config.attn_implementation
    if config.sdp_kernel != "auto" and name not in (None, "sdpa"):
        raise ConfigError(
            f"sdp_kernel: {config.sdp_kernel} is a kernel of sdpa, and attention is {name}. Remove sdp_kernel, or set "
            "attn_implementation: sdpa."
        )


def require_scheduler(config: RunConfig) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    given = dict(config.lr_scheduler_kwargs or {})
    try:
        get_scheduler(
            config.lr_scheduler, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=given
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"lr_scheduler_kwargs: not valid for lr_scheduler: {config.lr_scheduler} ({first_line(error)}). Change "
            "them, or use another lr_scheduler."
        ) from None


def require_language_model(model: Any) -> None:
    if model.get_output_embeddings() is None:
        raise ModelUnsupported(
            f"base_model: {type(model).__name__} has no language model head, which `outsize train` needs. Use a "
            "language model, or train it with OutsizeTrainer."
        )


def require_packable(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"sample_packing: {type(model).__name__} has an encoder, which attends to the whole row. Use "
            "sample_packing: false."
        )


def require_vocabulary(model: Any, tokenizer: Any, rows: list[Rows | PackedRows], pad_id: int) -> None:
    size: int = model.get_input_embeddings().num_embeddings
    flat = [(part.documents if isinstance(part, PackedRows) else part).ids for part in rows]
    highest = max(pad_id, *(int(ids.max()) for ids in flat))
    if highest >= size:
        raise ConfigError(
            f"The tokenizer produces token {highest} ({tokenizer.convert_ids_to_tokens(highest)}), but the model has "
            f"{size} tokens. Use the model's own tokenizer, or save the model after resize_token_embeddings."
        )
