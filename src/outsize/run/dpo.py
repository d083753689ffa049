"""Runs with `rl: dpo`: TRL's DPOTrainer under a plan, on the preference pairs of the data.

The reference of a full fine-tuning, and of OSFT, is a second copy of the model with its own plan. With LoRA it is the
base model: the adapter is turned off for its forward.
"""

from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from outsize.base.errors import ConfigError, OutsizeError
from outsize.base.log import log
from outsize.config.run import RunConfig
from outsize.data.collate import widest_batch
from outsize.data.preference import trl_columns
from outsize.data.rows import Rows
from outsize.integrations.hf import OutsizeMixin
from outsize.run.compat_checks import first_line
from outsize.run.trainer import ForRuns


def _trl() -> Any:
    try:
        import trl
    except ImportError:
        raise ConfigError("rl: dpo needs trl, which is not installed. Run: pip install 'outsize[rl]'") from None
    return trl


def dpo_arguments(config: RunConfig, **settings: Any) -> TrainingArguments:
    """`settings`: of TrainingArguments."""
    arguments: TrainingArguments = _trl().DPOConfig(
        **settings,
        beta=config.rl_beta,
        loss_type=list(config.dpo_loss_type),
        loss_weights=list(config.dpo_loss_weights) or None,
        label_smoothing=config.dpo_label_smoothing,
        use_weighting=config.dpo_use_weighting,
        max_length=None,  # pairs are cut when they are read
        pad_to_multiple_of=config.sequence_len if config.pad_to_sequence_len else None,
        gradient_checkpointing=False,
    )
    return arguments


def dpo_trainer(
    config: RunConfig, train: Rows, evaluated: Rows | None, reference: nn.Module | None, **given: Any
) -> Any:
    """`reference`: None with an adapter. `given`: arguments of the Trainer and of `OutsizeMixin`."""
    from datasets import Dataset

    class DpoTrainer(ForRuns, OutsizeMixin, _trl().DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # has tokens

    if given["model"].config.is_encoder_decoder:
        raise ConfigError(
            f"rl: dpo does not work with {type(given['model']).__name__}, which has an encoder. Remove it."
        )
    if hasattr(given["model"].get_output_embeddings(), "modules_to_save"):
        raise ConfigError(
            "lora_modules_to_save: the loss of rl: dpo reads the weight of the output head directly. Remove the head."
        )
    if config.lora_dropout:
        log.warning("lora_dropout has no effect with rl: dpo: DPOTrainer trains without dropout")
    data = [None if rows is None else Dataset.from_dict(trl_columns(rows)) for rows in (train, evaluated)]
    try:
        trainer = DpoTrainer(ref_model=reference, train_dataset=data[0], eval_dataset=data[1], **given)
    except OutsizeError:
        raise
    except ValueError as error:
        raise ConfigError(f"rl: DPOTrainer refuses this run: {first_line(error)}. Change the settings.") from None
    if "ref" in getattr(trainer.model, "peft_config", ()):
        trainer.model.delete_adapter("ref")  # TRL's copy of the new adapter, which changes nothing
    return trainer


def widest_pairs(collator: Any, tokens: int, vocab_size: int, pairs: int) -> dict[str, Tensor]:
    """The batch of pairs that needs the most memory: prompts of one token."""
    batch = widest_batch(collator, rows=2 * pairs, tokens=tokens, vocab_size=vocab_size)
    mask = batch["attention_mask"].clone()
    mask[:, 0] = 0
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "completion_mask": mask}
