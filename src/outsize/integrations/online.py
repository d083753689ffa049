"""Trainers that generate their training data: TRL's GRPOTrainer and RLOOTrainer.

The loader yields lists of prompts. In the first micro-batch of a block, `_prepare_inputs` generates completions for the
whole block. The plan is made before that, for the longest prompt of the first batch and a completion of full length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from outsize.base.errors import ConfigError
from outsize.integrations.arguments import trl_classes

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object

_BLOCK = ("_step", "_buffered_inputs")
"""TRL's attributes for the number of the micro-batch and the completions of the block."""


class Generates(_Trainer):
    """The part of `OutsizeMixin` for trainers that generate their batches."""

    _planned_for: "dict[str, Any]"
    """The batch that the plan is made for."""

    @property
    def _is_online(self) -> bool:
        """Whether batches are generated; other models then run during generation, not in the loss."""
        return bool(trl_classes(type(self)) & {"GRPOTrainer", "RLOOTrainer"})

    def _tensors_of(self, batch: Any) -> dict[str, Any]:
        """The model's inputs for a batch of the loader."""
        if isinstance(batch, dict):
            return batch
        if not self._is_online:
            name = next(
                (base.__name__ for base in type(self).__mro__ if base.__module__.partition(".")[0] != "outsize"),
                type(self).__name__,
            )
            raise ConfigError(
                f"{name}: its training batches are a {type(batch).__name__}, not a dict of tensors. Pass "
                "plan_batch=, a dict of tensors for the model, or use another trainer."
            )
        self._planned_for = self._longest(batch)
        return self._planned_for

    def _longest(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        length = self._sequence_len
        if length is None:
            if self.args.max_completion_length is None:
                raise ConfigError(
                    "max_completion_length is None, so the longest row is unknown. Set it, or give sequence_len=."
                )
            prompts = self._tokenize_prompts([row["prompt"] for row in rows])
            ids = prompts[0] if isinstance(prompts, tuple) else prompts
            length = max(len(prompt) for prompt in ids) + self.args.max_completion_length
        shape = (self.args.per_device_train_batch_size, length)
        mask = torch.ones(shape, dtype=torch.long)
        mask[0, 0] = 0  # prompts are padded on the left
        return {"input_ids": torch.zeros(shape, dtype=torch.long), "attention_mask": mask}

    def _scored(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of TRL's loss with this number of rows and tokens, as if generated and scored."""
        ids, mask = (batch[name].to(self.args.device) for name in ("input_ids", "attention_mask"))
        rows, length = ids.shape
        kept = max(1, min(self.args.max_completion_length or length - 1, length - 1))
        zeros = torch.zeros(rows, device=ids.device)
        each = torch.zeros(rows, kept, device=ids.device)
        scored: dict[str, Any] = {
            "prompt_ids": ids[:, :-kept],
            "prompt_mask": mask[:, :-kept],
            "completion_ids": ids[:, -kept:],
            "completion_mask": mask[:, -kept:],
            "advantages": zeros,
            "num_items_in_batch": torch.tensor(rows * kept, device=ids.device),
        }
        if "RLOOTrainer" in trl_classes(type(self)):
            return {**scored, "old_logps": zeros}
        return {**scored, "old_per_token_logps": each, **({"ref_per_token_logps": each} if self.beta else {})}

    def _generated(self) -> dict[str, Any]:
        """The state of the block of completions, for a micro-batch that may have to be repeated."""
        return {name: getattr(self, name) for name in _BLOCK} if self._is_online else {}

    @contextmanager
    def _generated_again(self, generated: dict[str, Any]) -> Iterator[None]:
        """Restore an earlier state of the block of completions."""
        now = self._generated()
        self.__dict__.update(generated)
        try:
            yield
        finally:
            self.__dict__.update(now)
