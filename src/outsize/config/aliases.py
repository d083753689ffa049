"""Keys of other tools: other names of ours, keys without effect, and keys that are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outsize.base.records import show

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

_RECOMPUTE = "the plan decides per block what is recomputed (plan: {n_checkpoint: 3} fixes how many)"
IGNORED = dict.fromkeys(
    ("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"), _RECOMPUTE
)
"""Per key, why it has no effect."""

_PLANNED = (
    "outsize plans by itself where weights and state live. Remove it; gpu_memory and host_memory set the budgets."
)
_QUANTIZED = "weights are bf16 or fp32, never quantized. Remove it: weights that do not fit the GPU live on the host."
_PARALLEL = "a run uses one GPU. Remove it: weights that do not fit the GPU live on the host."
REFUSED = {
    "deepspeed": _PLANNED,
    "fsdp": _PLANNED,
    "fsdp_config": _PLANNED,
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "fp16": "weights are bf16 with exact fp32 master weights, or fp32. Use bf16: true, or bf16: false for fp32.",
    "auto_find_batch_size": "memory is planned before the first step, so no batch has to fail. Give batch_size alone: "
    "outsize chooses the micro-batch.",
    "tensor_parallel_size": _PARALLEL,
    "context_parallel_size": _PARALLEL,
    "torch_compile": "layers run uncompiled, because the plan's actions run between them. Remove it.",
}
"""Per key, why it is refused and what to do. A key that is off (false, empty, parallel over 1) is ignored."""


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
            problems += [] if _is_off(key, value) else [f"{key}: {show(value)} is not supported: {REFUSED[key]}"]
        elif value is not None and data.get(name) is not None:
            problems.append(f"{key}: means the same as {spelled[name]}, which is given too. Keep {name}.")
        elif value is not None or name not in data:
            data[name], spelled[name] = value, key
    return NormalizedKeys(data=data, spelled=spelled, notes=tuple(notes), problems=tuple(problems))


def spelling_in(mapping: Mapping[Any, Any], key: str) -> str:
    """How the mapping spells the setting that `key` names; `key` itself if it is absent."""
    return next((str(other) for other in mapping if ALIASES.get(other, other) == ALIASES.get(key, key)), key)


def _is_off(key: str, value: Any) -> bool:
    return not value or (key.endswith("_parallel_size") and value == 1)
