"""Compares the disk space that a run's checkpoints and result take with what is free, before the run."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.config.run import RunConfig
from outsize.layout.optimizer import OptimizerLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskNeed:
    checkpoint_bytes: int
    result_bytes: int
    """Of the exported model or adapter."""
    saves: int
    """Checkpoints that the run writes."""

    def total(self, limit: int | None) -> int:
        """With `save_total_limit`, a new checkpoint is written before the oldest is deleted."""
        kept = self.saves if limit is None else min(self.saves, limit + 1)
        return kept * self.checkpoint_bytes + self.result_bytes


def num_steps(config: RunConfig, num_rows: int) -> int:
    """Optimizer steps of a run whose micro-batch is chosen."""
    assert config.micro_batch_size is not None and config.gradient_accumulation_steps is not None
    batch = config.micro_batch_size * config.gradient_accumulation_steps
    return config.max_steps or math.ceil(config.num_epochs * math.ceil(num_rows / batch))


def disk_need(model: nn.Module, args: Any, layout: OptimizerLayout, checkpoint: Path | None, steps: int) -> DiskNeed:
    """`args`: TrainingArguments. `checkpoint`: to resume from. `steps`: of the whole run."""
    is_adapter = hasattr(model, "peft_config")
    params = [param for param in model.parameters() if param.requires_grad or not is_adapter]
    result = sum(param.nbytes for param in params)
    trained = [param for param in params if param.requires_grad and not args.save_only_model]
    state = sum(p.nbytes for p in trained) if is_adapter else 0  # beside PEFT's own file
    state += sum(p.numel() * (4 * len(layout.state) + (2 if p.element_size() == 2 else 0)) for p in trained)
    number = checkpoint.name.rpartition("-")[2] if checkpoint is not None else ""
    left = steps - (int(number) if number.isdecimal() else 0)
    save_steps = args.save_steps if args.save_steps >= 1 else math.ceil(steps * args.save_steps)
    every = {"steps": save_steps, "epoch": steps / args.num_train_epochs}.get(str(args.save_strategy.value))
    saves = math.ceil(left / min(every, steps)) if every and left > 0 else 0
    return DiskNeed(checkpoint_bytes=result + state, result_bytes=result, saves=saves)


def require_disk_space(need: DiskNeed, args: Any) -> None:
    """Refuse a run whose first save cannot fit. Log if later ones cannot."""
    folder, limit = Path(args.output_dir), args.save_total_limit
    free = shutil.disk_usage(folder).free
    each, result = show_bytes(need.checkpoint_bytes), show_bytes(need.result_bytes)
    first = need.result_bytes + (need.checkpoint_bytes if need.saves else 0)
    if first > free:
        checkpoint = f"a checkpoint takes {each} and " if need.saves else ""
        raise ConfigError(
            f"output_dir: {folder} has {show_bytes(free)} free, but {checkpoint}the result takes {result}. Free some, "
            "or set another output_dir."
        )
    if need.total(limit) <= free:
        return
    fitting = (free - need.result_bytes) // need.checkpoint_bytes - 1
    advice = f"Set save_total_limit: {fitting}." if fitting > 0 else "Free some, or set another output_dir."
    log.warning(
        "output_dir: %d checkpoints of %s and the result take %s of disk space, and %s is free. %s",
        need.saves,
        each,
        show_bytes(need.total(limit)),
        show_bytes(free),
        advice,
    )
