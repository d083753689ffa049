"""The recipe of a run: what its bits depend on. It is kept in every checkpoint, and a run that goes on from one must have the same.

Where bytes live, what is saved or logged when, and how long the run is may differ: none of it changes a step that is made.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.base.errors import BadFile, ConfigError, tell
from outsize.config.run import RunConfig
from outsize.train.micro_batch import Split

RECIPE = "run.json"
_FREE = {
    "num_epochs", "max_steps", "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "eval_strategy", "eval_steps",
    "eval_batch_size", "test_datasets", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience", "logging_steps", "report_to",
    "dataloader_num_workers", "gpu_memory", "host_memory", "device", "plan_file", "pins", "activation_offloading", "resume_from_checkpoint",
    "auto_resume_from_checkpoints", "chunk_bytes", "notes", "base_model", "reinit_weights", "batch_size",
}  # fmt: skip
"""`base_model`: the weights are the checkpoint's, and it is compared tensor by tensor; the folder may have moved. `batch_size`: is what it is split into."""


def recipe(config: RunConfig) -> dict[str, Any]:
    """Of a config whose batch is split."""
    return {name: value for name, value in json.loads(json.dumps(asdict(config))).items() if name not in _FREE}


def split_of(checkpoint: Path, splits: Sequence[Split]) -> Split:
    """Of the splits that a config leaves open, the checkpoint's: another would be other bits."""
    then = _read(checkpoint)
    theirs = Split(rows=then["micro_batch_size"], passes=then["gradient_accumulation_steps"])
    if len(splits) > 1 and theirs not in splits:
        batch_size = splits[0].rows * splits[0].passes
        raise _another(checkpoint, [f"batch_size was {theirs.rows * theirs.passes} ({theirs}) and is {batch_size}"])
    return theirs if theirs in splits else splits[0]


def require_same(checkpoint: Path, config: RunConfig) -> None:
    then, now = _read(checkpoint), recipe(config)
    other = [f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if other:
        raise _another(checkpoint, other)


def _another(checkpoint: Path, other: list[str]) -> ConfigError:
    do = "Set it back, or train from the checkpoint anew: base_model: " + str(checkpoint)
    return ConfigError(tell(f"a run that goes on from {checkpoint} has its recipe", "; ".join(other), do))


def _read(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / RECIPE
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError) as error:
        do = "Name a checkpoint that `outsize train` wrote"
        raise BadFile(tell(f"{path} says which run the checkpoint is of", str(error), do)) from None
