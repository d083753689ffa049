"""Checks before the first step that model, tokenizer, data and settings fit together."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.base.log import log
from outsize.config.run import RunConfig
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows


def first_line(error: Exception) -> str:
    """The first line of another library's error, as part of a sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def make_trackers(names: list[str]) -> list[TrainerCallback]:
    made = []
    for name in names:
        try:
            made += [kind() for kind in get_reporting_integration_callbacks([name])]
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(f"report_to: {name}: {first_line(error)}. Or remove it from report_to.") from None
    return made


def with_installed_attention(config: RunConfig) -> RunConfig:
    """Replaces a flash implementation whose package is not installed by sdpa, which computes the same attention."""
    name = config.attn_implementation or ""
    needs = "kernels" if "/" in name else "flash_attn_interface" if name.endswith("_3") else "flash_attn"
    if ("flash" not in name and "/" not in name) or find_spec(needs) is not None:
        return config
    log.warning("attn_implementation: %s needs the package %s, which is not installed: sdpa is used", name, needs)
    return replace(config, attn_implementation="sdpa")


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


def require_positions(model: Any, sequence_len: int) -> None:
    """A learned table of positions is finite. Computed positions are not, but the model was trained on those of its
    config only.
    """
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known is None or sequence_len <= known:
        return
    # Some position tables begin with a few rows for padding. The token table is excluded.
    tables = (
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
    )
    if any(known <= table.num_embeddings <= known + 8 for table in tables):
        raise ConfigError(
            f"sequence_len: {sequence_len} exceeds the model's {known} positions. Lower it; longer examples are split."
        )
    log.warning("sequence_len is %d, but the model's config has %d positions", sequence_len, known)


def require_vocabulary(model: Any, tokenizer: Any, rows: list[Rows | PackedRows], pad_id: int) -> None:
    size: int = model.get_input_embeddings().num_embeddings
    flat = [(part.documents if isinstance(part, PackedRows) else part).ids for part in rows]
    highest = max(pad_id, *(int(ids.max()) for ids in flat))
    if highest >= size:
        raise ConfigError(
            f"The tokenizer produces token {highest} ({tokenizer.convert_ids_to_tokens(highest)}), but the model has "
            f"{size} tokens. Use the model's own tokenizer, or save the model after resize_token_embeddings."
        )
