"""The recipe of a run: what its bits depend on. It is kept in every checkpoint, and a run that goes on from one must have the same.

Where bytes live, what is saved or logged when, and how long the run is may differ: none of it changes a step that is made.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outsize.base.errors import BadFile, ConfigError, tell
from outsize.config.run import RunConfig

RECIPE = "run.json"
_FREE = {
    "num_epochs", "max_steps", "output_dir", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "eval_strategy", "eval_steps",
    "eval_batch_size", "test_datasets", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience", "logging_steps", "report_to",
    "dataloader_num_workers", "gpu_memory", "host_memory", "device", "plan_file", "pins", "activation_offloading", "resume_from_checkpoint",
    "auto_resume_from_checkpoints", "chunk_bytes", "notes", "base_model", "reinit_weights",
}  # fmt: skip
"""`base_model`: the weights are the checkpoint's, and it is compared tensor by tensor; the folder may have moved."""


def recipe(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(asdict(config))).items() if name not in _FREE}


def require_same(checkpoint: Path, config: RunConfig) -> None:
    path = checkpoint / RECIPE
    try:
        then = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        do = "Name a checkpoint that `outsize train` wrote"
        raise BadFile(tell(f"{path} says which run the checkpoint is of", str(error), do)) from None
    now = recipe(config)
    other = [f"{name} was {then.get(name)!r} and is {now.get(name)!r}" for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if other:
        do = "Set it back, or train from the checkpoint anew: base_model: " + str(checkpoint)
        raise ConfigError(tell(f"a run that goes on from {checkpoint} has its recipe", "; ".join(other), do))
