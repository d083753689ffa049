"""Keys that people bring from elsewhere: other names for ours, what has no effect here, and what outsize does otherwise
or not at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.base.errors import tell
from outsize.config.values import show

ALIASES = {
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "max_seq_length": "sequence_len",
    "max_length": "sequence_len",
    "cutoff_len": "sequence_len",
    "packing": "sample_packing",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "model_name_or_path": "base_model",
    "use_dora": "peft_use_dora",
}

_RECOMPUTE = "the plan decides per block what is recomputed (plan: {n_checkpoint: 3} would fix how many)"
IGNORED = {
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
}
"""Per key, why it has no effect."""

_PLANNED = ("outsize plans by itself which bytes live where", "Leave it out; gpu_memory and host_memory set budgets")
_QUANTISED = (
    "weights are bf16 or fp32, never quantised",
    "Leave it out: weights that do not fit on the GPU live on the host",
)
_PARALLEL = ("a run is on one GPU", "Leave it out: what does not fit on the GPU lives on the host")
REFUSED = {
    "deepspeed": _PLANNED,
    "fsdp": _PLANNED,
    "fsdp_config": _PLANNED,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "fp16": ("weights are bf16 with exact fp32 masters, or fp32", "Write bf16: true, or bf16: false for fp32"),
    "auto_find_batch_size": (
        "memory is planned before the first step, so no batch has to fail",
        "Give batch_size alone: the micro-batch is then chosen",
    ),
    "tensor_parallel_size": _PARALLEL,
    "context_parallel_size": _PARALLEL,
    "torch_compile": ("layers run as they are, since the plan is carried out between them", "Leave it out"),
}
"""Per key, what is so here and what to do. Where the key is off (false, nothing, parallel over 1), it is as if not
written.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalizedKeys:
    """A mapping in our own names."""

    data: dict[str, Any]
    spelled: dict[str, str]
    """Per name how it was written."""
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def normalize(mapping: Mapping[Any, Any]) -> NormalizedKeys:
    data: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    notes, problems = [], []
    for key, value in ((str(key), value) for key, value in mapping.items()):
        name = ALIASES.get(key, key)
        if key in IGNORED:
            notes += [] if value is None else [f"{key} is ignored: {IGNORED[key]}"]
        elif key in REFUSED:
            expected, do = REFUSED[key]
            problems += [] if _is_off(key, value) else [f"{key}: {tell(expected, f'{show(value)} was given', do)}"]
        elif value is not None and data.get(name) is not None:
            problems.append(
                f"{key}: {tell('a setting is given by one name', f'{spelled[name]} is given too', f'Keep {name}')}"
            )
        elif value is not None or name not in data:
            data[name], spelled[name] = value, key
    return NormalizedKeys(data=data, spelled=spelled, notes=tuple(notes), problems=tuple(problems))


def spelling_in(mapping: Mapping[Any, Any], key: str) -> str:
    """How the mapping spells the setting that `key` names; `key` itself where it does not have it."""
    return next((str(other) for other in mapping if ALIASES.get(other, other) == ALIASES.get(key, key)), key)


def _is_off(key: str, value: Any) -> bool:
    return not value or (key.endswith("_parallel_size") and value == 1)
