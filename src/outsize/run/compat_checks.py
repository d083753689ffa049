"""Whether model, tokenizer, data and settings belong together. Found here in a sentence, not in the first step by an
index out of range.
"""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from outsize.base.errors import ConfigError, ModelUnsupported, tell
from outsize.base.log import log
from outsize.config.run import RunConfig
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows


def first_line(error: Exception) -> str:
    """Of another library's error, as a part of a sentence of ours."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def make_trackers(names: list[str]) -> list[TrainerCallback]:
    try:
        return [kind() for kind in get_reporting_integration_callbacks(names)]
    except (ImportError, RuntimeError, ValueError) as error:
        do = "Install what is missing, or leave it out of report_to"
        raise ConfigError(
            tell("report_to names trackers that are installed", f"transformers says: {first_line(error)}", do)
        ) from None


def require_scheduler(config: RunConfig) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    given = dict(config.lr_scheduler_kwargs or {})
    try:
        get_scheduler(
            config.lr_scheduler, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=given
        )
    except (TypeError, ValueError) as error:
        expected = f"lr_scheduler_kwargs are what lr_scheduler: {config.lr_scheduler} takes"
        raise ConfigError(
            tell(
                expected,
                f"transformers says: {first_line(error)}",
                "Change lr_scheduler_kwargs, or take another lr_scheduler",
            )
        ) from None


def require_language_model(model: Any) -> None:
    if model.get_output_embeddings() is None:
        do = "Name a language model as base_model; others train with OutsizeTrainer"
        raise ModelUnsupported(
            tell(
                "`outsize train` trains models that predict tokens",
                f"{type(model).__name__} has no output head for them",
                do,
            )
        )


def require_packable(model: Any) -> None:
    if model.config.is_encoder_decoder:
        found = f"{type(model).__name__} has an encoder, which sees the whole row"
        raise ConfigError(tell("documents of a packed row do not see each other", found, "Use sample_packing: false"))


def require_positions(model: Any, sequence_len: int) -> None:
    """A table of positions has an end. Computed positions have none, but beyond those of the config the model was not
    trained.
    """
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if known is None or sequence_len <= known:
        return
    # Some tables begin with a few rows for padding. Of a table of tokens nobody cares how long it is.
    tables = (
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
    )
    if any(known <= table.num_embeddings <= known + 8 for table in tables):
        raise ConfigError(
            tell(
                f"sequence_len is at most the model's {known} positions",
                f"it is {sequence_len}",
                "Lower it; longer examples are split",
            )
        )
    log.warning("sequence_len is %d, but the model's config tells of %d positions", sequence_len, known)


def require_vocabulary(model: Any, tokenizer: Any, rows: list[Rows | PackedRows], pad_id: int) -> None:
    size: int = model.get_input_embeddings().num_embeddings
    flat = [(part.documents if isinstance(part, PackedRows) else part).ids for part in rows]
    highest = max(pad_id, *(int(ids.max()) for ids in flat))
    if highest >= size:
        found = f"the tokenizer makes token {highest} ({tokenizer.convert_ids_to_tokens(highest)}) of it"
        do = "Use the tokenizer that belongs to the model, or save the model after resize_token_embeddings"
        raise ConfigError(tell(f"the data is made of the {size} tokens that the model knows", found, do))
